"""`scale` on a GPU: one launch, in the type of x, or none where x is a sum that waits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from mlxr.kernels.add.gpu import defer_sum
from mlxr.kernels.add.summands import Summands
from mlxr.kernels.context import Context
from mlxr.kernels.gpu.deferred import find_parts, settle
from mlxr.kernels.gpu.kernel import Kernel

THREADS = 256
SCALE = Kernel("scale", Path(__file__).parent, "scale.body", ("x", "numbers", "sizes"), ("out",))
KERNELS = (SCALE,)


def scale(ctx: Context, x: Any, factor: float, softcap: float | None) -> Any:
    """x * factor, perhaps capped."""
    waiting = find_parts(x, Summands)
    if waiting is not None and softcap is None:
        return defer_sum(ctx, replace(waiting, factor=waiting.factor * factor))
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


def _compose(mx: Any, x: Any, factor: float, softcap: float | None) -> Any:
    scaled = x * factor if softcap is None else softcap * mx.tanh(x * (factor / softcap))
    return scaled.astype(x.dtype)
