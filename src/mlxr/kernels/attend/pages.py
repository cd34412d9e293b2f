"""Attention on a GPU straight from pages: single tokens by streams, more queries by the matrix units.

One launch takes any number of sequences. For single tokens, keys and values are streamed through the threadgroup's
memory (`attend_stream`). Matrix units take tiles of 16 rows, each a few tokens times heads of one key head
(`attend_tiles`), or of 128 rows if they read the threadgroup's memory (`attend_panels`). If there are too few
threadgroups to keep a GPU busy, streams and tiles split positions into shares, one threadgroup to each, which a second
launch merges. `gpu.py` chooses between these and other ways to attend.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from mlxr.kernels.attend.scores import Scores
from mlxr.kernels.context import Context
from mlxr.kernels.gpu.kernel import Kernel
from mlxr.kernels.gpu.pool import Pool
from mlxr.kernels.ragged import MAX_RUN, RaggedBatch
from mlxr.kernels.tensor import DeviceArray, IntArray

MERGE_THREADS = 128
WANTED_GROUPS = 512  # threadgroups that keep a large GPU busy
MIN_SHARE = 256  # positions below which a share is not worth a merge
MERGE = Kernel(
    "attend_merge", Path(__file__).parent, "merge.body", ("sums", "stats", "sinks", "sizes"), ("out",), ("powers.h",)
)


def merge_shares(ctx: Context, sums: DeviceArray, stats: DeviceArray, scores: Scores) -> DeviceArray:
    """Merge sums (tokens, heads, shares, head_dim), their maxima and totals, and sinks: (tokens, heads, head_dim)."""
    gpu, (tokens, heads, shares, head_dim) = ctx.gpu, sums.shape
    (out,) = gpu.launcher.launch(
        MERGE,
        [sums, stats, hold_sinks(ctx, scores), gpu.launcher.numbers(tokens * heads, shares, heads)],
        groups=(-(-tokens * heads * head_dim // MERGE_THREADS), 1, 1),
        threads=MERGE_THREADS,
        outputs=[((tokens, heads, head_dim), gpu.operands)],
        constants={"D": head_dim, "SINKS": scores.constants["SINKS"]},
        types={"Y": gpu.operands},
    )
    return out


def hold_sinks(ctx: Context, scores: Scores) -> DeviceArray:
    """Return the sinks on the device, or zeros if there are none."""
    return ctx.gpu.launcher.numbers(0.0) if scores.sinks is None else ctx.gpu.hold(scores.sinks)


def count_positions(batch: RaggedBatch, page_size: int, sliding_window: int | None) -> int:
    """Return the most positions that a query may see: those of the table, as a recorded step serves longer contexts."""
    return min(int(batch.page_table.shape[1]) * page_size, sliding_window or 2**31)


def choose_shares(positions: int, groups: int, wanted: int = WANTED_GROUPS, least: int = MIN_SHARE) -> int:
    """Return the number of shares of `positions` that makes about `wanted` threadgroups of the `groups` there are; a
    share has at least `least` positions."""
    return max(1, min(positions // least, wanted // groups))


RING_BYTES = 48 * 1024  # memory that every NVIDIA GPU has for a threadgroup
STAGES = 3
TILE_POSITIONS = 16
WANTED_STREAMS = 256  # threadgroups that keep a large GPU busy with reading
MANY_GROUPS = 512  # with more threadgroups, these are smaller, so that all run at once
MIN_STREAM_SHARE = 64  # positions of a SIMD-group below which a share is not worth a merge
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
    ctx: Context, q: DeviceArray, k_pool: Pool, v_pool: Pool, batch: RaggedBatch, first: int, scores: Scores
) -> DeviceArray:
    """Attend with queries q (tokens, heads, head_dim), one for each sequence of `batch` from `first` on; same shape."""
    (tokens, heads, head_dim), (_, kv_heads, page_size, _) = q.shape, k_pool.shape
    owners, lengths = _place_tokens(ctx, batch, int(batch.query_starts[first]), tokens)
    group = min(heads // kv_heads, MAX_HEADS)
    parts = kv_heads * -(-(heads // kv_heads) // group)
    simd_groups = choose_simd_groups(head_dim, parts * tokens)
    positions = count_positions(batch, page_size, scores.sliding_window)
    shares = choose_shares(positions, parts * tokens, WANTED_STREAMS, MIN_STREAM_SHARE * simd_groups)
    sizes = heads, kv_heads, batch.page_table.shape[1], scores.sliding_window or 0, shares
    constants = {
        "G": group,
        "STAGES": STAGES,
        "NEWEST": 1 if batch.longest_run == 1 else 1 + -(-MAX_RUN // TILE_POSITIONS),
    }
    where, groups = (owners, lengths), (parts, tokens, shares)
    return _launch(ctx, STREAM, q, (k_pool, v_pool), batch, where, scores, sizes, constants, groups, simd_groups)


def _launch(
    ctx: Context,
    kernel: Kernel,
    q: DeviceArray,
    pools: tuple[Pool, Pool],
    batch: RaggedBatch,
    places: tuple[DeviceArray, ...],
    scores: Scores,
    sizes: tuple[int, ...],
    constants: dict[str, int],
    groups: tuple[int, int, int],
    simd_groups: int,
    room_bytes: int = 0,
) -> DeviceArray:
    """Launch a kernel over pages, and merge its shares, whose number is the last of `groups`, if there are several."""
    gpu, (tokens, heads, head_dim), shares = ctx.gpu, q.shape, groups[2]
    kind, (k_pool, v_pool) = gpu.operands if shares == 1 else gpu.mx.float32, pools
    out, stats = gpu.launcher.launch(
        kernel,
        [
            *(q, k_pool.array, v_pool.array, gpu.place(batch).page_table, *places, hold_sinks(ctx, scores)),
            *(gpu.launcher.numbers(*scores.powers), gpu.launcher.numbers(*sizes)),
        ],
        groups=groups,
        threads=32 * simd_groups,
        outputs=[
            ((tokens, heads, shares, head_dim), kind),
            ((tokens, heads, shares, 2) if shares > 1 else (8,), gpu.mx.float32),
        ],
        constants={"D": head_dim, "PAGE": k_pool.shape[2], "SPLIT": int(shares > 1), **constants, **scores.constants},
        types={"X": q.dtype, "Y": kind, "K": k_pool.array.dtype},
        room_bytes=room_bytes,
    )
    return merge_shares(ctx, out, stats, scores) if shares > 1 else out.reshape(*q.shape)


def choose_simd_groups(head_dim: int, groups: int) -> int:
    """Return the number of SIMD-groups of a threadgroup, each with a ring, for `groups` threadgroups in all."""
    fitting = RING_BYTES // (STAGES * TILE_POSITIONS * 2 * 2 * head_dim)  # keys and values of two bytes
    return fitting // 2 if groups > MANY_GROUPS else fitting


def _place_tokens(ctx: Context, batch: RaggedBatch, start: int, tokens: int) -> tuple[DeviceArray, DeviceArray]:
    """Return owners and lengths of `tokens` tokens from `start` on; made once for all layers of a step."""
    placed = ctx.gpu.place(batch)
    if tokens == batch.tokens:
        return placed.owners, placed.lengths
    key = ("tokens", start, tokens)
    if key not in placed.parts:
        stop = start + tokens
        placed.parts[key] = placed.owners[start:stop], placed.lengths[start:stop]
    owners, lengths = placed.parts[key]
    return owners, lengths


SIMD_GROUPS = 4
TILE_ROWS = 16
HEAD_DIMS = (64, 128)
SMALL_DIM = 32  # head_dim of some encoders, which tiles take and streams do not
DEVICES = ("cuda", "emulated")  # Metal's matrix units have no fragments of this form
TILES = Kernel(
    "attend_tiles",
    Path(__file__).parent,
    "tiles.body",
    ("q", "k_pool", "v_pool", "page_table", "owners", "lengths", "ends", "tiles", "sinks", "numbers", "sizes"),
    ("out", "stats"),
    ("powers.h",),
    cuda_only=True,
)


def takes_pool(ctx: Context, pool: Pool, dims: tuple[int, ...] = HEAD_DIMS) -> bool:
    """Return True if this device's matrix units read such pages: 16-bit numbers in pages of whole tiles."""
    fits = pool.shape[3] in dims and pool.shape[2] % TILE_POSITIONS == 0
    return fits and pool.kind in ("bf16", "f16") and ctx.gpu.device in DEVICES and not ctx.gpu.is_apple


