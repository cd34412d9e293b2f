"""`rms_norm` on a GPU: the stream stays f32, the normed rows are what `linear` wants.

What is added may be a product that has not been computed yet, which then adds the stream itself; and the norm waits for
the product that follows, which may do it on the way. Else sum and norm are one launch, whatever there is to add up.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlxr.kernels.add.summands import Summands, count_shares, list_constants, list_inputs
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
    ("x", "residual", "other", "input", "gate", "weight", "bias", "numbers", "sizes"),
    ("normed", "summed"),
    ("../add/summands.h", "../gpu/threads.h"),
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
    x, summands = join_residual(ctx, x, residual, scales)
    if summands is None and gain is not None and x.shape[0] <= MAX_ROWS:
        parts = Normed(x, gain, eps)
        return Deferred(x.shape, gpu.operands, parts, lambda: launch_norm(ctx, x, gain, None, eps, None)[0]), x
    return launch_norm(ctx, x, gain, None, eps, summands, scales.total)


def join_residual(ctx: Context, x: Any, residual: Any, scales: Scales) -> tuple[Any, Summands | None]:
    """The sum of x and what a product that waits adds to it, and None; or x and what is still to be added."""
    if scales.change:
        return x, Summands(settle(residual), factor=scales.residual)
    return join_product(ctx, x, residual)


def launch_norm(
    ctx: Context,
    x: Any,
    gain: Any | None,
    shift: Any | None,
    eps: float,
    summands: Summands | None,
    total: float = 1.0,
    *,
    is_centred: bool = False,
) -> tuple[Any, Any]:
    """Norm x plus `summands`, times `total`, after its mean was taken away if it is to be centred; also return the sum.
    `gain` and `shift` are the weight, which may have several rows, and the bias on the device."""
    gpu, (rows, columns) = ctx.gpu, x.shape
    width, numbers = 8 if columns % 8 == 0 else 1, gpu.launcher.numbers
    shares, factor = (0, 1.0) if summands is None else (count_shares(summands.array), summands.factor)
    joined = list_constants(summands)
    sizes = numbers(columns, rows if max(shares, joined["OTHERS"]) > 1 else 0)
    gains = 0 if gain is None else 1 if gain.ndim == 1 else gain.shape[0]
    flags = {"WEIGHT": gains, "BIAS": int(shift is not None), "SCALED": int(factor != 1.0 or total != 1.0)}
    none = numbers(0.0)
    normed, summed = gpu.launcher.launch(
        NORM,
        [
            x,
            *list_inputs(summands, none),
            none if gain is None else gain,
            none if shift is None else shift,
            numbers(eps, factor, total),
            sizes,
        ],
        groups=(rows, 1, 1),
        threads=min(MAX_THREADS, -(-columns // (LANES * width)) * LANES),
        outputs=[((rows, columns), gpu.operands), ((1, 1) if summands is None else (rows, columns), gpu.mx.float32)],
        constants={"RESIDUAL": shares, **joined, "N": width, "CENTRED": int(is_centred), **flags},
        types={"Y": gpu.operands, "S": gpu.mx.float32},
    )
    return normed, x if summands is None else summed
