"""Calls the native `layer_norm` of csrc/operators/norms.inc."""

from __future__ import annotations

from mlxr.kernels.buffers import empty
from mlxr.kernels.context import Context
from mlxr.kernels.rms_norm.scales import Scales
from mlxr.kernels.tensor import FloatArray


def layer_norm(
    ctx: Context,
    x: FloatArray,
    weight: FloatArray,
    bias: FloatArray | None,
    eps: float,
    residual: FloatArray | None,
    scales: Scales,
) -> tuple[FloatArray, FloatArray]:
    """(summed - mean) / sqrt(variance + eps) * weight + bias, and summed."""
    normed = empty(ctx, *x.shape)
    summed = None if residual is None else empty(ctx, *x.shape)
    weights = weight.reshape(-1, x.shape[1])
    ctx.module.layer_norm(ctx.native, x, weights, bias, eps, residual, normed, summed, scales.residual, scales.total)
    return normed, x if summed is None else summed
