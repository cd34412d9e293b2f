"""`gather_ranks` on GPUs: one launch on each of them, which writes its columns into the memory of the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlxr.kernels.context import Context
from mlxr.kernels.gpu.deferred import settle
from mlxr.kernels.gpu.kernel import Kernel
from mlxr.kernels.gpu.ranks import LINES, MAX_GROUPS, PATIENCE_MS

THREADS, WIDTH = 256, 4
GATHER = Kernel(
    "gather_ranks",
    Path(__file__).parent,
    "gather.body",
    ("x", "addresses", "sizes", "before"),
    ("out",),
    has_lines=True,
    cuda_only=True,
)
KERNELS = (GATHER,)


def gather_ranks(ctx: Context, x: Any, columns: tuple[int, ...]) -> Any:
    """All columns, in the type of x."""
    gpu, x = ctx.gpu, settle(x)
    ranks, numbers, rows = gpu.ranks, gpu.launcher.numbers, x.shape[0]
    pieces = rows * -(-max(columns) // (8 // x.dtype.size))
    groups = min(MAX_GROUPS, -(-pieces // (THREADS * WIDTH)))
    turns = -(-pieces // (groups * THREADS * WIDTH))
    starts = [sum(columns[:rank]) for rank in range(len(columns) + 1)]
    before = numbers(0.0) if gpu.last_turn is None else gpu.last_turn
    (out,) = gpu.launcher.launch(
        GATHER,
        [x, ranks.addresses, numbers(rows, groups, ranks.rank, PATIENCE_MS, turns, *starts), before],
        groups=(groups, 1, 1),
        threads=THREADS,
        outputs=[((rows, sum(columns)), x.dtype)],
        constants={"RANKS": ranks.count, "LINES": LINES, "WIDTH": WIDTH},
        types={"X": x.dtype},
    )
    gpu.last_turn = out
    return out
