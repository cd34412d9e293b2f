"""Get several answers to one prompt, which is computed once, and the probabilities of their tokens."""

from __future__ import annotations

from math import exp

from mlxr import LLM, SamplingParams

with LLM("demo") as llm:
    params = SamplingParams(n=4, seed=1, temperature=1.0, max_tokens=12, logprobs=0)
    (first,) = llm.generate("import os\nimport ", params)
    for choice in first.choices:
        likelihood = exp(sum(token.chosen.logprob for token in choice.tokens) / max(len(choice.tokens), 1))
        print(f"{likelihood:5.0%}  {choice.text!r}")
