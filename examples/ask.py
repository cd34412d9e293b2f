"""Ask the model that ships with mlxr one question."""

from __future__ import annotations

from mlxr import LLM, SamplingParams

with LLM("demo") as llm:
    reply = llm.chat([{"role": "user", "content": "What does os.path.join do?"}], SamplingParams(max_tokens=100))
    print(reply.text)
    print(f"{reply.usage.completion_tokens} tokens, ended by {reply.finish_reason}")
