"""`scale` on a GPU: one launch, in the type of x, or none where whoever adds it to something else multiplies it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from mlxr.kernels.add.gpu import defer_sum
from mlxr.kernels.add.summands import Summands
from mlxr.kernels.context import Context
from mlxr.kernels.gpu.deferred import find_parts, settle
from mlxr.kernels.gpu.kernel import Kernel
from mlxr.kernels.linear.gpu import Product, list_summands

THREADS = 256
MAX_SUMMED = 8192  # columns; wider ones are logits, which nothing is added to
SCALE = Kernel("scale", Path(__file__).parent, "scale.body", ("x", "numbers", "sizes"), ("out",))
KERNELS = (SCALE,)


def scale(ctx: Context, x: Any, factor: float, softcap: float | None) -> Any:
    """x * factor, perhaps capped."""
    summands = _find_summands(ctx, x) if softcap is None else None
    if summands is not None:
        return defer_sum(ctx, replace(summands, factor=summands.factor * factor))
    gpu, x = ctx.gpu, settle(x)
    (rows, columns), kind = x.shape, x.dtype
    if gpu.launcher is None:
        variant = "f32" if softcap is None else "f32+softcap"
        return gpu.watch.run_mlx("scale", variant, lambda: _compose(gpu.mx, x, factor, softcap), x)
    width = 8 if columns % 8 == 0 else 1
    (out,) = gpu.launcher.launch(
        SCALE,
        [
            x,
            gpu.launcher.numbers(float(factor)) if softcap is None else gpu.launcher.numbers(factor / softcap, softcap),
            gpu.launcher.numbers(columns),
        ],
        groups=(-(-columns // (THREADS * width)), rows, 1),
        threads=THREADS,
        outputs=[((rows, columns), kind)],
        constants={"CAPPED": int(softcap is not None), "N": width},
        types={"Y": kind},
    )
    return out


def _find_summands(ctx: Context, x: Any) -> Summands | None:
    """Find the summands of x, where it waits: what experts made, or a product that is no wider than the stream."""
    if find_parts(x, Product) is not None and x.shape[1] <= MAX_SUMMED:
        return Summands(list_summands(ctx, x))
    return find_parts(x, Summands)


def _compose(mx: Any, x: Any, factor: float, softcap: float | None) -> Any:
    scaled = x * factor if softcap is None else softcap * mx.tanh(x * (factor / softcap))
    return scaled.astype(x.dtype)
