"""Guess tokens from the text and check them in one pass: the same answer, in fewer steps."""

from __future__ import annotations

import time

from mlxr import LLM, SamplingParams

question = [{"role": "user", "content": "Explain json.dumps."}]
texts = []
for draft in ("off", "ngram", "demo-draft"):
    with LLM("demo", draft=draft) as llm:
        start_s = time.perf_counter()
        reply = llm.chat(question, SamplingParams(max_tokens=100, temperature=0))
        texts.append(reply.text)
        print(f"{draft:>10}: {reply.usage.completion_tokens} tokens in {time.perf_counter() - start_s:.2f} s")
print(texts[0])
print(f"all equal: {len(set(texts)) == 1}")
