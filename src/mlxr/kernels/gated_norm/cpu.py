"""Calls the native `gated_norm` of csrc/mixers."""

from __future__ import annotations

from mlxr.kernels.buffers import empty
from mlxr.kernels.context import Context
from mlxr.kernels.tensor import FloatArray


def gated_norm(
    ctx: Context,
    x: FloatArray,
    gate: FloatArray,
    weight: FloatArray | None,
    eps: float,
    width: int,
    gate_first: bool,
    first: int,
) -> FloatArray:
    """The norm of each group and the gate."""
    out = empty(ctx, *x.shape)
    ctx.module.gated_norm(ctx.native, x, gate, first, weight, width, eps, gate_first, out)
    return out
