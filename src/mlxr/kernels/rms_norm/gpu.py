"""`rms_norm` on a GPU: the stream stays f32, the normed rows are what `linear` wants.

What is added may be a product that has not been computed yet, which then adds the stream itself; and the norm waits for
the product that follows, which may do it on the way. Else sum and norm are one launch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlxr.kernels.context import Context
from mlxr.kernels.gpu.deferred import Deferred, settle
from mlxr.kernels.gpu.kernel import LANES, Kernel
from mlxr.kernels.linear.gpu import MAX_ROWS, Normed, join_product
from mlxr.kernels.rms_norm.scales import Scales
from mlxr.kernels.sum_ranks.gpu import find_own_part, sum_and_norm
from mlxr.kernels.tensor import FloatArray

MAX_THREADS = 512
NORM = Kernel(
    "rms_norm",
    Path(__file__).parent,
    "norm.body",
    ("x", "residual", "weight", "bias", "numbers", "sizes"),
    ("normed", "summed"),
)
KERNELS = (NORM,)


def rms_norm(
    ctx: Context, x: Any, weight: FloatArray | None, eps: float, residual: Any | None, scales: Scales
) -> tuple[Any, Any]:
    """summed / sqrt(mean(summed²) + eps) * weight, and summed."""
    gpu, gain, x = ctx.gpu, None if weight is None else ctx.gpu.hold(weight), settle(x)
    if gpu.launcher is None:
        summed = scales.add(x, settle(residual))
        variant = "f32" if residual is None else "f32+residual"
        return gpu.watch.run_mlx("rms_norm", variant, lambda: gpu.mx.fast.rms_norm(summed, gain, eps), summed), summed
    if not scales.change:
        own = find_own_part(residual)
        if gain is not None and own is not None:
            return sum_and_norm(ctx, x, own, gain, eps)
        x, residual = join_product(ctx, x, residual)
    if residual is None and gain is not None and x.shape[0] <= MAX_ROWS:
        parts = Normed(x, gain, eps)
        return Deferred(x.shape, gpu.operands, parts, lambda: launch_norm(ctx, x, gain, None, eps, None, scales)[0]), x
    return launch_norm(ctx, x, gain, None, eps, settle(residual), scales)


def launch_norm(
    ctx: Context,
    x: Any,
    gain: Any | None,
    shift: Any | None,
    eps: float,
    residual: Any | None,
    scales: Scales,
    *,
    is_centred: bool = False,
) -> tuple[Any, Any]:
    """Norm x plus `residual` (rows, columns), or shares of it (shares, rows, columns), after its mean was taken away if
    it is to be centred; also return the sum. `gain` and `shift` are the weight, which may have several rows, and the
    bias on the device."""
    gpu, (rows, columns) = ctx.gpu, x.shape
    width, shares = 8 if columns % 8 == 0 else 1, 0
    if residual is not None:
        shares = residual.shape[0] if residual.ndim == 3 else 1
    numbers = gpu.launcher.numbers
    sizes = numbers(columns, rows if shares > 1 else 0)
    gains = 0 if gain is None else 1 if gain.ndim == 1 else gain.shape[0]
    flags = {"WEIGHT": gains, "BIAS": int(shift is not None), "SCALED": int(scales.change)}
    gain, shift = (numbers(0.0) if vector is None else vector for vector in (gain, shift))
    normed, summed = gpu.launcher.launch(
        NORM,
        [
            x,
            x if residual is None else residual,
            gain,
            shift,
            numbers(eps, scales.residual, scales.total),
            sizes,
        ],
        groups=(rows, 1, 1),
        threads=min(MAX_THREADS, -(-columns // (LANES * width)) * LANES),
        outputs=[((rows, columns), gpu.operands), ((1, 1) if residual is None else (rows, columns), gpu.mx.float32)],
        constants={"RESIDUAL": shares, "N": width, "CENTRED": int(is_centred), **flags},
        types={"Y": gpu.operands, "S": gpu.mx.float32},
    )
    return normed, x if residual is None else summed
