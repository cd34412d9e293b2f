"""Ask one question after the other; the model gets the whole conversation each time."""

from __future__ import annotations

from mlxr import LLM, SamplingParams

with LLM("demo") as llm:
    messages: list[dict[str, str]] = []
    for question in ("What does os.path.join do?", "How do I call time.sleep?", "What is json?"):
        messages.append({"role": "user", "content": question})
        reply = llm.chat(messages, SamplingParams(max_tokens=60, temperature=0))
        messages.append({"role": "assistant", "content": reply.text})
        print(f"> {question}\n{reply.text}\n")
