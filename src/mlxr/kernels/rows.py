"""Rows of what the operators return, picked and repeated without knowing what an array is made of."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlxr.kernels.context import Context
from mlxr.kernels.gpu.deferred import settle
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.tensor import FloatArray


def take_outputs(ctx: Context, array: FloatArray, batch: RaggedBatch) -> FloatArray:
    """The rows of `array` (T, n) that the batch wants logits of."""
    if ctx.gpu is None:
        return array[batch.output_rows]
    if len(batch.output_rows) == batch.tokens:
        return array  # rows are distinct and rising, so these are all
    picked: FloatArray = ctx.gpu.mx.take(settle(array), ctx.gpu.place(batch).output_rows, axis=0)
    return picked


def repeat_rows(ctx: Context, array: FloatArray, counts: Sequence[int]) -> FloatArray:
    """Row i of `array` counts[i] times, one after another."""
    if all(count == 1 for count in counts):
        return array
    rows = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    if isinstance(array, np.ndarray):
        return array[rows]
    repeated: FloatArray = ctx.gpu.mx.take(array, ctx.gpu.mx.array(rows), axis=0)
    return repeated
