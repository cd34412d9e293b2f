"""NumPy reference of `gate_heads`, which defines its numbers."""

# ruff: noqa: ARG001 -- every implementation takes the context
from __future__ import annotations

import numpy as np

from mlxr.kernels.context import Context
from mlxr.kernels.tensor import FloatArray


def gate_heads(ctx: Context, x: FloatArray, gates: FloatArray) -> FloatArray:
    """x times the sigmoid of its gate."""
    with np.errstate(over="ignore"):  # exp(-gate) may be infinite, and the sigmoid 0
        share = np.float32(1) / (np.float32(1) + np.exp(-gates))
    heads: FloatArray = x.reshape(*gates.shape, x.shape[1] // gates.shape[1]) * share[:, :, None]
    return heads.reshape(x.shape)
