"""NumPy reference of `layer_norm`, which defines its numbers."""

# ruff: noqa: ARG001 -- every implementation takes the context
from __future__ import annotations

import numpy as np

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
    summed = scales.add(x, residual)
    centred = summed - summed.mean(axis=1, keepdims=True)
    variance: FloatArray = np.square(centred).mean(axis=1, keepdims=True)
    if weight.ndim == 2:
        weight = weight[np.arange(len(x)) % len(weight)]
    normed: FloatArray = centred / np.sqrt(variance + np.float32(eps)) * weight
    return normed if bias is None else normed + bias, summed
