"""Arrays of operators, wherever they lie: new ones for results of native code, and rows that are picked or fetched.

A fresh array of some megabytes costs a page fault for each of its pages. The native module keeps the memory of arrays
that nobody holds any more (csrc/runtime/buffers.h); an array may outlive its context. Small arrays come from NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from mlxr.kernels.context import Context
from mlxr.kernels.gpu.deferred import Value, settle
from mlxr.kernels.gpu.recording import Buffer
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.tensor import DeviceArray, FloatArray, IntArray

LARGE = 1 << 17  # numbers from which on memory is kept: below, the allocator of the C library does it


def empty(ctx: Context, rows: int, columns: int) -> FloatArray:
    """A float32 array (rows, columns) whose contents are undefined."""
    if rows * columns < LARGE:
        return np.empty((rows, columns), np.float32)
    return ctx.module.empty(ctx.native, rows, columns)


def take_outputs(ctx: Context, array: FloatArray, batch: RaggedBatch) -> FloatArray:
    """The rows of `array` (T, n) that the batch wants logits of."""
    if ctx.gpu is None:
        return array if len(batch.output_rows) == batch.tokens == 1 else array[batch.output_rows]
    if len(batch.output_rows) == batch.tokens:
        return array  # rows are distinct and rising, so these are all
    return _pass(ctx.gpu.mx.take(_settle(array), ctx.gpu.place(batch).output_rows, axis=0))


def put_rows(
    ctx: Context, array: FloatArray, places: IntArray, values: FloatArray, *, adds: bool = False
) -> FloatArray:
    """`array` (T, n), which may be written to, with `values` in the rows `places`, or added to what is there."""
    if ctx.gpu is None:
        array[places] = array[places] + values if adds else values
        return array
    mx, made = ctx.gpu.mx, _settle(array)
    rows, at = mx.array(values).astype(made.dtype), mx.array(places)
    made[at] = made[at] + rows if adds else rows
    return _pass(made)


def cut_rows(array: FloatArray, rows: int, columns: int) -> FloatArray:
    """The numbers of `array`, one after another, as so many rows of so many columns."""
    return _pass(_settle(array).reshape(rows, columns))


def join_columns(ctx: Context, left: FloatArray, right: FloatArray) -> FloatArray:
    """The columns of `left` (T, n), then those of `right` (T, m)."""
    if ctx.gpu is None:
        return np.concatenate([left, right], axis=1)
    return _pass(ctx.gpu.mx.concatenate([_settle(left), _settle(right)], axis=1))


def repeat_rows(ctx: Context, array: FloatArray, counts: Sequence[int]) -> FloatArray:
    """Row i of `array` counts[i] times, one after another."""
    if all(count == 1 for count in counts):
        return array
    rows = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    if isinstance(array, np.ndarray):
        return array[rows]
    if isinstance(array, Buffer):
        array = ctx.gpu.mx.array(np.asarray(array))
    repeated: FloatArray = ctx.gpu.mx.take(array, ctx.gpu.mx.array(rows), axis=0)
    return repeated


def fetch_rows(ctx: Context, array: FloatArray) -> FloatArray:
    """`array` (R, n) in the host's memory, as f32; on a GPU this computes it and whatever is pending."""
    if ctx.gpu is None:
        return array
    if not array.shape[0]:
        ctx.gpu.submit()
        return np.zeros(array.shape, np.float32)
    wide = _settle(array).astype(ctx.gpu.mx.float32)
    ctx.gpu.submit(wide)
    return np.ascontiguousarray(np.asarray(wide))


def place_rows(ctx: Context, array: FloatArray) -> FloatArray:
    """Rows (R, n) in the host's memory where the operators of the context want them."""
    return array if ctx.gpu is None else _pass(ctx.gpu.mx.array(array))


def hold(ctx: Context, array: FloatArray) -> FloatArray:
    """Numbers of the host that stay the same, where the operators of the context want them, put there once."""
    return array if ctx.gpu is None else _pass(ctx.gpu.hold(array))


def widen(ctx: Context, array: FloatArray) -> FloatArray:
    """`array` as what is there, in f32, for operations of MLX; on a GPU it may have waited for another operator."""
    return array if ctx.gpu is None else _pass(_settle(array).astype(ctx.gpu.mx.float32))


def finish(ctx: Context, array: FloatArray) -> FloatArray:
    """`array` in f32 once it and whatever was pending are computed, for which only a GPU makes one wait."""
    if ctx.gpu is None:
        return array
    made = widen(ctx, array)
    ctx.gpu.submit(cast(DeviceArray, made))
    ctx.gpu.mx.eval(made)
    return made


def _settle(array: FloatArray) -> DeviceArray:
    """The array that there is; the types of operators say NumPy's for those of all devices."""
    return settle(cast(Value, array))


def _pass(array: DeviceArray) -> FloatArray:
    """The array as operators take it."""
    return cast(FloatArray, array)
