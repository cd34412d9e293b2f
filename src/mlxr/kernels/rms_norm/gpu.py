"""`rms_norm` on a GPU: sum and norm in one launch; the stream stays f32, the normed rows are what `linear` wants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlxr.kernels.context import Context
from mlxr.kernels.gpu.kernel import LANES, Kernel
from mlxr.kernels.tensor import FloatArray

MAX_THREADS = 512
NORM = Kernel(
    "rms_norm",
    Path(__file__).parent,
    "norm.body",
    ("x", "residual", "weight", "numbers", "sizes"),
    ("normed", "summed"),
)
KERNELS = (NORM,)


def rms_norm(ctx: Context, x: Any, weight: FloatArray, eps: float, residual: Any | None) -> tuple[Any, Any]:
    """summed / sqrt(mean(summed²) + eps) * weight, and summed."""
    gpu, scale = ctx.gpu, ctx.gpu.hold(weight)
    if gpu.launcher is None:
        summed = x if residual is None else x + residual
        return gpu.mx.fast.rms_norm(summed, scale, eps), summed
    rows, columns = x.shape
    normed, summed = gpu.launcher.launch(
        NORM,
        [x, x if residual is None else residual, scale, gpu.launcher.numbers(eps), gpu.launcher.numbers(columns)],
        groups=(rows, 1, 1),
        threads=min(MAX_THREADS, -(-columns // LANES) * LANES),
        outputs=[((rows, columns), gpu.activations), ((1, 1) if residual is None else (rows, columns), gpu.mx.float32)],
        constants={"RESIDUAL": int(residual is not None)},
        types={"Y": gpu.activations, "S": gpu.mx.float32},
    )
    return normed, x if residual is None else summed
