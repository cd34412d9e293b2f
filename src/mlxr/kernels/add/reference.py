"""NumPy reference of `add`, which defines its numbers."""

# ruff: noqa: ARG001 -- every implementation takes the context
from __future__ import annotations

import numpy as np

from mlxr.kernels.context import Context
from mlxr.kernels.tensor import FloatArray


def add(ctx: Context, x: FloatArray, other: FloatArray, factor: float) -> FloatArray:
    """(x + other) * factor."""
    return (x + other) * np.float32(factor)
