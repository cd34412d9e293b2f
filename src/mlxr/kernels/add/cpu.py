"""Calls the native `add` of csrc/operators/scale.inc."""

from __future__ import annotations

from mlxr.kernels.buffers import empty
from mlxr.kernels.context import Context
from mlxr.kernels.tensor import FloatArray


def add(ctx: Context, x: FloatArray, other: FloatArray, factor: float) -> FloatArray:
    """(x + other) * factor."""
    out = empty(ctx, *x.shape)
    ctx.module.add(ctx.native, x, other, factor, out)
    return out
