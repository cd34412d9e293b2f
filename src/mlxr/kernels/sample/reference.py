"""Reference of `sample`: one row after another in float64."""

# ruff: noqa: ARG001 -- every implementation takes the context
from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mlxr.core.types import TokenLogprob
from mlxr.kernels.checks import refuse
from mlxr.kernels.context import Context
from mlxr.kernels.sample.row import NO_TOKEN, SampleResult, SampleRow
from mlxr.kernels.tensor import FloatArray

Doubles = npt.NDArray[np.float64]

# A bias of +inf means "this token": as large as float32 goes, so that the softmax stays defined.
_LARGEST = float(np.finfo(np.float32).max)


def sample(ctx: Context, logits: FloatArray, rows: Sequence[SampleRow]) -> list[SampleResult]:
    """Draw a token for every row, each by itself."""
    return [_sample_row(index, logits[index], row) for index, row in enumerate(rows)]


def _sample_row(index: int, logits: FloatArray, row: SampleRow) -> SampleResult:
    broken = np.flatnonzero(np.isnan(logits))
    if broken.size:
        refuse("sample", f"logits of row {index}", f"not a number at id {broken[0]}", "numbers")
    adjusted = _adjust(logits, row)
    if not np.isfinite(adjusted.max()):
        return SampleResult(NO_TOKEN, -math.inf, [])
    order = np.lexsort((np.arange(adjusted.shape[0]), -adjusted))  # falling logit, then rising id
    logprobs = adjusted - adjusted.max()
    logprobs -= np.log(np.exp(logprobs).sum())
    token_id = int(order[0]) if row.temperature == 0 else _draw(adjusted, order, row)
    top = [TokenLogprob(int(i), float(logprobs[i])) for i in order[: row.top_logprobs]]
    return SampleResult(token_id, float(logprobs[token_id]), top)


def _adjust(logits: FloatArray, row: SampleRow) -> Doubles:
    """Mask, logit bias, then penalties; a bias of +inf on a logit of -inf leaves the token impossible."""
    adjusted = logits.astype(np.float64)
    if row.mask is not None:
        allowed = np.unpackbits(row.mask.astype("<u4").view(np.uint8), count=adjusted.shape[0], bitorder="little")
        adjusted[allowed == 0] = -np.inf
    with np.errstate(invalid="ignore"):  # inf - inf
        adjusted[row.bias_ids] += row.bias_values
    adjusted = np.minimum(np.where(np.isnan(adjusted), -np.inf, adjusted), _LARGEST)
    seen = adjusted[row.history_ids]
    seen = np.where(seen > 0, seen / row.repetition_penalty, seen * row.repetition_penalty)
    seen -= row.presence_penalty * (row.history_counts > 0) + row.frequency_penalty * row.history_counts
    adjusted[row.history_ids] = seen
    return np.minimum(adjusted, _LARGEST)


def _draw(adjusted: Doubles, order: npt.NDArray[np.intp], row: SampleRow) -> int:
    kept = order[: row.top_k] if row.top_k else order
    weights = np.exp((adjusted[kept] - adjusted[kept[0]]) / row.temperature)  # of the largest: exactly 1
    if row.top_p < 1:
        reached = np.cumsum(weights) >= row.top_p * weights.sum()
        weights = weights[: int(np.argmax(reached)) + 1]
    weights = weights[weights >= row.min_p]  # the largest weight is 1
    cumulative = np.cumsum(weights)
    chosen = int(np.searchsorted(cumulative, row.uniform * cumulative[-1], side="right"))
    return int(kept[min(chosen, weights.shape[0] - 1)])
