"""Calls the native `write_pages` of csrc/operators/write_pages.inc."""

from __future__ import annotations

from mlxr.kernels.context import Context
from mlxr.kernels.tensor import FloatArray, IntArray, PoolArray


def write_pages(
    ctx: Context, k: FloatArray, v: FloatArray, k_pool: PoolArray, v_pool: PoolArray, slots: IntArray
) -> None:
    """Scatter the rows into their slots; of two rows with one slot the later stays."""
    ctx.module.write_pages(ctx.native, k, v, k_pool, v_pool, slots)
