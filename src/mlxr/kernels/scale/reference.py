"""NumPy reference of `scale`, which defines its numbers."""

# ruff: noqa: ARG001 -- every implementation takes the context
from __future__ import annotations

import numpy as np

from mlxr.kernels.context import Context
from mlxr.kernels.tensor import FloatArray


def scale(ctx: Context, x: FloatArray, factor: float, softcap: float | None) -> FloatArray:
    """x * factor, perhaps capped."""
    if softcap is None:
        return x * np.float32(factor)
    result: FloatArray = np.float32(softcap) * np.tanh(x * np.float32(factor / softcap))
    return result
