"""Calls the native `scale` of csrc/operators/scale.inc."""

from __future__ import annotations

from mlxr.kernels.buffers import empty
from mlxr.kernels.context import Context
from mlxr.kernels.tensor import FloatArray

NO_SOFTCAP = 0.0


def scale(ctx: Context, x: FloatArray, factor: float, softcap: float | None) -> FloatArray:
    """x * factor, perhaps capped."""
    out = empty(ctx, *x.shape)
    ctx.module.scale(ctx.native, x, factor, softcap or NO_SOFTCAP, out)
    return out
