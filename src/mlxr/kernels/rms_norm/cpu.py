"""Calls the native `rms_norm` of csrc/operators/norms.inc."""

from __future__ import annotations

from mlxr.kernels.buffers import empty
from mlxr.kernels.context import Context
from mlxr.kernels.rms_norm.scales import Scales
from mlxr.kernels.tensor import FloatArray


def rms_norm(
    ctx: Context, x: FloatArray, weight: FloatArray | None, eps: float, residual: FloatArray | None, scales: Scales
) -> tuple[FloatArray, FloatArray]:
    """summed / sqrt(mean(summed²) + eps) * weight, and summed."""
    normed = empty(ctx, *x.shape)
    summed = None if residual is None else empty(ctx, *x.shape)
    ctx.module.rms_norm(ctx.native, x, weight, eps, residual, normed, summed, scales.residual, scales.total)
    return normed, x if summed is None else summed
