"""NumPy reference of `activate`, which defines its numbers."""

# ruff: noqa: ARG001 -- every implementation takes the context
from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from mlxr.kernels.context import Context
from mlxr.kernels.tensor import FloatArray

_SQRT_2_OVER_PI = np.float32(math.sqrt(2 / math.pi))
_CUBIC = np.float32(0.044715)
_CLAMPED_SLOPE, _CLAMPED_LIMIT = np.float32(1.702), np.float32(7)
_ERF = np.frompyfunc(math.erf, 1, 1)


def activate(
    ctx: Context,
    gate_up: FloatArray,
    kind: str,
    gated: bool,
    up: FloatArray | None,
    first: int,
    parameters: tuple[float, ...],
) -> FloatArray:
    """act(first half) * second half, or act(gate_up), perhaps times columns of `up`."""
    gate = gate_up
    if gated:
        half = gate_up.shape[1] // 2
        gate, up = gate_up[:, :half], gate_up[:, half:]
    elif up is not None:
        up = up[:, first : first + gate.shape[1]]
    activated = _KINDS[kind](gate, *parameters)
    if up is None:
        return activated
    if kind == "clamped_swiglu":
        up = np.clip(up, -_CLAMPED_LIMIT, _CLAMPED_LIMIT) + np.float32(1)
    return activated * up


def _silu(x: FloatArray) -> FloatArray:
    return x * _sigmoid(x)


def _sigmoid(x: FloatArray) -> FloatArray:
    # exp(-|x|) never overflows; sigmoid(-x) = exp(-x) / (1 + exp(-x))
    small = np.exp(-np.abs(x))
    result: FloatArray = np.where(x >= 0, 1 / (1 + small), small / (1 + small))
    return result


def _gelu_tanh(x: FloatArray) -> FloatArray:
    result: FloatArray = np.float32(0.5) * x * (1 + np.tanh(_SQRT_2_OVER_PI * (x + _CUBIC * x * x * x)))
    return result


def _gelu_erf(x: FloatArray) -> FloatArray:
    erf = np.asarray(_ERF(x.astype(np.float64) / math.sqrt(2)), np.float64)
    return (x * (0.5 * (1.0 + erf))).astype(np.float32)


def _relu_squared(x: FloatArray) -> FloatArray:
    result: FloatArray = np.square(np.maximum(x, np.float32(0)))
    return result


def _clamped_silu(x: FloatArray) -> FloatArray:
    bounded = np.minimum(x, _CLAMPED_LIMIT)
    return bounded * _sigmoid(_CLAMPED_SLOPE * bounded)


def _xielu(x: FloatArray, alpha_n: float, alpha_p: float, beta: float, eps: float) -> FloatArray:
    below = np.minimum(x, np.float32(0)).astype(np.float64)  # whose e**x - 1 - x would lose its digits in 32 bits
    curve = np.where(x > 0, np.square(x), np.expm1(np.minimum(below, np.float32(eps))) - below).astype(np.float32)
    result: FloatArray = curve * np.where(x > 0, np.float32(alpha_p), np.float32(alpha_n)) + np.float32(beta) * x
    return result


_KINDS: Mapping[str, Callable[..., FloatArray]] = {
    "silu": _silu,
    "gelu_tanh": _gelu_tanh,
    "gelu_erf": _gelu_erf,
    "relu_squared": _relu_squared,
    "clamped_swiglu": _clamped_silu,
    "xielu": _xielu,
}
