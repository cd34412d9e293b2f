"""Ask two questions about one text: the second finds the text in the cache and computes only its own words."""

from __future__ import annotations

from mlxr import LLM, SamplingParams

text = "os.path.join joins the parts of a path. " * 40

with LLM("demo") as llm:
    for question in ("What does os.path.join do?", "What does os.path.split do?"):
        messages = [{"role": "user", "content": f"{text}\n\n{question}"}]
        usage = llm.chat(messages, SamplingParams(max_tokens=30, temperature=0)).usage
        print(f"{question} {usage.prompt_tokens} tokens, {usage.cached_tokens} of them from the cache")
