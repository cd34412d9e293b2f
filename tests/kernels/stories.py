"""Sequences with queries, keys and values, caches that hold them, and attention over them by its definition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from variants import Floats, random_floats

from mlxr.kernels.attend import KVType, allocate_pools, attend
from mlxr.kernels.context import Context
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.tensor import SCALE_BYTES, locate_keys, locate_values, round_to_bf16, round_to_q8, widen_bf16

Pools = tuple[NDArray[Any], NDArray[Any]]
REFERENCE = Context("reference")


@dataclass(frozen=True)
class Story:
    """Sequences with all their queries, keys and values, from which any batch can be cut.

    `queries`, `keys` and `values` hold for each sequence an array (context, heads, head_dim).
    """

    queries: list[Floats]
    keys: list[Floats]
    values: list[Floats]

    @property
    def contexts(self) -> list[int]:
        return [len(queries) for queries in self.queries]


def make_story(contexts: Sequence[int], heads: int, kv_heads: int, head_dim: int, seed: int = 0) -> Story:
    """Random numbers that f16 and bf16 hold exactly, so that the pool's type rounds none of them."""

    def make(part: int, count: int) -> list[Floats]:
        return [
            (
                np.round(random_floats([seed, part, sequence], context, count, head_dim) * 32).clip(-128, 128) / 32
            ).astype(np.float32)
            for sequence, context in enumerate(contexts)
        ]

    return Story(make(0, heads), make(1, kv_heads), make(2, kv_heads))


@dataclass(frozen=True)
class Cache:
    """A story's keys and values in shuffled pages; slots that hold none are not-a-number."""

    pools: Pools
    page_table: NDArray[np.int32]


