"""Native `attend`: csrc/attend/attend.inc reads the pages in place; nothing is gathered.

The pools are plain arrays, so that the pages of a sequence can be written and read by anyone who knows their shape, and
for bf16 and q8 how a page is packed (`mlxr.kernels.pools`).
"""

from __future__ import annotations

import math

import numpy as np

from mlxr.kernels.arrays import empty
from mlxr.kernels.attend.scores import Scores
from mlxr.kernels.context import Context
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.tensor import POOL_DTYPES, FloatArray, PoolArray, pool_row_length

_NO_WINDOW = 0
_NO_SOFTCAP = 0.0
_NO_VALUE_DIM = 0  # values have a pool of their own


def allocate_pool(ctx: Context, pages: int, kv_heads: int, page_size: int, head_dim: int, kv_type: str) -> PoolArray:
    """A zeroed pool; the memory is taken from the system when it is first written, 2 MiB at a time: in smaller pages
    nearly every page of a sequence would miss the TLB."""
    shape = (pages, kv_heads, page_size, pool_row_length(kv_type, head_dim))
    dtype = np.dtype(POOL_DTYPES[kv_type])
    pool: PoolArray = ctx.module.zeros(ctx.native, math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)
    return pool


def attend(
    ctx: Context,
    q: FloatArray,
    k_pool: PoolArray,
    v_pool: PoolArray,
    batch: RaggedBatch,
    scores: Scores,
) -> FloatArray:
    """Every query token against the pages of its sequence. Pages that no query sees need not be in the table."""
    tokens, heads, head_dim = q.shape
    out = empty(ctx, tokens, heads * (scores.value_dim or head_dim))
    ctx.module.attend(
        ctx.native,
        q,
        k_pool,
        v_pool,
        batch.query_starts,
        batch.context_lengths,
        batch.page_table,
        scores.scale,
        scores.sliding_window or _NO_WINDOW,
        out,
        scores.softcap or _NO_SOFTCAP,
        scores.sinks,
        scores.symmetric,
        scores.value_dim or _NO_VALUE_DIM,
        batch.ends if scores.whole_pictures else None,
        None if scores.biases is None else scores.biases.reshape(-1),
    )
    return out
