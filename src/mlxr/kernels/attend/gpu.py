"""`attend` on a GPU: straight from pages if a kernel reads them, otherwise over gathered pages.

Neighbouring sequences with one query each share a launch; many positions are split among threadgroups and merged.
Sequences with more queries share a launch, too, if matrix units read such pages; otherwise the pages of each sequence
are gathered for MLX's attention, which the ledger counts as copied bytes. Without kernels everything is gathered.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mlxr.core.errors import DeviceError
from mlxr.kernels.attend.pages import (
    HEAD_DIMS,
    MERGE,
    PANELS,
    SMALL_DIM,
    SQUARES,
    STREAM,
    TILES,
    attend_panels,
    attend_squares,
    attend_stream,
    attend_tiles,
    choose_shares,
    count_positions,
    hold_sinks,
    merge_shares,
    takes_panels,
    takes_pool,
    takes_squares,
)
from mlxr.kernels.attend.scores import Scores
from mlxr.kernels.checks import refuse
from mlxr.kernels.context import Context
from mlxr.kernels.gpu.kernel import Kernel
from mlxr.kernels.gpu.mlx import Mlx
from mlxr.kernels.gpu.pool import Pool
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.tensor import DeviceArray, NumberType

SIMD_GROUPS = 4
MAX_LANES_DIM = 640
# Largest head dims with which a lane holds four query heads in registers, or two; an Apple GPU has 128 for a thread.
MOST_HELD_DIMS, APPLE_HELD_DIMS = (128, 256), (64, 128)
MAX_TILED_PAIRS = 2**15  # pairs of a query and a position; with more, panels or MLX's own attention are faster
# With more pairs, gathering pays up to this head_dim: MLX's attention was 10 to 25 % faster on an H200.
MAX_PANEL_PAIRS, FUSED_DIM = 2**22, 128
LENGTH_STEP = 256  # MLX plans its attention anew, in some 40 ms, for each pair of numbers of queries and positions
_FOLDER = Path(__file__).parent
DECODE = Kernel(
    "attend_decode",
    _FOLDER,
    "decode.body",
    ("q", "k_pool", "v_pool", "page_table", "owners", "lengths", "sinks", "numbers", "sizes"),
    ("out", "stats"),
    ("powers.h",),
)
GATHER = Kernel(
    "attend_gather", _FOLDER, "gather.body", ("k_pool", "v_pool", "pages", "after", "sizes"), ("keys", "values")
)
GATHER_THREADS = 256
MAX_SCORES = 2**24  # most scores that MLX's operations make at a time: 64 MiB
PLAIN_TYPES = ("bf16", "f16", "f32")
KERNELS = (DECODE, STREAM, TILES, PANELS, SQUARES, MERGE, GATHER)
BY_TILES = {"tiles": attend_tiles, "panels": attend_panels, "squares": attend_squares}


def allocate_pool(ctx: Context, pages: int, kv_heads: int, page_size: int, head_dim: int, kv_type: str) -> Pool:
    """Return a zeroed pool on the device. Raises DeviceError for q8, which no GPU kernel reads or writes."""
    if kv_type not in PLAIN_TYPES:
        raise DeviceError(
            f"device {ctx.device!r} keeps no {kv_type} pages; kv_type must be one of {', '.join(PLAIN_TYPES)} there"
        )
    return ctx.gpu.allocate_pool((pages, kv_heads, page_size, head_dim), kv_type)


def attend(
    ctx: Context,
    q: DeviceArray,
    k_pool: Pool,
    v_pool: Pool,
    batch: RaggedBatch,
    scores: Scores,
) -> DeviceArray:
    """Attend with every query token to the pages of its sequence: (T, heads * value_dim)."""
    mx, (tokens, heads, head_dim) = ctx.gpu.mx, q.shape
    results = []
    for kind, first, last in _plan_runs(ctx, batch, k_pool, scores):
        start, stop = int(batch.query_starts[first]), int(batch.query_starts[last])
        part = q if (start, stop) == (0, tokens) else q[start:stop]
        if kind in BY_TILES:
            results.append(BY_TILES[kind](ctx, part, k_pool, v_pool, batch, first, last, scores))
        elif kind == "stream":
            results.append(attend_stream(ctx, part, k_pool, v_pool, batch, first, scores))
        elif kind == "lanes":
            results.append(_decode(ctx, part, k_pool, v_pool, batch, start, stop, scores))
        else:
            results.append(_prefill(ctx, part, k_pool, v_pool, batch, first, scores))
    joined = results[0] if len(results) == 1 else mx.concatenate(results)
    return joined.reshape(tokens, heads * (scores.value_dim or head_dim))


Runs = list[tuple[str, int, int]]


def _plan_runs(ctx: Context, batch: RaggedBatch, pool: Pool, scores: Scores) -> Runs:
    """Check the pages of a batch and cut it into runs that are computed together; once for all layers of a step."""
    parts = ctx.gpu.place(batch).parts
    capped, biased = scores.softcap is not None, scores.biases is not None
    key = ("runs", pool.shape, pool.kind, scores.sliding_window, scores.value_dim, scores.symmetric, capped, biased)
    found: Runs | None = parts.get(key)
    if found is None:
        _check_pages(batch, pool, scores.sliding_window)
        found = parts[key] = [*_runs(batch, _list_kinds(ctx, pool, scores))]
    return found


def _list_kinds(ctx: Context, pool: Pool, scores: Scores) -> tuple[str, str, str, str]:
    """Choose "stream", "lanes", "tiles", "panels", "squares" or "gather" for one query, a few, many and very many."""
    head_dim, capped = pool.shape[3], scores.softcap is not None  # MLX's own attention has no softcap
    if ctx.gpu.launcher is None or scores.biases is not None:
        return "gather", "gather", "gather", "gather"
    many = most = "gather"
    if scores.value_dim is None and takes_panels(ctx, pool):
        many, most = "panels", "gather" if head_dim <= FUSED_DIM and not capped else "panels"
    elif scores.value_dim is None and takes_squares(ctx, pool):
        many = most = "squares"
    if scores.symmetric:  # texts of encoders are many and short
        tiled = "tiles" if takes_pool(ctx, pool, (SMALL_DIM, *HEAD_DIMS)) else many
        return tiled, tiled, *(("panels", "panels") if many == "panels" else (tiled, tiled))
    if takes_pool(ctx, pool) and many != "squares":
        return ("stream", "tiles", *(("tiles", "tiles") if capped and many == "gather" else (many, most)))
    return ("lanes" if head_dim % 8 == 0 and head_dim <= MAX_LANES_DIM else "gather"), many, many, most


def _runs(batch: RaggedBatch, kinds: tuple[str, str, str, str]) -> Iterator[tuple[str, int, int]]:
    """Yield (kind, first, last) for neighbouring sequences [first, last) to compute together.

    Sequences of a few queries beside those of many go by panels, too, to share their launch.
    """
    counts = np.diff(batch.query_starts)
    pairs = counts.astype(np.int64) * (batch.context_lengths - counts // 2)
    classes = np.where(counts == 1, 0, 1 + (pairs > MAX_TILED_PAIRS) + (pairs > MAX_PANEL_PAIRS))
    if kinds[2] == "panels" and 2 in classes:
        classes[classes == 1] = 2
    first = 0
    for index in range(len(classes)):
        kind, following = kinds[classes[index]], classes[index + 1 : index + 2]
        if kind == "gather" or not len(following) or kinds[following[0]] != kind:
            yield kind, first, index + 1
            first = index + 1


def _decode(
    ctx: Context,
    q: DeviceArray,
    k_pool: Pool,
    v_pool: Pool,
    batch: RaggedBatch,
    start: int,
    stop: int,
    scores: Scores,
) -> DeviceArray:
    gpu, placed, (tokens, heads, head_dim) = ctx.gpu, ctx.gpu.place(batch), q.shape
    _, kv_heads, page_size, _ = k_pool.shape
    whole, value_dim = tokens == batch.tokens, scores.value_dim or head_dim
    of_four, of_two = APPLE_HELD_DIMS if gpu.is_apple else MOST_HELD_DIMS
    tile = 4 if head_dim <= of_four else 2 if head_dim <= of_two else 1
    tile = next(size for size in (1, 2, 4) if size >= min(tile, heads // kv_heads))
    groups = kv_heads * -(-(heads // kv_heads) // tile)
    longest = count_positions(batch, page_size, scores.sliding_window)
    shares = choose_shares(longest, groups * tokens)
    share = -(-longest // shares)
    share = 1 << (share - 1).bit_length() if shares > 1 else 1 << 30
    shares = -(-longest // share) if shares > 1 else 1
    sizes = (heads, kv_heads, page_size, batch.page_table.shape[1], scores.sliding_window or 0, share, shares)
    split = shares > 1
    out, stats = gpu.launcher.launch(
        DECODE,
        [
            q,
            k_pool.array,
            v_pool.array,
            placed.page_table,
            placed.owners if whole else placed.owners[start:stop],
            placed.lengths if whole else placed.lengths[start:stop],
            hold_sinks(ctx, scores),
            gpu.launcher.numbers(*scores.powers),
            gpu.launcher.numbers(*sizes),
        ],
        groups=(groups, tokens, shares),
        threads=32 * SIMD_GROUPS,
        outputs=[
            ((tokens, heads, shares, value_dim), gpu.mx.float32 if split else gpu.operands),
            ((tokens, heads, shares, 2) if split else (8,), gpu.mx.float32),
        ],
        constants={
            "D": head_dim,
            "G": tile,
            "SPLIT": int(split),
            "LATENT": int(scores.value_dim is not None),
            "FIRST": head_dim - value_dim,
            **scores.constants,
        },
        types={"X": q.dtype, "Y": gpu.mx.float32 if split else gpu.operands},
    )
    return merge_shares(ctx, out, stats, scores) if split else out.reshape(tokens, heads, value_dim)


def _prefill(
    ctx: Context,
    q: DeviceArray,
    k_pool: Pool,
    v_pool: Pool,
    batch: RaggedBatch,
    sequence: int,
    scores: Scores,
) -> DeviceArray:
    gpu, mx, queries = ctx.gpu, ctx.gpu.mx, q.shape[0]
    if gpu.narrow and k_pool.kind in ("bf16", "f16"):
        q = q.astype(k_pool.array.dtype)  # MLX has fused attention for 16 bits only
    pages, seen, front, padding, mask = _place_run(ctx, batch, sequence, k_pool.shape[2], scores, q.dtype)
    keys, values = _gather(ctx, k_pool, v_pool, pages, seen, padding, q)
    if scores.value_dim is not None:
        values = keys[:, :, keys.shape[2] - scores.value_dim :]
    if front or padding:
        q = mx.pad(q, ((front, padding), (0, 0), (0, 0)))
    rows, sinks = q.transpose(1, 0, 2), None if scores.sinks is None else gpu.hold(scores.sinks)

    def compute() -> DeviceArray:
        if scores.softcap is not None:
            return attend_composed(mx, rows, keys, values, mask, scores, sinks)
        own = None if sinks is None else sinks.astype(q.dtype)
        return mx.fast.scaled_dot_product_attention(
            rows[None], keys[None], values[None], scale=scores.scale, mask=mask, sinks=own
        ).squeeze(0)

    variant = scores.name_variant(k_pool.kind)
    attended = gpu.watch.run_mlx("attend", variant, compute, rows, keys, values)
    return attended.transpose(1, 0, 2)[front : front + queries].astype(gpu.operands)


Run = tuple[DeviceArray, int, int, int, DeviceArray | str | None]


def _place_run(
    ctx: Context, batch: RaggedBatch, sequence: int, page_size: int, scores: Scores, kind: NumberType
) -> Run:
    """Return the pages that a sequence's queries see, the positions in them, the rows of padding before and after the
    queries, and the mask; made once for all layers of a step.

    Padding after the queries has positions, too. The mask is "causal", None if all queries see all positions, or
    numbers (queries, positions) of type `kind` that are added to scores, as MLX would make them from other masks for
    every head; with biases, there are such numbers for each head.
    """
    gpu, placed, sliding_window = ctx.gpu, ctx.gpu.place(batch), scores.sliding_window
    key = ("run", sequence, sliding_window, scores.symmetric, scores.whole_pictures, kind, id(scores.biases))
    found: Run | None = placed.parts.get(key)
    if found is None:
        queries = int(batch.query_starts[sequence + 1] - batch.query_starts[sequence])
        length = int(batch.context_lengths[sequence])
        first_page = 0 if sliding_window is None else max(0, length - queries + 1 - sliding_window) // page_size
        seen = length - first_page * page_size
        pages = placed.page_table[sequence : sequence + 1, first_page : -(-length // page_size)].reshape(-1)
        step = 1 if gpu.launcher is None else LENGTH_STEP
        front, padding = (seen - queries) % step, -seen % step
        mask: DeviceArray | str | None = "causal"
        has_window = sliding_window is not None and seen > sliding_window
        changes = has_window or scores.biases is not None
        if scores.symmetric and not (changes or padding or scores.softcap):
            mask = None
        elif scores.sees_ahead or changes:
            mx, window = gpu.mx, sliding_window or seen + padding
            own, others = mx.arange(seen - queries - front, seen + padding)[:, None], mx.arange(seen + padding)[None]
            visible = (others > own - window) & (others < own + window if scores.symmetric else others <= own)
            if scores.whole_pictures:
                start, stop = (int(one) for one in batch.query_starts[sequence : sequence + 2])
                ends = mx.array(batch.ends[start:stop] - np.int32(first_page * page_size))
                ends = mx.pad(ends, ((front, padding),))[:, None]  # 0 for padding
                visible = visible | ((others > own - window) & (others < ends))
            if scores.symmetric and padding:  # rows of padding see the first position, as softmax needs one
                visible = (visible & (others < seen) & (own < seen)) | ((own >= seen) & (others == 0))
            added: DeviceArray | float = 0.0
            if scores.biases is not None:
                span = scores.biases.shape[1] // 2
                added = mx.take(gpu.hold(scores.biases), mx.clip(others - own, -span, span) + span, axis=1)
            mask = mx.where(visible, added, -mx.inf).astype(kind)
        found = placed.parts[key] = (pages, seen, front, padding, mask)
    return found


def _gather(
    ctx: Context, k_pool: Pool, v_pool: Pool, pages: DeviceArray, length: int, padding: int, q: DeviceArray
) -> tuple[DeviceArray, DeviceArray]:
    """Return keys and values of the first `length` positions of `pages`, then zeros, in q's type.

    Each is (kv_heads, length + padding, head_dim).
    """
    gpu, (_, kv_heads, page_size, head_dim) = ctx.gpu, k_pool.shape
    ctx.ledger.add_copied_bytes(2 * length * kv_heads * head_dim * k_pool.array.itemsize)
    if gpu.launcher is None:
        taken = (gpu.mx.take(pool.array, pages, axis=0).transpose(1, 0, 2, 3) for pool in (k_pool, v_pool))
        keys, values = (part.reshape(kv_heads, -1, head_dim)[:, :length].astype(q.dtype) for part in taken)
        return keys, values
    shape, width = (kv_heads, length + padding, head_dim), 8 if head_dim % 8 == 0 else 1
    keys, values = gpu.launcher.launch(
        GATHER,
        [k_pool.array, v_pool.array, pages, q, gpu.launcher.numbers(kv_heads, page_size, length, padding)],
        groups=(-(-shape[1] * head_dim // (GATHER_THREADS * width)), kv_heads, 1),
        threads=GATHER_THREADS,
        outputs=[(shape, q.dtype), (shape, q.dtype)],
        constants={"D": head_dim, "N": width},
    )
    return keys, values


def _check_pages(batch: RaggedBatch, pool: Pool, sliding_window: int | None) -> None:
    """Check that every page that a query sees is one of the pool's, or its spare one."""
    pages, page_size = pool.shape[0] + 1, pool.shape[2]
    if batch.page_table.min() >= 0 and batch.page_table.max() < pages:
        return
    queries = np.diff(batch.query_starts)
    for used, length, count in zip(batch.page_table, batch.context_lengths, queries, strict=True):
        first = 0 if sliding_window is None else max(0, int(length - count) + 1 - sliding_window) // page_size
        seen = used[first : -(-int(length) // page_size)]
        if seen.min() < 0 or seen.max() >= pages:
            refuse("attend", "page_table", seen.tolist(), f"pages from 0 to {pages - 2}")


def attend_composed(
    mx: Mlx,
    q: DeviceArray,
    keys: DeviceArray,
    values: DeviceArray,
    mask: DeviceArray | str | None,
    scores: Scores,
    sinks: DeviceArray | None,
) -> DeviceArray:
    """Attend with a softcap by MLX's operations; the result has the shape of the queries.

    q is (heads, queries, head_dim), keys and values (kv_heads, positions, head_dim). `mask` (queries, positions) is
    added to capped scores, or is "causal": the last query sees all positions. `sinks` are those of `scores` on the
    device, or None.
    """
    (heads, queries, head_dim), (kv_heads, positions, _) = q.shape, keys.shape
    group = heads // kv_heads
    assert scores.softcap is not None
    assert mask is not None
    grouped = (q * (scores.scale / scores.softcap)).astype(mx.float32).reshape(kv_heads, group, queries, head_dim)
    turned, values = keys.astype(mx.float32)[:, None].swapaxes(2, 3), values.astype(mx.float32)[:, None]
    step, parts = max(1, MAX_SCORES // (heads * positions)), []
    for first in range(0, queries, step):
        last = min(first + step, queries)
        capped = scores.softcap * mx.tanh(grouped[:, :, first:last] @ turned)
        if isinstance(mask, str):
            seen = mx.arange(positions)[None] <= mx.arange(first, last)[:, None] + (positions - queries)
            capped = mx.where(seen, capped, mx.array(-mx.inf))
        else:
            capped = capped + mask[first:last]
        if sinks is not None:
            column = mx.broadcast_to(sinks.reshape(kv_heads, group, 1, 1), (kv_heads, group, last - first, 1))
            capped = mx.concatenate([capped, column], axis=-1)
        weights = mx.softmax(capped, axis=-1, precise=True)[..., :positions]
        parts.append((weights @ values).reshape(heads, last - first, head_dim))
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)
