"""Reference of `write_pages`."""

# ruff: noqa: ARG001 -- every implementation takes the context
from __future__ import annotations

import numpy as np

from mlxr.kernels.checks import refuse
from mlxr.kernels.context import Context
from mlxr.kernels.packing import locate_keys, locate_values, round_to_bf16
from mlxr.kernels.tensor import BFLOAT16, FloatArray, IntArray, PoolArray


def write_pages(
    ctx: Context, k: FloatArray, v: FloatArray, k_pool: PoolArray, v_pool: PoolArray, slots: IntArray
) -> None:
    """Slot s is offset s % page_size of page s // page_size."""
    pages, kv_heads, page_size, head_dim = k_pool.shape
    if slots.shape[0] and (slots.min() < 0 or slots.max() >= pages * page_size):
        refuse("write_pages", "slots", slots.tolist(), f"slots from 0 to {pages * page_size - 1}")
    page_ids, positions = np.divmod(slots, page_size)
    if k_pool.dtype != BFLOAT16:
        k_pool[page_ids, :, positions] = k
        v_pool[page_ids, :, positions] = v
        return
    heads = np.arange(kv_heads)[None, :, None]
    for pool, rows, offsets in (
        (k_pool, k, locate_keys(page_size, head_dim)),
        (v_pool, v, locate_values(page_size, head_dim)),
    ):
        flat = pool.reshape(pages, kv_heads, -1)
        flat[page_ids[:, None, None], heads, offsets[positions][:, None]] = round_to_bf16(rows)
