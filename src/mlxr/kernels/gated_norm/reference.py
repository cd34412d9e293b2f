"""NumPy reference of `gated_norm`, which defines its numbers."""

# ruff: noqa: ARG001 -- every implementation takes the context
from __future__ import annotations

import numpy as np

from mlxr.kernels.context import Context
from mlxr.kernels.tensor import FloatArray


def gated_norm(
    ctx: Context,
    x: FloatArray,
    gate: FloatArray,
    weight: FloatArray | None,
    eps: float,
    width: int,
    gate_first: bool,
    first: int,
) -> FloatArray:
    """The norm of each group and the gate."""
    gates = gate[:, first : first + x.shape[1]]
    with np.errstate(over="ignore"):  # exp(-gate) may be infinite, and the result 0
        silu = gates / (np.float32(1) + np.exp(-gates))
    if weight is None:
        return x * silu.astype(np.float32)
    groups: FloatArray = (x * silu.astype(np.float32) if gate_first else x).reshape(len(x), -1, width)
    root = np.sqrt(np.square(groups).mean(axis=2, keepdims=True) + np.float32(eps))
    normed: FloatArray = (groups / root * weight.reshape(-1, width)).reshape(x.shape)
    return normed if gate_first else (normed * silu).astype(np.float32)