def fill_cache(story: Story, page_size: int, kv_type: KVType, spare_pages: int = 3) -> Cache:
    counts = [-(-context // page_size) for context in story.contexts]
    pages = sum(counts) + spare_pages
    _, kv_heads, head_dim = story.keys[0].shape
    pools = allocate_pools(REFERENCE, pages, kv_heads, page_size, head_dim, kv_type)
    order = np.random.default_rng(len(counts)).permutation(pages).astype(np.int32)
    page_table = np.full((len(counts), max(counts) + 1), -1, np.int32)
    for locate, pool, rows in zip((locate_keys, locate_values), pools, (story.keys, story.values), strict=True):
        packed, small = kv_type == "bf16", kv_type == "q8"
        pool[...] = 0x7FC0 if packed else -1 if small else np.nan  # as a scale of q8, four times -1 is not a number
        flat, offsets = pool.reshape(pages, kv_heads, -1), locate(page_size, head_dim)
        used = 0
        for sequence, (count, context) in enumerate(zip(counts, story.contexts, strict=True)):
            page_table[sequence, :count] = order[used : used + count]
            used += count
            for position in range(0, context, page_size):
                part = rows[sequence][position : position + page_size]
                page, part = page_table[sequence, position // page_size], part.transpose(1, 0, 2)
                if packed:
                    flat[page][:, offsets[: part.shape[1]]] = round_to_bf16(part)
                elif small:
                    flat[page][:, offsets[: part.shape[1]]], scales = round_to_q8(part)
                    end = offsets.size + SCALE_BYTES * part.shape[1]
                    flat[page][:, offsets.size : end] = np.ascontiguousarray(scales).view(np.int8)
                else:
                    pool[page, :, : part.shape[1]] = part
    return Cache(pools, page_table)


def cut_batch(cache: Cache, parts: Sequence[tuple[int, int, int]]) -> RaggedBatch:
    """A batch of (sequence, first position, end position)."""
    positions = np.concatenate([np.arange(first, end, dtype=np.int32) for _, first, end in parts])
    zeros = np.zeros(len(positions), np.int32)  # attend needs neither ids nor slots
    return RaggedBatch(
        token_ids=zeros,
        positions=positions,
        slots=zeros,
        query_starts=np.cumsum([0, *(end - first for _, first, end in parts)]).astype(np.int32),
        context_lengths=np.array([end for _, _, end in parts], np.int32),
        page_table=np.ascontiguousarray(cache.page_table[[sequence for sequence, _, _ in parts]]),
        output_rows=np.zeros(1, np.int32),
    )


def compute(
    ctx: Context,
    story: Story,
    cache: Cache,
    parts: Sequence[tuple[int, int, int]],
    window: int | None = None,
    scale: float = 0.3,
    softcap: float | None = None,
    sinks: Floats | None = None,
    symmetric: bool = False,
    value_dim: int | None = None,
    biases: Floats | None = None,
) -> Floats:
    q = np.concatenate([story.queries[sequence][first:end] for sequence, first, end in parts])
    batch = cut_batch(cache, parts)
    k_pool, v_pool = cache.pools
    return attend(
        ctx,
        q,
        k_pool,
        v_pool if value_dim is None else k_pool,
        batch,
        scale=scale,
        sliding_window=window,
        softcap=softcap,
        sinks=sinks,
        symmetric=symmetric,
        value_dim=value_dim,
        biases=biases,
    )


def whole(story: Story) -> list[tuple[int, int, int]]:
    return [(sequence, 0, context) for sequence, context in enumerate(story.contexts)]


def compute_exactly(
    story: Story,
    sequence: int,
    window: int | None,
    scale: float,
    first: int = 0,
    softcap: float | None = None,
    sinks: Floats | None = None,
    symmetric: bool = False,
    biases: Floats | None = None,
) -> NDArray[np.float64]:
    """Attention of a sequence from position `first` on, in float64, from the definition."""
    q, k, v = (rows[sequence].astype(np.float64) for rows in (story.queries, story.keys, story.values))
    q = q[first:]
    group = q.shape[1] // k.shape[1]
    scores = np.einsum("qhd,khd->hqk", q, k.repeat(group, axis=1)) * scale
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    distance = np.arange(first, len(k))[:, None] - np.arange(len(k))[None]
    most = window or len(k)
    if biases is not None:
        span = biases.shape[1] // 2
        scores += biases[:, np.clip(-distance, -span, span) + span]
    scores[:, (distance <= -most if symmetric else distance < 0) | (distance >= most)] = -np.inf
    peak = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - peak)
    weights /= weights.sum(axis=-1, keepdims=True) + _weigh_sinks(sinks, peak)
    result: NDArray[np.float64] = np.einsum("hqk,khd->qhd", weights, v.repeat(group, axis=1)).reshape(len(q), -1)
    return result


def round_story_to_q8(story: Story) -> Story:
    """Return the same story with keys and values that int8 and a scale can hold."""

    def round_all(parts: list[Floats]) -> list[Floats]:
        return [numbers * scales[..., None] for numbers, scales in map(round_to_q8, parts)]

    return replace(story, keys=round_all(story.keys), values=round_all(story.values))


def _weigh_sinks(sinks: Floats | None, peak: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return what sinks add to the sum of weights whose greatest score is `peak`."""
    return np.zeros_like(peak) if sinks is None else np.exp(sinks.astype(np.float64)[:, None, None] - peak)


def compute_rounded(
    story: Story,
    sequence: int,
    window: int | None,
    scale: float,
    softcap: float | None = None,
    sinks: Floats | None = None,
) -> NDArray[np.float64]:
    """Compute attention with the roundings of bf16 pages: queries (scaled for powers of two or for the cap) and weights
    are rounded to bf16, each 256 positions by themselves; everything else is float64.
    """
    q, k, v = (rows[sequence] for rows in (story.queries, story.keys, story.values))
    group = q.shape[1] // k.shape[1]
    log2e = np.float32(1.44269504)
    unit = log2e if softcap is None else np.float32(1 / softcap)
    rounded = widen_bf16(round_to_bf16(q * (np.float32(scale) * unit))).astype(np.float64)
    scores = np.einsum("qhd,khd->hqk", rounded, k.repeat(group, axis=1))
    if softcap is not None:
        scores = softcap * np.float64(log2e) * np.tanh(scores)
    distance = np.arange(len(k))[:, None] - np.arange(len(k))[None]
    scores[:, (distance < 0) | (distance >= (window or len(k)))] = -np.inf
    weights = np.zeros_like(scores)
    top = scores.max(axis=-1, keepdims=True)
    for start in range(0, len(k), 256):
        part = scores[:, :, start : start + 256]
        peak = part.max(axis=-1, keepdims=True)
        peak[np.isneginf(peak)] = 0
        small = widen_bf16(round_to_bf16(np.exp2(part - peak).astype(np.float32)))
        weights[:, :, start : start + 256] = small * np.exp2(np.minimum(peak - top, 0))
    weights /= weights.sum(axis=-1, keepdims=True) + _weigh_sinks(sinks, top / log2e)
    result: NDArray[np.float64] = np.einsum("hqk,khd->qhd", weights, v.repeat(group, axis=1)).reshape(len(q), -1)
    return result
