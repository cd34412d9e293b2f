"""Reference of `attend`: gather the pages of each sequence, then plain softmax attention head by head.

Gathering copies keys and values; the ledger counts those bytes.
"""

# ruff: noqa: ARG001 -- every implementation takes the context
from __future__ import annotations

import numpy as np

from mlxr.kernels.attend.scores import Scores
from mlxr.kernels.checks import refuse
from mlxr.kernels.context import Context
from mlxr.kernels.pools import Offsets, locate_keys, locate_values, widen_bf16, widen_q8
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.tensor import (
    BFLOAT16,
    INT8,
    POOL_DTYPES,
    FloatArray,
    IntArray,
    PoolArray,
    pool_head_dim,
    pool_row_length,
)


def allocate_pool(ctx: Context, pages: int, kv_heads: int, page_size: int, head_dim: int, kv_type: str) -> PoolArray:
    """Make a pool of keys or of values, filled with zeros."""
    return np.zeros((pages, kv_heads, page_size, pool_row_length(kv_type, head_dim)), POOL_DTYPES[kv_type])


def attend(
    ctx: Context, q: FloatArray, k_pool: PoolArray, v_pool: PoolArray, batch: RaggedBatch, scores: Scores
) -> FloatArray:
    """Every sequence by itself."""
    (tokens, heads, head_dim), sliding_window = q.shape, scores.sliding_window
    page_size = k_pool.shape[2]
    key_offsets, value_offsets = locate_keys(page_size, head_dim), locate_values(page_size, head_dim)
    value_dim = scores.value_dim or head_dim
    output = np.empty((tokens, heads, value_dim), np.float32)
    for sequence in range(batch.sequences):
        start, stop = int(batch.query_starts[sequence]), int(batch.query_starts[sequence + 1])
        positions, length = batch.positions[start:stop], int(batch.context_lengths[sequence])
        first_page = 0 if sliding_window is None else max(0, int(positions[0]) + 1 - sliding_window) // page_size
        pages, first = batch.page_table[sequence, first_page:], first_page * page_size  # those before may be gone
        keys = gather_pages(ctx, k_pool, pages, length - first, key_offsets)
        values = (
            keys[:, :, head_dim - value_dim :]
            if scores.value_dim is not None
            else gather_pages(ctx, v_pool, pages, length - first, value_offsets)
        )
        ends = batch.ends[start:stop] - np.int32(first) if scores.whole_pictures else None
        visible = mask_positions(
            positions - np.int32(first), length - first, sliding_window, symmetric=scores.symmetric, ends=ends
        )
        span = 0 if scores.biases is None else scores.biases.shape[1] // 2
        places = np.clip(np.arange(first, length) - positions[:, None], -span, span) + span  # among the biases
        group = heads // keys.shape[0]
        for head in range(heads):
            products = q[start:stop, head] @ keys[head // group].T
            capped = cap(products * np.float32(scores.scale), scores.softcap)
            if scores.biases is not None:
                capped = capped + scores.biases[head][places]
            seen = np.where(visible, capped, -np.inf)
            sink = None if scores.sinks is None else scores.sinks[head]
            output[start:stop, head] = softmax(seen, sink) @ values[head // group]
    return output.reshape(tokens, heads * value_dim)


def gather_pages(ctx: Context, pool: PoolArray, page_ids: IntArray, length: int, offsets: Offsets) -> FloatArray:
    """The first `length` positions of a sequence: (kv_heads, length, head_dim); `offsets` unpack packed pages."""
    (pages, kv_heads, page_size), head_dim = pool.shape[:3], pool_head_dim(pool)
    used = page_ids[: -(-length // page_size)]
    if used.min() < 0 or used.max() >= pages:
        refuse("attend", "page_table", used.tolist(), f"pages from 0 to {pages - 1}")
    taken = pool[used]
    if pool.dtype == BFLOAT16:
        taken = widen_bf16(taken.reshape(len(used), kv_heads, -1)[:, :, offsets])
    elif pool.dtype == INT8:
        taken = widen_q8(taken.reshape(len(used), kv_heads, -1), offsets)
    gathered = taken.transpose(1, 0, 2, 3).reshape(kv_heads, -1, head_dim)[:, :length]
    ctx.ledger.add_copied_bytes(gathered.nbytes)
    return gathered.astype(np.float32)


def mask_positions(
    positions: IntArray,
    length: int,
    sliding_window: int | None,
    *,
    symmetric: bool = False,
    ends: IntArray | None = None,
) -> np.typing.NDArray[np.bool_]:
    """Which of `length` positions each query position sees: (queries, length). `ends` are those of what each sees."""
    distance = positions[:, None] - np.arange(length, dtype=np.int32)[None, :]
    window = sliding_window or length
    ahead = np.zeros_like(positions) if ends is None else ends - 1 - positions
    return (distance > -window if symmetric else distance >= -ahead[:, None]) & (distance < window)


def cap(scores: FloatArray, softcap: float | None) -> FloatArray:
    """Scores that come no further from zero than `softcap`."""
    if softcap is None:
        return scores
    result: FloatArray = np.float32(softcap) * np.tanh(scores / np.float32(softcap))
    return result


def softmax(scores: FloatArray, sink: np.float32 | None = None) -> FloatArray:
    """Softmax over the last axis; a sink counts as one more score, whose weight is left out."""
    peak = scores.max(axis=-1, keepdims=True)
    if sink is not None:
        peak = np.maximum(peak, sink)
    weights = np.exp(scores - peak)
    total = weights.sum(axis=-1, keepdims=True)
    if sink is not None:
        total = total + np.exp(sink - peak)
    result: FloatArray = weights / total
    return result
