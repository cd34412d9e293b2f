"""NumPy reference of `activate`, which defines its numbers."""

# ruff: noqa: ARG001 -- every implementation takes the context
from __future__ import annotations

import math

import numpy as np

from mlxr.kernels.context import Context
from mlxr.kernels.tensor import FloatArray

_SQRT_2_OVER_PI = np.float32(math.sqrt(2 / math.pi))
_CUBIC = np.float32(0.044715)


def activate(ctx: Context, gate_up: FloatArray, kind: str) -> FloatArray:
    """act(first half) * second half."""
    half = gate_up.shape[1] // 2
    gate, up = gate_up[:, :half], gate_up[:, half:]
    result: FloatArray = (_silu(gate) if kind == "silu" else _gelu_tanh(gate)) * up
    return result


def _silu(x: FloatArray) -> FloatArray:
    # exp(-|x|) never overflows; sigmoid(-x) = exp(-x) / (1 + exp(-x))
    small = np.exp(-np.abs(x))
    result: FloatArray = x * np.where(x >= 0, 1 / (1 + small), small / (1 + small))
    return result


def _gelu_tanh(x: FloatArray) -> FloatArray:
    result: FloatArray = np.float32(0.5) * x * (1 + np.tanh(_SQRT_2_OVER_PI * (x + _CUBIC * x * x * x)))
    return result
