"""`all_reduce` and `all_gather` on GPUs: one launch on each of them, which writes into the memory of the others.

A sum waits for the numbers of the others; in recorded steps, the launch also does the norm that follows, with the
residual sum: see `sum_and_norm`.
"""

from __future__ import annotations

from pathlib import Path

from mlxr.core.frozen import frozen
from mlxr.kernels.context import Context
from mlxr.kernels.gpu.deferred import Deferred, Value, find_parts, settle
from mlxr.kernels.gpu.kernel import LANES, Kernel
from mlxr.kernels.gpu.ranks import LINES, MAX_GROUPS, PATIENCE_MS
from mlxr.kernels.linear.gpu import list_summands
from mlxr.kernels.tensor import DeviceArray

# Threads of a threadgroup, and how many of these must fit on a multiprocessor, which bounds a thread's registers. This
# leaves room for the following product, which loads its weights meanwhile.
MAX_THREADS, RESIDENT = 256, 2
GATHER_THREADS, GATHER_WIDTH = 256, 4
SUM = Kernel(
    "all_reduce",
    Path(__file__).parent,
    "sum.body",
    ("x", "parts", "weight", "addresses", "numbers", "sizes", "before"),
    ("normed", "summed"),
    headers=("shares.h",),
    has_lines=True,
    cuda_only=True,
    operator="all_reduce",
)
GATHER = Kernel(
    "all_gather",
    Path(__file__).parent,
    "gather.body",
    ("x", "addresses", "sizes", "before"),
    ("out",),
    has_lines=True,
    cuda_only=True,
    operator="all_gather",
)
KERNELS = (SUM, GATHER)


@frozen(eq=False)
class OwnPart:
    """This rank's part of a deferred sum: (rows, columns), or in shares (shares, rows, columns)."""

    array: DeviceArray


def all_reduce(ctx: Context, x: Value) -> Value:
    """Return the sum in f32, deferred if a norm may take it."""
    gpu = ctx.gpu
    if gpu.ranks is None:
        return settle(x)
    part = OwnPart(list_summands(ctx, x))
    if not gpu.is_traced:
        return launch_sum(ctx, part)[0]
    return Deferred(x.shape, gpu.mx.float32, part, lambda: launch_sum(ctx, part)[0])


def find_own_part(value: Value | None) -> OwnPart | None:
    """Return this rank's part of `value` if it is a deferred sum; otherwise None."""
    return find_parts(value, OwnPart)


def sum_and_norm(
    ctx: Context, x: DeviceArray, own: OwnPart, gain: DeviceArray, eps: float
) -> tuple[DeviceArray, DeviceArray]:
    """Return the norm of x plus the sum of all ranks, and that sum."""
    summed, normed = launch_sum(ctx, own, x, gain, eps)
    return normed, summed


def launch_sum(
    ctx: Context, own: OwnPart, x: DeviceArray | None = None, gain: DeviceArray | None = None, eps: float = 0.0
) -> tuple[DeviceArray, DeviceArray]:
    """Return x, if there is one, plus the sum of all ranks, in f32; and with a `gain` its norm."""
    gpu, parts = ctx.gpu, own.array
    wide, ranks, numbers = gpu.mx.float32, gpu.own_ranks, gpu.launcher.numbers
    shares = parts.shape[0] if parts.ndim == 3 else 1
    rows, columns = parts.shape[-2:]
    width = 8 if columns % 8 == 0 else 2
    threads = min(MAX_THREADS, -(-columns // (LANES * width)) * LANES)
    is_narrow = shares == 1 and parts.dtype.size == 2 and width == 8
    row_lines = -(-columns // (threads * width)) * threads * (2 if is_narrow else width // 2)
    turns = -(-rows // min(MAX_GROUPS, LINES // row_lines))
    groups = -(-rows // turns)
    before = numbers(0.0) if gpu.last_turn is None else gpu.last_turn
    normed, summed = gpu.launcher.launch(
        SUM,
        [
            numbers(0.0) if x is None else x,
            parts,
            numbers(0.0) if gain is None else gain,
            ranks.addresses,
            numbers(float(eps)),
            numbers(columns, rows, groups, ranks.rank, PATIENCE_MS),
            before,
        ],
        groups=(groups, 1, 1),
        threads=threads,
        outputs=[((1, 8) if gain is None else (rows, columns), gpu.operands), ((rows, columns), wide)],
        constants={
            "SHARES": shares,
            "RANKS": ranks.count,
            "LINES": LINES,
            "RESIDUAL": int(x is not None),
            "NORM": int(gain is not None),
            "N": width,
            "RESIDENT": RESIDENT,
        },
        types={"P": parts.dtype},
    )
    gpu.last_turn = summed
    return summed, normed


def all_gather(ctx: Context, x: Value, columns: tuple[int, ...]) -> Value:
    """Return the columns of all ranks, in the type of x."""
    gpu, x = ctx.gpu, settle(x)
    ranks, numbers, rows = gpu.own_ranks, gpu.launcher.numbers, x.shape[0]
    pieces = rows * -(-max(columns) // (8 // x.dtype.size))
    groups = min(MAX_GROUPS, -(-pieces // (GATHER_THREADS * GATHER_WIDTH)))
    turns = -(-pieces // (groups * GATHER_THREADS * GATHER_WIDTH))
    starts = [sum(columns[:rank]) for rank in range(len(columns) + 1)]
    before = numbers(0.0) if gpu.last_turn is None else gpu.last_turn
    (out,) = gpu.launcher.launch(
        GATHER,
        [x, ranks.addresses, numbers(rows, groups, ranks.rank, PATIENCE_MS, turns, *starts), before],
        groups=(groups, 1, 1),
        threads=GATHER_THREADS,
        outputs=[((rows, sum(columns)), x.dtype)],
        constants={"RANKS": ranks.count, "LINES": LINES, "WIDTH": GATHER_WIDTH},
        types={"X": x.dtype},
    )
    gpu.last_turn = out
    return out
