"""Attention straight over the pages of the cache, grouped-query aware, causal or not, with an optional sliding window.

Keys and values are read in place through the page table; heads are indexed, never repeated. Query head h reads key
head h // (heads // kv_heads). With a window w, position p sees positions p - w + 1 to p; symmetric attention (encoders)
also those after it, up to p + w - 1, and a token of a picture may see those of its picture behind it. Scores may be
capped by tanh (Gemma 2, arXiv:2408.00118), and a learned sink of each head may take a share of its weights (gpt-oss,
arXiv:2508.10925). Values may be the last numbers of their keys (latent attention, arXiv:2405.04434), in one pool.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

from mlxr.kernels.attend.scores import Scores
from mlxr.kernels.checks import check_floats, check_heads, check_pools, check_size, refuse
from mlxr.kernels.choice import REFERENCE, Choice
from mlxr.kernels.context import Context
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.tensor import FloatArray, PoolArray, pool_head_dim, pool_type

__all__ = ["KV_TYPES", "KVType", "allocate_pools", "attend"]

KVType = Literal["bf16", "f16", "f32", "q8"]
KV_TYPES: tuple[str, ...] = get_args(KVType)
MAX_PAGE_SIZE = 2**20  # one page may hold a whole context

CHOICE = Choice(__name__)


def default_kv_type(ctx: Context) -> KVType:
    """How a device keeps keys and values unless told otherwise: f32 in the reference, bf16 elsewhere."""
    return "f32" if ctx.device == "reference" else "bf16"


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
    """One K and one V pool of a layer, each (pages, kv_heads, page_size, head_dim), zeroed; twice the same one where
    values are in keys.

    Pages of bf16 and q8 are packed within (`mlxr.kernels.pools`); write_pages and attend know how, others copy whole
    pages. The last axis of q8 is 4 bytes longer, which hold the scales.
    """
    for argument, value in (("pages", pages), ("kv_heads", kv_heads), ("head_dim", head_dim)):
        if value < 1:
            refuse("allocate_pools", argument, value, "at least 1")
    if not 1 <= page_size <= MAX_PAGE_SIZE:
        refuse("allocate_pools", "page_size", page_size, f"from 1 to {MAX_PAGE_SIZE}")
    kind = kv_type or default_kv_type(ctx)
    if kind not in KV_TYPES:
        refuse("allocate_pools", "kv_type", repr(kind), f"one of {', '.join(KV_TYPES)}")
    _, implementation = CHOICE.pick(ctx.device)
    pools: list[PoolArray] = [
        implementation.allocate_pool(ctx, pages, kv_heads, page_size, head_dim, kind)
        for _ in range(1 if values_in_keys else 2)
    ]
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
) -> FloatArray:
    """softmax(scale * q Kᵀ) V for every token of the batch: (T, heads, head_dim) to (T, heads * head_dim).

    With a softcap c a score s becomes c tanh(s / c); `sinks` (heads,) add exp(sink) to the sum of a head's weights. The
    batch's own keys and values must be in the pools already. With `symmetric` a position sees those after it, too, as
    far as the context goes, with `whole_pictures` up to the batch's `ends`. q may be a view with a free token stride.
    Raises ValueError for shapes that do not fit and for pages outside the pools. With a `value_dim` values are the last
    so many numbers of the keys, v_pool is k_pool, and the result has so many columns for each head.

    `biases` (heads, 2n + 1), of symmetric attention without softcap, are added to the scores: number n + d to that of a
    key d positions behind the query, where what is farther than n counts as n (ALiBi, arXiv:2108.12409; T5's buckets,
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
        if biases.shape[1] % 2 == 0 or not symmetric or softcap is not None:
            refuse("attend", "biases", f"{biases.shape[1]} for a head", "an odd number, symmetric and without softcap")
    if value_dim is not None and not (1 <= value_dim <= head_dim and (head_dim - value_dim) % 2 == 0):
        refuse("attend", "value_dim", value_dim, f"at most the head_dim {head_dim}, and less by an even number")
    if batch.longest_context > batch.page_table.shape[1] * page_size:
        wanted = f"pages of {page_size} for a context of {batch.longest_context}"
        refuse("attend", "page_table", f"{batch.page_table.shape[1]} pages wide", wanted)
    name, implementation = CHOICE.pick(ctx.device)
    whole = whole_pictures and len(batch.ends) > 0
    scores = Scores(scale, sliding_window, softcap, sinks, symmetric, value_dim, whole, biases)
    if name == REFERENCE:
        ctx.ledger.count("attend", name, scores.name_variant(pool_type(k_pool)))
    result: FloatArray = implementation.attend(ctx, q, k_pool, v_pool, batch, scores)
    return result


def _check_scores(heads: int, softcap: float | None, sinks: FloatArray | None) -> None:
    if softcap is not None and not 0 < softcap < math.inf:
        refuse("attend", "softcap", softcap, "a number above 0")
    if sinks is not None:
        check_floats("attend", "sinks", sinks, 1)
        check_size("attend", "length of sinks", sinks.shape[0], heads)
