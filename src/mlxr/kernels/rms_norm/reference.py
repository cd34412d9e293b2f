"""NumPy reference of `rms_norm`, which defines its numbers."""

# ruff: noqa: ARG001 -- every implementation takes the context
from __future__ import annotations

import numpy as np

from mlxr.kernels.context import Context
from mlxr.kernels.tensor import FloatArray


def rms_norm(
    ctx: Context, x: FloatArray, weight: FloatArray | None, eps: float, residual: FloatArray | None
) -> tuple[FloatArray, FloatArray]:
    """summed / sqrt(mean(summed²) + eps) * weight, and summed."""
    summed = x if residual is None else x + residual
    mean_square: FloatArray = np.square(summed).mean(axis=1, keepdims=True)
    rms: FloatArray = np.sqrt(mean_square + np.float32(eps))
    normed: FloatArray = summed / rms
    return normed if weight is None else normed * weight, summed
