"""Calls the native `rope` of csrc/rope.inc."""

from __future__ import annotations

from mlxr.kernels.context import Context
from mlxr.kernels.rope.table import RopeTable
from mlxr.kernels.tensor import FloatArray, IntArray


def rope(ctx: Context, x: FloatArray, positions: IntArray, table: RopeTable) -> None:
    """Rotate each pair of every head by the angle of its token's position."""
    ctx.module.rope(ctx.native, x, positions, table.cos, table.sin, table.interleaved)
