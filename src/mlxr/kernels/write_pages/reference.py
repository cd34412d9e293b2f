"""NumPy reference of `write_pages`, which defines its numbers."""

# ruff: noqa: ARG001 -- every implementation takes the context
from __future__ import annotations

import numpy as np

from mlxr.kernels.checks import refuse
from mlxr.kernels.context import Context
from mlxr.kernels.packing import locate_keys, locate_values, round_to_bf16, round_to_q8
from mlxr.kernels.tensor import BFLOAT16, INT8, SCALE_BYTES, FloatArray, IntArray, PoolArray, pool_head_dim


def write_pages(
    ctx: Context, k: FloatArray, v: FloatArray, k_pool: PoolArray, v_pool: PoolArray, slots: IntArray
) -> None:
    """Slot s is offset s % page_size of page s // page_size."""
    (pages, kv_heads, page_size), head_dim = k_pool.shape[:3], pool_head_dim(k_pool)
    if slots.shape[0] and (slots.min() < 0 or slots.max() >= pages * page_size):
        refuse("write_pages", "slots", slots.tolist(), f"slots from 0 to {pages * page_size - 1}")
    page_ids, positions = np.divmod(slots, page_size)
    if k_pool.dtype not in (BFLOAT16, INT8):
        k_pool[page_ids, :, positions] = k
        v_pool[page_ids, :, positions] = v
        return
    heads = np.arange(kv_heads)[None, :, None]
    for pool, rows, offsets in (
        (k_pool, k, locate_keys(page_size, head_dim)),
        (v_pool, v, locate_values(page_size, head_dim)),
    ):
        flat = pool.reshape(pages, kv_heads, -1)
        places = page_ids[:, None, None], heads, offsets[positions][:, None]
        if pool.dtype == BFLOAT16:
            flat[places] = round_to_bf16(rows)
            continue
        flat[places], scales = round_to_q8(rows)
        scale_bytes = page_size * head_dim + positions[:, None] * SCALE_BYTES + np.arange(SCALE_BYTES)
        flat[page_ids[:, None, None], heads, scale_bytes[:, None]] = scales[..., None].view(np.int8)
