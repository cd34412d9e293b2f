"""Calls the native `rope` of csrc/operators/rope.inc."""

from __future__ import annotations

from mlxr.kernels.context import Context
from mlxr.kernels.rope.table import RopeTable
from mlxr.kernels.tensor import FloatArray, IntArray


def rope(ctx: Context, x: FloatArray, positions: IntArray, table: RopeTable, factors: FloatArray | None) -> None:
    """Rotate each pair of every head by the angle of its token's position, and multiply by the factor of that."""
    ctx.module.rope(ctx.native, x, positions, table.cos, table.sin, table.interleaved, factors)
