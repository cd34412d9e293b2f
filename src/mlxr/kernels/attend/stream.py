"""Attention of single tokens straight from pages, which pass through the threadgroup's memory on their way.

One launch takes any number of sequences with one query each; where these are too few to keep a GPU busy, their
positions are split into shares, which a second launch merges. Knows nothing of other ways to attend.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlxr.kernels.attend.scores import Scores
from mlxr.kernels.attend.shares import choose_shares, count_positions, hold_sinks, merge_shares
from mlxr.kernels.context import Context
from mlxr.kernels.gpu.kernel import Kernel
from mlxr.kernels.gpu.pool import Pool
from mlxr.kernels.ragged import MAX_RUN, RaggedBatch

RING_BYTES = 48 * 1024  # memory that any GPU has for a threadgroup
STAGES = 3
TILE_POSITIONS = 16
WANTED_GROUPS = 256  # threadgroups that keep a large GPU busy with reading
MANY_GROUPS = 512  # with more, smaller ones all find a place at once
MIN_SHARE = 64  # positions of a SIMD-group below which a share is not worth a merge
MAX_HEADS = 16  # query heads of one key head in a threadgroup
STREAM = Kernel(
    "attend_stream",
    Path(__file__).parent,
    "stream.body",
    ("q", "k_pool", "v_pool", "page_table", "owners", "lengths", "sinks", "numbers", "sizes"),
    ("out", "stats"),
    ("stream.h", "powers.h"),
    cuda_only=True,
)


def attend_stream(
    ctx: Context,
    q: Any,
    k_pool: Pool,
    v_pool: Pool,
    batch: RaggedBatch,
    first: int,
    scores: Scores,
) -> Any:
    """Queries q (tokens, heads, head_dim), one for each sequence of `batch` from `first` on, the same shape."""
    gpu, (tokens, heads, head_dim) = ctx.gpu, q.shape
    _, kv_heads, page_size, _ = k_pool.shape
    owners, lengths = _place_tokens(ctx, batch, int(batch.query_starts[first]), tokens)
    group = min(heads // kv_heads, MAX_HEADS)
    parts = kv_heads * -(-(heads // kv_heads) // group)
    simd_groups = choose_simd_groups(head_dim, parts * tokens)
    positions = count_positions(batch, page_size, scores.sliding_window)
    shares = choose_shares(positions, parts * tokens, WANTED_GROUPS, MIN_SHARE * simd_groups)
    split = shares > 1
    kind = gpu.mx.float32 if split else gpu.operands
    sizes = (heads, kv_heads, batch.page_table.shape[1], scores.sliding_window or 0, shares)
    out, stats = gpu.launcher.launch(
        STREAM,
        [
            q,
            k_pool.array,
            v_pool.array,
            gpu.place(batch).page_table,
            owners,
            lengths,
            hold_sinks(ctx, scores),
            gpu.launcher.numbers(*scores.powers),
            gpu.launcher.numbers(*sizes),
        ],
        groups=(parts, tokens, shares),
        threads=32 * simd_groups,
        outputs=[
            ((tokens, heads, shares, head_dim), kind),
            ((tokens, heads, shares, 2) if split else (8,), gpu.mx.float32),
        ],
        constants={
            "D": head_dim,
            "G": group,
            "PAGE": page_size,
            "SPLIT": int(split),
            "STAGES": STAGES,
            "NEWEST": 1 if batch.longest_run == 1 else 1 + -(-MAX_RUN // TILE_POSITIONS),
            **scores.constants,
        },
        types={"X": q.dtype, "Y": kind, "K": k_pool.array.dtype},
    )
    return merge_shares(ctx, out, stats, scores) if split else out.reshape(*q.shape)


def choose_simd_groups(head_dim: int, groups: int) -> int:
    """How many SIMD-groups, with a ring each, a threadgroup has where there are so many threadgroups."""
    fitting = RING_BYTES // (STAGES * TILE_POSITIONS * 2 * 2 * head_dim)  # keys and values of two bytes
    return fitting // 2 if groups > MANY_GROUPS else fitting


def _place_tokens(ctx: Context, batch: RaggedBatch, start: int, tokens: int) -> tuple[Any, Any]:
    """Owners and lengths of so many tokens; made once for all layers of a step."""
    placed = ctx.gpu.place(batch)
    if tokens == batch.tokens:
        return placed.owners, placed.lengths
    key = ("tokens", start, tokens)
    if key not in placed.parts:
        stop = start + tokens
        placed.parts[key] = placed.owners[start:stop], placed.lengths[start:stop]
    owners, lengths = placed.parts[key]
    return owners, lengths
