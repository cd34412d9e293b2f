"""Positions of long sequences in shares, one threadgroup to each, and how the results come together again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlxr.kernels.attend.scores import Scores
from mlxr.kernels.context import Context
from mlxr.kernels.gpu.kernel import Kernel
from mlxr.kernels.ragged import RaggedBatch

MERGE_THREADS = 128
WANTED_GROUPS = 512  # threadgroups that keep a large GPU busy
MIN_SHARE = 256  # positions below which a share is not worth a merge
MERGE = Kernel(
    "attend_merge",
    Path(__file__).parent,
    "merge.body",
    ("sums", "stats", "sinks", "sizes"),
    ("out",),
    ("powers.h",),
)


def merge_shares(ctx: Context, sums: Any, stats: Any, scores: Scores) -> Any:
    """(tokens, heads, head_dim) of sums (tokens, heads, shares, head_dim), their maxima and totals, and sinks."""
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


def hold_sinks(ctx: Context, scores: Scores) -> Any:
    """The sinks on the device; zeros stand for none."""
    return ctx.gpu.launcher.numbers(0.0) if scores.sinks is None else ctx.gpu.hold(scores.sinks)


def count_positions(batch: RaggedBatch, page_size: int, sliding_window: int | None) -> int:
    """Most positions that a query may see: those of the table, since a recorded step serves longer contexts too."""
    return min(int(batch.page_table.shape[1]) * page_size, sliding_window or 2**31)


def choose_shares(positions: int, groups: int, wanted: int = WANTED_GROUPS, least: int = MIN_SHARE) -> int:
    """Into how many shares to split `positions`, when so many threadgroups exist without and `wanted` would be good; a
    share has at least `least` positions."""
    return max(1, min(positions // least, wanted // groups))
