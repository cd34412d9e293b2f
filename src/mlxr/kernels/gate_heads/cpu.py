"""Calls the native `gate_heads` of csrc/operators/scale.inc."""

from __future__ import annotations

from mlxr.kernels.buffers import empty
from mlxr.kernels.context import Context
from mlxr.kernels.tensor import FloatArray


def gate_heads(ctx: Context, x: FloatArray, gates: FloatArray) -> FloatArray:
    """x times the sigmoid of its gate."""
    out = empty(ctx, *x.shape)
    ctx.module.gate_heads(ctx.native, x, gates, out)
    return out
