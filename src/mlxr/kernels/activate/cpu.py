"""Calls the native `activate` of csrc/activate.inc."""

from __future__ import annotations

from mlxr.kernels.buffers import empty
from mlxr.kernels.context import Context
from mlxr.kernels.tensor import FloatArray


def activate(ctx: Context, gate_up: FloatArray, kind: str) -> FloatArray:
    """act(first half) * second half."""
    out = empty(ctx, gate_up.shape[0], gate_up.shape[1] // 2)
    ctx.module.activate(ctx.native, gate_up, kind, out)
    return out
