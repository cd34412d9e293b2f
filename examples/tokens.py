"""See a text as a model does: its tokens, and those that the model expected."""

from __future__ import annotations

from math import exp

from mlxr import LLM, SamplingParams

with LLM("demo") as llm:
    ids = llm.tokenize("import os.path")
    print([llm.detokenize([number]) for number in ids])
    (completion,) = llm.generate([ids], SamplingParams(max_tokens=6, temperature=0, logprobs=3))
    for token in completion.tokens:
        others = ", ".join(f"{llm.detokenize([one.token_id])!r} {exp(one.logprob):.0%}" for one in token.top)
        print(f"{llm.detokenize([token.chosen.token_id])!r}: {others}")
