"""Reference of `sample`: one row after another in float64. The rules that leave candidates out are in `rules`."""

# ruff: noqa: ARG001 -- every implementation takes the context
from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mlxr.core.types import TokenLogprob
from mlxr.kernels.checks import refuse
from mlxr.kernels.context import Context
from mlxr.kernels.sample.row import NO_TOKEN, SampleResult, SampleRow
from mlxr.kernels.sample.rules import Doubles, choose
from mlxr.kernels.tensor import FloatArray

# A bias of +inf means "this token": as large as float32 goes, so that the softmax stays defined.
_LARGEST = float(np.finfo(np.float32).max)


def sample(ctx: Context, logits: FloatArray, rows: Sequence[SampleRow]) -> list[SampleResult]:
    """Choose the token of each row by itself."""
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
    possible = order[np.isfinite(adjusted[order])]
    place, surprise = choose(adjusted[possible], row)
    token_id = int(possible[place])
    top = [TokenLogprob(int(i), float(logprobs[i])) for i in order[: row.top_logprobs]]
    return SampleResult(token_id, float(logprobs[token_id]), top, surprise)


def _adjust(logits: FloatArray, row: SampleRow) -> Doubles:
    """Mask, logit bias, then penalties; a bias of +inf on a logit of -inf leaves the token impossible."""
    adjusted, params = logits.astype(np.float64), row.params
    if row.mask is not None:
        allowed = np.unpackbits(row.mask.astype("<u4").view(np.uint8), count=adjusted.shape[0], bitorder="little")
        adjusted[allowed == 0] = -np.inf
    with np.errstate(invalid="ignore"):  # inf - inf
        adjusted[row.bias_ids] += row.bias_values
    adjusted = np.minimum(np.where(np.isnan(adjusted), -np.inf, adjusted), _LARGEST)
    seen = adjusted[row.history_ids]
    seen = np.where(seen > 0, seen / params.repetition_penalty, seen * params.repetition_penalty)
    seen -= params.presence_penalty * (row.history_counts > 0) + params.frequency_penalty * row.history_counts
    adjusted[row.history_ids] = seen
    adjusted[row.dry_ids] -= row.dry_penalties
    return np.minimum(adjusted, _LARGEST)
