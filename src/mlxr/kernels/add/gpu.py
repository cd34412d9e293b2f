"""`add` on a GPU, in f32: by the product that makes `other` where it can, or else in a launch of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlxr.kernels.context import Context
from mlxr.kernels.gpu.deferred import settle
from mlxr.kernels.gpu.kernel import Kernel
from mlxr.kernels.linear.gpu import join_product

THREADS = 256
ADD = Kernel("add", Path(__file__).parent, "add.body", ("x", "other", "numbers", "sizes"), ("out",))
KERNELS = (ADD,)


def add(ctx: Context, x: Any, other: Any, factor: float) -> Any:
    """(x + other) * factor."""
    gpu, x = ctx.gpu, settle(x)
    (rows, columns), wide = x.shape, gpu.mx.float32
    if gpu.launcher is None:
        variant = "f32" if factor == 1.0 else "f32+scale"
        return gpu.watch.run_mlx("add", variant, lambda: (x.astype(wide) + settle(other)) * factor, x)
    x, other = join_product(ctx, x, other)
    if other is None and factor == 1.0:
        return x
    width, others = 8 if columns % 8 == 0 else 1, 0
    if other is not None:
        others = other.shape[0] if other.ndim == 3 else 1
    (out,) = gpu.launcher.launch(
        ADD,
        [x, x if other is None else other, gpu.launcher.numbers(float(factor)), gpu.launcher.numbers(columns, rows)],
        groups=(-(-columns // (THREADS * width)), rows, 1),
        threads=THREADS,
        outputs=[((rows, columns), wide)],
        constants={"OTHERS": others, "N": width},
        types={"Y": wide},
    )
    return out
