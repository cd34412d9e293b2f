"""`layer_norm` on a GPU: the launch of `rms_norm`, which then takes the mean away first."""

from __future__ import annotations

from typing import Any

from mlxr.kernels.context import Context
from mlxr.kernels.gpu.deferred import settle
from mlxr.kernels.rms_norm.gpu import join_residual, launch_norm
from mlxr.kernels.rms_norm.scales import Scales
from mlxr.kernels.tensor import FloatArray


def layer_norm(
    ctx: Context, x: Any, weight: FloatArray, bias: FloatArray | None, eps: float, residual: Any | None, scales: Scales
) -> tuple[Any, Any]:
    """(summed - mean) / sqrt(variance + eps) * weight + bias, and summed."""
    gpu, gain, x = ctx.gpu, ctx.gpu.hold(weight), settle(x)
    shift = None if bias is None else gpu.hold(bias)
    if gpu.launcher is None:
        summed = scales.add(x, settle(residual))
        variant = "f32" if residual is None else "f32+residual"
        return gpu.watch.run_mlx(
            "layer_norm", variant, lambda: _compose(gpu.mx, summed, gain, shift, eps), summed
        ), summed
    x, summands = join_residual(ctx, x, residual, scales)
    return launch_norm(ctx, x, gain, shift, eps, summands, scales.total, is_centred=True)


def _compose(mx: Any, x: Any, gain: Any, shift: Any, eps: float) -> Any:
    if gain.ndim == 1:
        return mx.fast.layer_norm(x, gain, shift, eps)
    normed = mx.fast.layer_norm(x, None, None, eps) * gain[mx.arange(x.shape[0]) % gain.shape[0]]
    return normed if shift is None else normed + shift
