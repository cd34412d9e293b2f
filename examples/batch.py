"""Answer many prompts at once. Each answer is the same, to the bit, as if it had been asked alone."""

from __future__ import annotations

import time

from mlxr import LLM, SamplingParams

prompts = [
    f"def {name}(" for name in ("read_file", "sort_items", "open_socket", "parse", "main", "close", "copy", "run")
]
params = [SamplingParams(max_tokens=24, temperature=0.8, seed=number) for number in range(len(prompts))]

with LLM("demo") as llm:
    start_s = time.perf_counter()
    together = llm.generate(prompts, params)
    batch_s = time.perf_counter() - start_s

    start_s = time.perf_counter()
    alone = [llm.generate(prompt, own)[0] for prompt, own in zip(prompts, params, strict=True)]
    alone_s = time.perf_counter() - start_s

    for prompt, completion in zip(prompts, together, strict=True):
        print(f"{prompt}{completion.text.splitlines()[0] if completion.text else ''}")
    print(f"together in {batch_s:.2f} s, one after another in {alone_s:.2f} s; equal: {together == alone}")
