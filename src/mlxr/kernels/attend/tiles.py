"""Attention straight from pages by the matrix units: tiles of 16 rows, each a few tokens times heads of one key head.

One launch takes any number of sequences with a few queries each; where there are too few tiles to keep a
GPU busy, their positions are split into shares, which a second launch merges. Knows nothing of other ways to attend.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mlxr.kernels.attend.scores import Scores
from mlxr.kernels.attend.shares import choose_shares, count_positions, hold_sinks, merge_shares
from mlxr.kernels.context import Context
from mlxr.kernels.gpu.kernel import Kernel
from mlxr.kernels.gpu.pool import Pool
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.tensor import IntArray

SIMD_GROUPS = 4
TILE_ROWS = 16
TILE_POSITIONS = 16
HEAD_DIMS = (64, 128)
DEVICES = ("cuda", "emulated")  # Metal's matrix units have no fragments of this form
_FOLDER = Path(__file__).parent
TILES = Kernel(
    "attend_tiles",
    _FOLDER,
    "tiles.body",
    ("q", "k_pool", "v_pool", "page_table", "owners", "lengths", "tiles", "sinks", "numbers", "sizes"),
    ("out", "stats"),
    ("powers.h",),
    cuda_only=True,
)


def takes_pool(ctx: Context, pool: Pool) -> bool:
    """Whether the matrix units read such pages on this device: 16-bit numbers in pages of whole tiles."""
    fits = pool.shape[3] in HEAD_DIMS and pool.shape[2] % TILE_POSITIONS == 0
    return fits and pool.kind in ("bf16", "f16") and ctx.gpu.device in DEVICES


def attend_tiles(
    ctx: Context,
    q: Any,
    k_pool: Pool,
    v_pool: Pool,
    batch: RaggedBatch,
    first: int,
    last: int,
    scores: Scores,
) -> Any:
    """Queries q (tokens, heads, head_dim) of the sequences [first, last) of `batch`, the same shape."""
    gpu, (tokens, heads, head_dim) = ctx.gpu, q.shape
    _, kv_heads, page_size, _ = k_pool.shape
    per_tile = min(heads // kv_heads, TILE_ROWS)
    parts = kv_heads * -(-(heads // kv_heads) // per_tile)
    owners, lengths, tiles, count = _place_tiles(ctx, batch, first, last, TILE_ROWS // per_tile)
    groups = -(-count // SIMD_GROUPS)
    shares = choose_shares(count_positions(batch, page_size, scores.sliding_window), parts * groups)
    split = shares > 1
    kind = gpu.mx.float32 if split else gpu.operands
    sizes = (heads, kv_heads, batch.page_table.shape[1], scores.sliding_window or 0, shares, count)
    out, stats = gpu.launcher.launch(
        TILES,
        [
            q,
            k_pool.array,
            v_pool.array,
            ctx.gpu.place(batch).page_table,
            owners,
            lengths,
            tiles,
            hold_sinks(ctx, scores),
            gpu.launcher.numbers(*scores.powers),
            gpu.launcher.numbers(*sizes),
        ],
        groups=(parts, groups, shares),
        threads=32 * SIMD_GROUPS,
        outputs=[
            ((tokens, heads, shares, head_dim), kind),
            ((tokens, heads, shares, 2) if split else (8,), gpu.mx.float32),
        ],
        constants={"D": head_dim, "G": per_tile, "PAGE": page_size, "SPLIT": int(split), **scores.constants},
        types={"X": q.dtype, "Y": kind, "K": k_pool.array.dtype},
    )
    return merge_shares(ctx, out, stats, scores) if split else out.reshape(*q.shape)


def _place_tiles(
    ctx: Context, batch: RaggedBatch, first: int, last: int, tile_tokens: int
) -> tuple[Any, Any, Any, int]:
    """Owners and lengths of the tokens, the tiles and their number; made once for all layers of a step."""
    placed = ctx.gpu.place(batch)
    found: tuple[Any, Any, Any, int] | None = placed.parts.get(("tiles", first, last))
    if found is None:
        start, stop = int(batch.query_starts[first]), int(batch.query_starts[last])
        owners, lengths = placed.owners, placed.lengths
        if stop - start < batch.tokens:
            owners, lengths = owners[start:stop], lengths[start:stop]
        tiles = cut_tiles(batch.query_starts[first : last + 1] - start, tile_tokens)
        found = owners, lengths, ctx.gpu.mx.array(tiles), len(tiles)
        placed.parts["tiles", first, last] = found
    return found


def cut_tiles(query_starts: IntArray, tile_tokens: int) -> IntArray:
    """(tiles, 2) first token and number of tokens; the last come first, as they see most positions."""
    cut = [
        (token, min(tile_tokens, stop - token))
        for start, stop in zip(query_starts[:-1].tolist(), query_starts[1:].tolist(), strict=True)
        for token in range(start, stop, tile_tokens)
    ]
    return np.array(cut[::-1], np.int32)
