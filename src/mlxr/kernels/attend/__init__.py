"""Attention over the pages of the cache, with grouped queries, causal or not, with an optional sliding window.

Keys and values are read in place through the page table; heads are indexed, never repeated. Query head h reads key
head h // (heads // kv_heads). With a window w, position p sees positions p - w + 1 to p; symmetric attention (encoders)
also later ones, up to p + w - 1, and a token of a picture may see the picture's later tokens. Scores may be capped by
tanh (Gemma 2, arXiv:2408.00118), and a learned sink of each head may take a share of its weights (gpt-oss,
arXiv:2508.10925). Values may be the last numbers of their keys (latent attention, arXiv:2405.04434), in one pool.

The pools of native code are plain arrays; the format of their pages is in `mlxr.kernels.tensor`. The reference gathers
pages, which copies keys and values; the ledger counts those bytes.
"""

# ruff: noqa: ARG001 -- every implementation takes the context
from __future__ import annotations

import math
from typing import Literal, get_args

import numpy as np

from mlxr.kernels.arrays import empty
from mlxr.kernels.attend.scores import Scores
from mlxr.kernels.checks import check_floats, check_heads, check_pools, check_size, refuse
from mlxr.kernels.choice import REFERENCE, Choice
from mlxr.kernels.context import Context
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.tensor import (
    BFLOAT16,
    INT8,
    POOL_DTYPES,
    FloatArray,
    IntArray,
    Offsets,
    PoolArray,
    locate_keys,
    locate_values,
    pool_head_dim,
    pool_row_length,
    pool_type,
    widen_bf16,
    widen_q8,
)

__all__ = ["KV_TYPES", "KVType", "allocate_pools", "attend"]

KVType = Literal["bf16", "f16", "f32", "q8"]
KV_TYPES: tuple[str, ...] = get_args(KVType)
MAX_PAGE_SIZE = 2**20  # one page may hold a whole context

_NO_WINDOW = 0
_NO_SOFTCAP = 0.0
_NO_VALUE_DIM = 0  # values have a pool of their own


def default_kv_type(ctx: Context, *, is_causal: bool = True, is_quantized: bool = False) -> KVType:
    """Return a device's default type of keys and values: f32 in the reference, bf16 elsewhere.

    An encoder, which is not causal, reads them once and is made for exact vectors: f32, unless its weights are
    quantised, which rounds far more than bf16 does, and f16 on a GPU, whose matrix units read no more.
    """
    if ctx.device == "reference":
        return "f32"
    if is_causal:
        return "bf16"
    if ctx.gpu is not None:
        return "f16"
    return "bf16" if is_quantized else "f32"


def allocate_pools(
    ctx: Context,
    pages: int,
    kv_heads: int,
    page_size: int,
    head_dim: int,
    kv_type: KVType | None = None,
    *,
    values_in_keys: bool = False,
) -> tuple[PoolArray, PoolArray]:
    """Return a K and a V pool of a layer, each (pages, kv_heads, page_size, head_dim), zeroed; the same one twice if
    values are in keys.

    The numbers in a page of bf16 and q8 are packed (`mlxr.kernels.tensor`), which only `write_pages` and `attend` need
    to know; others copy whole pages. The last axis of q8 is 4 bytes longer, for the scales.
    """
    for argument, value in (("pages", pages), ("kv_heads", kv_heads), ("head_dim", head_dim)):
        if value < 1:
            refuse("allocate_pools", argument, value, "at least 1")
    if not 1 <= page_size <= MAX_PAGE_SIZE:
        refuse("allocate_pools", "page_size", page_size, f"from 1 to {MAX_PAGE_SIZE}")
    kind = kv_type or default_kv_type(ctx)
    if kind not in KV_TYPES:
        refuse("allocate_pools", "kv_type", repr(kind), f"one of {', '.join(KV_TYPES)}")
    _, allocate = ALLOCATE.pick(ctx.device)
    pools = [allocate(ctx, pages, kv_heads, page_size, head_dim, kind) for _ in range(1 if values_in_keys else 2)]
    return pools[0], pools[-1]


