"""`add` on a GPU, in f32: by the product that makes `other`, by the norm that follows, or else in a launch of its own.

Sums of what experts made are left to whoever reads them, and take the shared expert in, with its gate.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from mlxr.kernels.add.summands import Gated, Summands, count_shares, list_constants, list_inputs
from mlxr.kernels.context import Context
from mlxr.kernels.gpu.deferred import Deferred, find_parts, settle
from mlxr.kernels.gpu.kernel import LANES, Kernel
from mlxr.kernels.linear.gpu import join_product, list_summands

MAX_THREADS = 512
ADD = Kernel(
    "add",
    Path(__file__).parent,
    "add.body",
    ("x", "array", "other", "input", "gate", "numbers", "sizes"),
    ("out",),
    ("summands.h", "../gpu/threads.h"),
)
KERNELS = (ADD,)


def add(ctx: Context, x: Any, other: Any, factor: float) -> Any:
    """(x + other) * factor, deferred where x is a sum that waits."""
    gpu = ctx.gpu
    if gpu.launcher is None:
        x, wide = settle(x), gpu.mx.float32
        variant = "f32" if factor == 1.0 else "f32+scale"
        return gpu.watch.run_mlx("add", variant, lambda: (x.astype(wide) + settle(other)) * factor, x)
    waiting = find_parts(x, Summands)
    if waiting is not None and waiting.is_plain:
        gated = find_parts(other, Gated)
        array, dot = (other, None) if gated is None else (gated.y, gated.dot)
        return defer_sum(ctx, replace(waiting, other=list_summands(ctx, array), dot=dot, factor=factor))
    x, summands = join_product(ctx, settle(x), other)
    return x if summands is None and factor == 1.0 else _launch(ctx, x, summands, factor)


def defer_sum(ctx: Context, summands: Summands) -> Deferred:
    """The sum, (rows, columns) in f32, which is made when somebody asks for it."""
    rows, columns = summands.array.shape[-2:]
    return Deferred(
        (rows, columns), ctx.gpu.mx.float32, summands, lambda: _launch(ctx, None, summands), summands.arrays
    )


def _launch(ctx: Context, x: Any, summands: Summands | None, total: float = 1.0) -> Any:
    """(x + summands) * total, of which one may be missing."""
    gpu, numbers = ctx.gpu, ctx.gpu.launcher.numbers
    rows, columns = x.shape if summands is None else summands.array.shape[-2:]
    width, shares = 8 if columns % 8 == 0 else 1, 0 if summands is None else count_shares(summands.array)
    threads = min(MAX_THREADS, -(-columns // (LANES * width)) * LANES)
    parts = 1 if summands is not None and summands.dot is not None else -(-columns // (threads * width))
    none = numbers(0.0)
    (out,) = gpu.launcher.launch(
        ADD,
        [
            none if x is None else x,
            *list_inputs(summands, none),
            numbers(1.0 if summands is None else summands.factor, float(total)),
            numbers(columns, rows, parts * threads * width),
        ],
        groups=(rows, parts, 1),
        threads=threads,
        outputs=[((rows, columns), gpu.mx.float32)],
        constants={"HAS_X": int(x is not None), "SUMMANDS": shares, **list_constants(summands), "N": width},
        types={"Y": gpu.mx.float32},
    )
    return out
