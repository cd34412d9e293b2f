"""Calls the native `activate` of csrc/operators/activate.inc."""

from __future__ import annotations

from mlxr.kernels.arrays import empty
from mlxr.kernels.context import Context
from mlxr.kernels.tensor import FloatArray


def activate(
    ctx: Context,
    gate_up: FloatArray,
    kind: str,
    gated: bool,
    up: FloatArray | None,
    first: int,
    parameters: tuple[float, ...],
) -> FloatArray:
    """act(first half) * second half, or act(gate_up), perhaps times columns of `up`."""
    rows, columns = gate_up.shape
    out = empty(ctx, rows, columns // 2 if gated else columns)
    ctx.module.activate(ctx.native, gate_up, kind, out, gated, up, first, parameters)
    return out