def attend(
    ctx: Context,
    q: FloatArray,
    k_pool: PoolArray,
    v_pool: PoolArray,
    batch: RaggedBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: FloatArray | None = None,
    symmetric: bool = False,
    whole_pictures: bool = False,
    value_dim: int | None = None,
    biases: FloatArray | None = None,
    chunked: bool = False,
) -> FloatArray:
    """Return softmax(scale * q Kᵀ) V for every token of the batch: q (T, heads, head_dim) to (T, heads * head_dim).

    The batch's own keys and values must be in the pools already. With a softcap c, a score s becomes c tanh(s / c);
    `sinks` (heads,) add exp(sink) to the sum of a head's weights. With `symmetric`, a position also sees later ones of
    its context, with `whole_pictures` those up to the batch's `ends`. With `value_dim`, values are the last `value_dim`
    numbers of the keys, v_pool is k_pool, and the result has that many columns for each head. With `chunked`, positions
    see earlier ones in their chunk of `sliding_window` positions, as in Llama 4. q may be a view with any token stride.
    Raises ValueError for shapes that do not fit and for pages outside the pools.

    `biases` (heads, 2n + 1), allowed without a softcap, are added to the scores: bias n + d to the score of a key d
    positions after the query, where distances above n count as n (ALiBi, arXiv:2108.12409; T5's buckets,
    arXiv:1910.10683).
    """
    check_heads("attend", "q", q)
    check_pools("attend", k_pool, v_pool)
    tokens, heads, head_dim = q.shape
    kv_heads, page_size, wanted_dim = k_pool.shape[1], k_pool.shape[2], pool_head_dim(k_pool)
    if tokens != batch.tokens or head_dim != wanted_dim:
        refuse("attend", "q", f"of shape {q.shape}", f"{batch.tokens} tokens of head_dim {wanted_dim}")
    if heads % kv_heads:
        refuse("attend", "heads of q", heads, f"a multiple of the {kv_heads} key heads")
    if sliding_window is not None and sliding_window < 1:
        refuse("attend", "sliding_window", sliding_window, "at least 1")
    _check_scores(heads, softcap, sinks)
    if biases is not None:
        check_floats("attend", "biases", biases, 2)
        check_size("attend", "rows of biases", biases.shape[0], heads)
        if biases.shape[1] % 2 == 0 or softcap is not None:
            refuse("attend", "biases", f"{biases.shape[1]} for a head", "an odd number, without softcap")
    if value_dim is not None and not (1 <= value_dim <= head_dim and (head_dim - value_dim) % 2 == 0):
        refuse("attend", "value_dim", value_dim, f"at most the head_dim {head_dim}, and less by an even number")
    if batch.longest_context > batch.page_table.shape[1] * page_size:
        wanted = f"pages of {page_size} for a context of {batch.longest_context}"
        refuse("attend", "page_table", f"{batch.page_table.shape[1]} pages wide", wanted)
    name, implementation = ATTEND.pick(ctx.device)
    whole = whole_pictures and len(batch.ends) > 0
    scores = Scores(scale, sliding_window, softcap, sinks, symmetric, value_dim, whole, chunked, biases)
    if name == REFERENCE:
        ctx.ledger.count("attend", name, scores.name_variant(pool_type(k_pool)))
    return implementation(ctx, q, k_pool, v_pool, batch, scores)


def _check_scores(heads: int, softcap: float | None, sinks: FloatArray | None) -> None:
    if softcap is not None and not 0 < softcap < math.inf:
        refuse("attend", "softcap", softcap, "a number above 0")
    if sinks is not None:
        check_floats("attend", "sinks", sinks, 1)
        check_size("attend", "length of sinks", sinks.shape[0], heads)


def _allocate_reference(
    ctx: Context, pages: int, kv_heads: int, page_size: int, head_dim: int, kv_type: str
) -> PoolArray:
    """Make a pool of keys or of values, filled with zeros."""
    return np.zeros((pages, kv_heads, page_size, pool_row_length(kv_type, head_dim)), POOL_DTYPES[kv_type])


