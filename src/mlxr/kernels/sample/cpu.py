"""Native `sample`: csrc/sample/sample.cpp, which reads the rows as they are.

A row of logits that holds not-a-number is an error that names row and id: something before went wrong, and a draw
from the rest would hide it.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlxr.core.types import TokenLogprob
from mlxr.kernels.context import Context
from mlxr.kernels.sample import SampleResult, SampleRow
from mlxr.kernels.tensor import FloatArray


def sample(ctx: Context, logits: FloatArray, rows: Sequence[SampleRow]) -> list[SampleResult]:
    """Every row by itself, rows spread over the threads."""
    return [
        SampleResult(token_id, logprob, [TokenLogprob(*best) for best in top], surprise)
        for token_id, logprob, top, surprise in ctx.module.sample(ctx.native, logits, rows)
    ]
