"""Helpers for operators' arrays on any device: new arrays for results, and rows that are picked, joined or fetched.

A fresh array of some megabytes costs a page fault for each of its pages, so the native module reuses the memory of
arrays that nobody holds any more (csrc/runtime/buffers.h). An array may outlive its context. Small arrays come from
NumPy.
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

LARGE = 1 << 17  # numbers in an array whose memory is kept; for smaller ones the C library's allocator does that


def empty(ctx: Context, rows: int, columns: int) -> FloatArray:
    """Return a float32 array (rows, columns) with undefined contents."""
    if rows * columns < LARGE:
        return np.empty((rows, columns), np.float32)
    return ctx.module.empty(ctx.native, rows, columns)


def take_outputs(ctx: Context, array: FloatArray, batch: RaggedBatch) -> FloatArray:
    """Return the rows of `array` (T, n) whose logits the batch wants."""
    if ctx.gpu is None:
        return array if len(batch.output_rows) == batch.tokens == 1 else array[batch.output_rows]
    if len(batch.output_rows) == batch.tokens:
        return array  # rows are distinct and rising, so these are all
    return _pass(ctx.gpu.mx.take(_settle(array), ctx.gpu.place(batch).output_rows, axis=0))


def put_rows(
    ctx: Context, array: FloatArray, places: IntArray, values: FloatArray, *, adds: bool = False
) -> FloatArray:
    """Return `array` (T, n) with `values` put into, or added to, its rows `places`; `array` may be overwritten."""
    if ctx.gpu is None:
        array[places] = array[places] + values if adds else values
        return array
    mx, made = ctx.gpu.mx, _settle(array)
    rows, at = mx.array(values).astype(made.dtype), mx.array(places)
    made[at] = made[at] + rows if adds else rows
    return _pass(made)


def cut_rows(array: FloatArray, rows: int, columns: int) -> FloatArray:
    """Return `array` reshaped to (rows, columns)."""
    return _pass(_settle(array).reshape(rows, columns))


def join_columns(ctx: Context, left: FloatArray, right: FloatArray) -> FloatArray:
    """Return the columns of `left` (T, n), then those of `right` (T, m), as one array."""
    if ctx.gpu is None:
        return np.concatenate([left, right], axis=1)
    return _pass(ctx.gpu.mx.concatenate([_settle(left), _settle(right)], axis=1))


def repeat_rows(ctx: Context, array: FloatArray, counts: Sequence[int]) -> FloatArray:
    """Return an array with row i of `array` repeated counts[i] times."""
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
    """Return `array` (R, n) in host memory as f32; on a GPU this waits for it and for everything pending."""
    if ctx.gpu is None:
        return array
    if not array.shape[0]:
        ctx.gpu.submit()
        return np.zeros(array.shape, np.float32)
    wide = _settle(array).astype(ctx.gpu.mx.float32)
    ctx.gpu.submit(wide)
    return np.ascontiguousarray(np.asarray(wide))


def place_rows(ctx: Context, array: FloatArray) -> FloatArray:
    """Return rows (R, n) of host memory as the operators of the context want them."""
    return array if ctx.gpu is None else _pass(ctx.gpu.mx.array(array))


def hold(ctx: Context, array: FloatArray) -> FloatArray:
    """Return constants of host memory as the operators of the context want them; they are copied to a GPU once."""
    return array if ctx.gpu is None else _pass(ctx.gpu.hold(array))


def widen(ctx: Context, array: FloatArray) -> FloatArray:
    """Return `array` in f32 for operations of MLX or NumPy; on a GPU, an operator that it was deferred to runs now."""
    return array if ctx.gpu is None else _pass(_settle(array).astype(ctx.gpu.mx.float32))


def finish(ctx: Context, array: FloatArray) -> FloatArray:
    """Return `array` in f32 after it and everything pending is computed; only on a GPU does this wait."""
    if ctx.gpu is None:
        return array
    made = widen(ctx, array)
    ctx.gpu.submit(cast(DeviceArray, made))
    ctx.gpu.mx.eval(made)
    return made


def _settle(array: FloatArray) -> DeviceArray:
    """Return the device's array, with its right type: operators' signatures say NumPy arrays for all devices."""
    return settle(cast(Value, array))


def _pass(array: DeviceArray) -> FloatArray:
    """Return the array with the type that operators' signatures say."""
    return cast(FloatArray, array)
