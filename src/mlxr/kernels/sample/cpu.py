"""Native `sample`: csrc/sample.cpp. Here the rows are laid out as arrays, one line of numbers for each.

A row of logits that holds not-a-number is an error that names row and id: something before went wrong, and a draw
from the rest would hide it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from mlxr.core.types import TokenLogprob
from mlxr.kernels.checks import AnyArray
from mlxr.kernels.context import Context
from mlxr.kernels.sample.row import NO_IDS, NO_TOKEN, NO_VALUES, SampleResult, SampleRow
from mlxr.kernels.tensor import FloatArray, IntArray

_INT32_MAX = 2**31 - 1
_NO_MASKS = np.empty((0, 0), np.uint32)


def sample(ctx: Context, logits: FloatArray, rows: Sequence[SampleRow]) -> list[SampleResult]:
    """Every row by itself, rows spread over the threads."""
    vocabulary = logits.shape[1]
    tops = [min(row.top_logprobs, vocabulary) for row in rows]
    numbers = np.array([_numbers(row) for row in rows], np.float64)
    counts = np.array([(min(row.top_k, _INT32_MAX), top) for row, top in zip(rows, tops, strict=True)], np.int32)
    history, biased = [row.history_ids for row in rows], [row.bias_ids for row in rows]
    token_ids, logprobs = np.empty(len(rows), np.int32), np.empty(len(rows), np.float64)
    top_ids = np.empty((len(rows), max(tops)), np.int32)
    top_logprobs = np.empty(top_ids.shape, np.float64)
    ctx.module.sample(
        ctx.native,
        logits,
        numbers,
        counts,
        _join(history, NO_IDS),
        _join([row.history_counts for row in rows], NO_IDS),
        _starts(history),
        _join(biased, NO_IDS),
        _join([row.bias_values for row in rows], NO_VALUES),
        _starts(biased),
        *_stack_masks(rows),
        token_ids,
        logprobs,
        top_ids,
        top_logprobs,
    )
    return [
        SampleResult(token_id, logprob, _pair(top_ids[i, :top], top_logprobs[i, :top]) if top else [])
        if token_id != NO_TOKEN
        else SampleResult(NO_TOKEN, -math.inf, [])
        for i, (token_id, logprob, top) in enumerate(zip(token_ids.tolist(), logprobs.tolist(), tops, strict=True))
    ]


def _numbers(row: SampleRow) -> tuple[float, ...]:
    """In the order of the columns in csrc/bindings_operators.cpp."""
    return (
        row.temperature,
        row.top_p,
        row.min_p,
        row.repetition_penalty,
        row.presence_penalty,
        row.frequency_penalty,
        row.uniform,
    )


def _stack_masks(rows: Sequence[SampleRow]) -> tuple[npt.NDArray[np.uint32], IntArray]:
    """All masks, one in each row of an array, and which of them each row of logits has; -1 for none."""
    places = np.full(len(rows), -1, np.int32)
    masked = [index for index, row in enumerate(rows) if row.mask is not None]
    if not masked:
        return _NO_MASKS, places
    places[masked] = np.arange(len(masked))
    return np.array([row.mask for row in rows if row.mask is not None]), places


def _join(parts: list[AnyArray], empty: AnyArray) -> AnyArray:
    """The parts of all rows behind one another."""
    filled = [part for part in parts if part.shape[0]]
    if not filled:
        return empty
    return filled[0] if len(filled) == 1 else np.concatenate(filled)


def _starts(parts: list[AnyArray]) -> IntArray:
    """Where each part starts in what `_join` gives, and the length of it all at the end."""
    return np.array([0, *accumulate(part.shape[0] for part in parts)], np.int32)


def _pair(ids: IntArray, logprobs: npt.NDArray[np.float64]) -> list[TokenLogprob]:
    return [TokenLogprob(token_id, logprob) for token_id, logprob in zip(ids.tolist(), logprobs.tolist(), strict=True)]