def attend_tiles(
    ctx: Context, q: DeviceArray, k_pool: Pool, v_pool: Pool, batch: RaggedBatch, first: int, last: int, scores: Scores
) -> DeviceArray:
    """Attend with queries q (tokens, heads, head_dim) of the sequences [first, last) of `batch`; same shape."""
    heads, (_, kv_heads, page_size, _) = q.shape[1], k_pool.shape
    per_tile = min(heads // kv_heads, TILE_ROWS)
    parts = kv_heads * -(-(heads // kv_heads) // per_tile)
    *where, count = _place_tiles(ctx, batch, first, last, TILE_ROWS // per_tile, scores)
    groups = -(-count // SIMD_GROUPS)
    shares = choose_shares(count_positions(batch, page_size, scores.sliding_window), parts * groups)
    sizes = heads, kv_heads, batch.page_table.shape[1], scores.sliding_window or 0, shares, count
    shape, constants = (parts, groups, shares), {"G": per_tile, "ENDS": int(scores.sees_ahead)}
    return _launch(ctx, TILES, q, (k_pool, v_pool), batch, (*where,), scores, sizes, constants, shape, SIMD_GROUPS)


PANELS = replace(TILES, name="attend_panels", body="panels.body", headers=("powers.h", "panels.h"), has_rings=True)
PANEL_ROWS, PANEL_SIMD_GROUPS, PANEL_AHEAD = 128, 12, 2
# Positions of a tile, by head dims, as scores and sums fill a thread's registers, and slots, which fill the memory.
PANEL_TILES = {64: (128, 6), 128: (128, 6), 256: (64, 5)}


def takes_panels(ctx: Context, pool: Pool) -> bool:
    """Return True if `wgmma` can read prompts' keys and values from such pages on this device."""
    machine = ctx.gpu.machine
    fits = pool.shape[3] in PANEL_TILES and pool.shape[2] % TILE_POSITIONS == 0 and pool.kind in ("bf16", "f16")
    return fits and machine is not None and machine.has_boxes and ctx.gpu.device in DEVICES


def attend_panels(
    ctx: Context, q: DeviceArray, k_pool: Pool, v_pool: Pool, batch: RaggedBatch, first: int, last: int, scores: Scores
) -> DeviceArray:
    """Attend with queries q (tokens, heads, head_dim) of sequences [first, last) of `batch`; same shape, no shares."""
    (_, heads, head_dim), (_, kv_heads, _, _) = q.shape, k_pool.shape
    per_tile = min(heads // kv_heads, PANEL_ROWS)
    parts = kv_heads * -(-(heads // kv_heads) // per_tile)
    *where, count = _place_tiles(ctx, batch, first, last, PANEL_ROWS // per_tile, scores)
    sizes = heads, kv_heads, batch.page_table.shape[1], scores.sliding_window or 0
    positions, stages = PANEL_TILES[head_dim]
    constants = {"G": per_tile, "TILE": positions, "STAGES": stages, "AHEAD": PANEL_AHEAD, "RESIDENT": 1}
    constants["ENDS"] = int(scores.sees_ahead)
    groups, pools = (parts, count, 1), (k_pool, v_pool)
    room_bytes = 2 * head_dim * (PANEL_ROWS + stages * positions)
    return _launch(
        ctx, PANELS, q, pools, batch, (*where,), scores, sizes, constants, groups, PANEL_SIMD_GROUPS, room_bytes
    )


SQUARES = replace(TILES, name="attend_squares", body="squares.body", cuda_only=False, metal_only=True)
SQUARE_SIDE, SQUARE_SIMD_GROUPS = 8, 4
SQUARE_ROWS, SQUARE_DIM = SQUARE_SIDE * SQUARE_SIMD_GROUPS, 256  # larger heads do not fit in a thread's registers


def takes_squares(ctx: Context, pool: Pool) -> bool:
    """Return True if an Apple GPU's matrix units read prompts' keys and values from such pages."""
    fits = pool.shape[3] % SQUARE_SIDE == 0 and pool.shape[3] <= SQUARE_DIM and pool.kind in ("bf16", "f16")
    return fits and ctx.gpu.has_squares


def attend_squares(
    ctx: Context, q: DeviceArray, k_pool: Pool, v_pool: Pool, batch: RaggedBatch, first: int, last: int, scores: Scores
) -> DeviceArray:
    """Attend with queries q (tokens, heads, head_dim) of sequences [first, last) of `batch`; same shape, no shares."""
    heads, (_, kv_heads, _, _) = q.shape[1], k_pool.shape
    per_tile = min(heads // kv_heads, SQUARE_ROWS)
    parts = kv_heads * -(-(heads // kv_heads) // per_tile)
    *where, count = _place_tiles(ctx, batch, first, last, SQUARE_ROWS // per_tile, scores)
    sizes = heads, kv_heads, batch.page_table.shape[1], scores.sliding_window or 0, 1, count
    constants = {"G": per_tile, "ENDS": int(scores.sees_ahead)}
    groups, pools = (parts, count, 1), (k_pool, v_pool)
    return _launch(ctx, SQUARES, q, pools, batch, (*where,), scores, sizes, constants, groups, SQUARE_SIMD_GROUPS)


Tiles = tuple[DeviceArray, DeviceArray, DeviceArray, DeviceArray, int]


def _place_tiles(ctx: Context, batch: RaggedBatch, first: int, last: int, tile_tokens: int, scores: Scores) -> Tiles:
    """Return owners, lengths and ends of the tokens, the tiles and their number; made once for all layers of a step.

    A token sees positions before its end. In a causal text that is its length: it sees its own position and all before.
    """
    placed, window = ctx.gpu.place(batch), scores.sliding_window if scores.symmetric else None
    key = ("tiles", first, last, tile_tokens, scores.symmetric, window, scores.whole_pictures)
    found: Tiles | None = placed.parts.get(key)
    if found is None:
        start, stop = int(batch.query_starts[first]), int(batch.query_starts[last])
        owners, lengths = placed.owners, placed.lengths
        if stop - start < batch.tokens:
            owners, lengths = owners[start:stop], lengths[start:stop]
        tiles = cut_tiles(batch.query_starts[first : last + 1] - start, tile_tokens)
        ends = ctx.gpu.mx.array(_list_ends(batch, scores)[start:stop]) if scores.sees_ahead else lengths
        found = owners, lengths, ends, ctx.gpu.mx.array(tiles), len(tiles)
        placed.parts[key] = found
    return found


def _list_ends(batch: RaggedBatch, scores: Scores) -> IntArray:
    """Return the end (exclusive) of the positions that each token of the batch sees, if tokens see later ones."""
    if scores.whole_pictures:
        return batch.ends
    ends = np.repeat(batch.context_lengths, np.diff(batch.query_starts)).astype(np.int32)
    return (
        ends if scores.sliding_window is None else np.minimum(ends, batch.positions + np.int32(scores.sliding_window))
    )


def cut_tiles(query_starts: IntArray, tile_tokens: int) -> IntArray:
    """Return the first token and number of tokens of each tile, (tiles, 2); the last come first, as they see most."""
    cut = [
        (token, min(tile_tokens, stop - token))
        for start, stop in zip(query_starts[:-1].tolist(), query_starts[1:].tolist(), strict=True)
        for token in range(start, stop, tile_tokens)
    ]
    return np.array(cut[::-1], np.int32)