def _attend_reference(
    ctx: Context, q: FloatArray, k_pool: PoolArray, v_pool: PoolArray, batch: RaggedBatch, scores: Scores
) -> FloatArray:
    """Gather the pages of each sequence, then plain softmax attention head by head."""
    (tokens, heads, head_dim), sliding_window = q.shape, scores.sliding_window
    page_size = k_pool.shape[2]
    key_offsets, value_offsets = locate_keys(page_size, head_dim), locate_values(page_size, head_dim)
    value_dim = scores.value_dim or head_dim
    output = np.empty((tokens, heads, value_dim), np.float32)
    for sequence in range(batch.sequences):
        start, stop = int(batch.query_starts[sequence]), int(batch.query_starts[sequence + 1])
        positions, length = batch.positions[start:stop], int(batch.context_lengths[sequence])
        first_page = 0 if sliding_window is None else max(0, int(positions[0]) + 1 - sliding_window) // page_size
        pages, first = batch.page_table[sequence, first_page:], first_page * page_size  # earlier ones may be released
        keys = _gather_pages(ctx, k_pool, pages, length - first, key_offsets)
        values = (
            keys[:, :, head_dim - value_dim :]
            if scores.value_dim is not None
            else _gather_pages(ctx, v_pool, pages, length - first, value_offsets)
        )
        ends = batch.ends[start:stop] - np.int32(first) if scores.whole_pictures else None
        visible = _mask_positions(
            positions - np.int32(first), length - first, sliding_window, symmetric=scores.symmetric, ends=ends
        )
        if scores.chunked and sliding_window is not None:
            visible &= np.arange(first, length) >= positions[:, None] // sliding_window * sliding_window
        span = 0 if scores.biases is None else scores.biases.shape[1] // 2
        places = np.clip(np.arange(first, length) - positions[:, None], -span, span) + span  # index of the bias
        group = heads // keys.shape[0]
        for head in range(heads):
            products = q[start:stop, head] @ keys[head // group].T
            capped = _cap(products * np.float32(scores.scale), scores.softcap)
            if scores.biases is not None:
                capped = capped + scores.biases[head][places]
            seen = np.where(visible, capped, -np.inf)
            sink = None if scores.sinks is None else scores.sinks[head]
            output[start:stop, head] = _softmax(seen, sink) @ values[head // group]
    return output.reshape(tokens, heads * value_dim)


def _gather_pages(ctx: Context, pool: PoolArray, page_ids: IntArray, length: int, offsets: Offsets) -> FloatArray:
    """Return the first `length` positions of a sequence, (kv_heads, length, head_dim); `offsets` unpack pages."""
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


def _mask_positions(
    positions: IntArray,
    length: int,
    sliding_window: int | None,
    *,
    symmetric: bool = False,
    ends: IntArray | None = None,
) -> np.typing.NDArray[np.bool_]:
    """Return a mask (queries, length) of the positions that each query sees; `ends` say where that ends."""
    distance = positions[:, None] - np.arange(length, dtype=np.int32)[None, :]
    window = sliding_window or length
    ahead = np.zeros_like(positions) if ends is None else ends - 1 - positions
    return (distance > -window if symmetric else distance >= -ahead[:, None]) & (distance < window)


def _cap(scores: FloatArray, softcap: float | None) -> FloatArray:
    """Return scores whose magnitude tanh limits to `softcap`."""
    if softcap is None:
        return scores
    result: FloatArray = np.float32(softcap) * np.tanh(scores / np.float32(softcap))
    return result


def _softmax(scores: FloatArray, sink: np.float32 | None = None) -> FloatArray:
    """Return the softmax over the last axis; a sink counts as one more score, whose weight is left out."""
    peak = scores.max(axis=-1, keepdims=True)
    if sink is not None:
        peak = np.maximum(peak, sink)
    weights = np.exp(scores - peak)
    total = weights.sum(axis=-1, keepdims=True)
    if sink is not None:
        total = total + np.exp(sink - peak)
    result: FloatArray = weights / total
    return result


def _allocate_native(ctx: Context, pages: int, kv_heads: int, page_size: int, head_dim: int, kv_type: str) -> PoolArray:
    """Return a zeroed pool; the system gives its memory when it is first written, in huge pages of 2 MiB: in smaller
    ones, nearly every page of a sequence would miss the TLB."""
    shape = (pages, kv_heads, page_size, pool_row_length(kv_type, head_dim))
    dtype = np.dtype(POOL_DTYPES[kv_type])
    pool: PoolArray = ctx.module.zeros(ctx.native, math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)
    return pool


def _attend_native(
    ctx: Context,
    q: FloatArray,
    k_pool: PoolArray,
    v_pool: PoolArray,
    batch: RaggedBatch,
    scores: Scores,
) -> FloatArray:
    """Call csrc/attend/attend.inc, which reads the pages in place; pages that no query sees may lack in the table."""
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
        scores.chunked,
    )
    return out


ALLOCATE = Choice("attend", _allocate_reference, _allocate_native, f"{__name__}.gpu", "allocate_pool")
ATTEND = Choice("attend", _attend_reference, _attend_native, f"{__name__}.gpu")
