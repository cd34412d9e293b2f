"""`sample` on a GPU: where every row takes its largest logit, only ids and log-probabilities come back.

Other rules need the candidates in order and their exact sums: the host computes those, in float64.
"""

# ruff: noqa: ARG001 -- every implementation takes the rows
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mlxr.kernels.checks import refuse
from mlxr.kernels.context import Context
from mlxr.kernels.gpu.graph import draw_recorded
from mlxr.kernels.gpu.recording import Buffer
from mlxr.kernels.gpu.steps import DRAW
from mlxr.kernels.sample.row import SampleResult, SampleRow
from mlxr.kernels.tensor import FloatArray

KERNELS = (DRAW,)


def sample(ctx: Context, logits: Any, rows: Sequence[SampleRow]) -> list[SampleResult]:
    """Every row by itself; they are rows that `takes_rows` takes."""
    mx, drawn = ctx.gpu.mx, ctx.gpu.drawn
    if isinstance(logits, Buffer):
        ids, logprobs = draw_recorded(ctx.gpu, logits)
    elif drawn is not None and drawn[0] is logits:
        _, ids, logprobs = drawn
    else:
        wide = logits.astype(mx.float32)
        ids, logprobs = mx.argmax(wide, axis=1), mx.max(wide, axis=1) - mx.logsumexp(wide, axis=1)
        mx.eval(ids, logprobs)
    results = [SampleResult(i, p, []) for i, p in zip(ids.tolist(), logprobs.tolist(), strict=True)]
    for index, result in enumerate(results):
        if not np.isfinite(result.logprob):
            refuse("sample", f"logits of row {index}", "not all numbers, or none of them finite", "numbers")
    return results


def takes_rows(rows: Sequence[SampleRow]) -> bool:
    """Whether all rows take their largest logit and ask for nothing else."""
    return all(_is_plain(row) for row in rows)


def fetch_logits(ctx: Context, logits: Any) -> FloatArray:
    """The logits on the host."""
    if isinstance(logits, Buffer):
        return np.asarray(ctx.gpu.steps.fetch(logits))
    return np.ascontiguousarray(np.asarray(logits.astype(ctx.gpu.mx.float32)))


def _is_plain(row: SampleRow) -> bool:
    """Whether the token is that of the largest logit as it stands, and nothing else is asked for."""
    penalties = (row.repetition_penalty, row.presence_penalty, row.frequency_penalty)
    unchanged = penalties == (1.0, 0.0, 0.0) or not row.history_ids.shape[0]
    is_greedy = row.temperature == 0 and row.mask is None and not row.top_logprobs
    return is_greedy and unchanged and not row.bias_ids.shape[0]
