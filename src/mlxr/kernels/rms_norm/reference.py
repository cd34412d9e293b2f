"""NumPy reference of `rms_norm`, which defines its numbers."""

# ruff: noqa: ARG001 -- every implementation takes the context
from __future__ import annotations

import numpy as np

from mlxr.kernels.context import Context
from mlxr.kernels.rms_norm.scales import Scales
from mlxr.kernels.tensor import FloatArray


def rms_norm(
    ctx: Context, x: FloatArray, weight: FloatArray | None, eps: float, residual: FloatArray | None, scales: Scales
) -> tuple[FloatArray, FloatArray]:
    """summed / sqrt(mean(summed²) + eps) * weight, and summed."""
    summed = scales.add(x, residual)
    mean_square: FloatArray = np.square(summed).mean(axis=1, keepdims=True)
    rms: FloatArray = np.sqrt(mean_square + np.float32(eps))
    normed: FloatArray = summed / rms
    return normed if weight is None else normed * weight, summed
