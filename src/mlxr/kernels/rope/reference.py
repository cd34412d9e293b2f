"""NumPy reference of `rope`, which defines its numbers."""

# ruff: noqa: ARG001 -- every implementation takes the context
from __future__ import annotations

from mlxr.kernels.checks import refuse
from mlxr.kernels.context import Context
from mlxr.kernels.rope.table import RopeTable
from mlxr.kernels.tensor import FloatArray, IntArray


def rope(ctx: Context, x: FloatArray, positions: IntArray, table: RopeTable, factors: FloatArray | None) -> None:
    """Rotate each pair (a, b) of every head by the angle of its token's position, then multiply by the factor there."""
    if positions.shape[0] and (positions.min() < 0 or positions.max() >= table.positions):
        refuse("rope", "positions", positions.tolist(), f"positions from 0 to {table.positions - 1}")
    cos = table.cos[positions][:, None, :]
    sin = table.sin[positions][:, None, :]
    rotated = x[:, :, : table.rot_dim]
    half = table.rot_dim // 2
    a = rotated[:, :, 0::2] if table.interleaved else rotated[:, :, :half]
    b = rotated[:, :, 1::2] if table.interleaved else rotated[:, :, half:]
    new_a, new_b = a * cos - b * sin, b * cos + a * sin
    a[...] = new_a
    b[...] = new_b
    if factors is not None:
        x *= factors[positions][:, None, None]
