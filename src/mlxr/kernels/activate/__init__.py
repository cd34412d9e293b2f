"""Activation of the feed-forward, with a gate (Shazeer 2020, arXiv:2002.05202) or without."""

# ruff: noqa: ARG001 -- every implementation takes the context
from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import get_args

import numpy as np

from mlxr.core.tables import PARAMETER_COUNTS, Activation
from mlxr.kernels.arrays import empty
from mlxr.kernels.checks import check_floats, check_size, refuse
from mlxr.kernels.choice import REFERENCE, Choice
from mlxr.kernels.context import Context
from mlxr.kernels.tensor import FloatArray

__all__ = [
    "ACTIVATIONS",
    "ALWAYS_GATED",
    "PARAMETER_COUNTS",
    "Activation",
    "activate",
]

ACTIVATIONS: tuple[str, ...] = get_args(Activation)
ALWAYS_GATED = "clamped_swiglu"


def activate(
    ctx: Context,
    gate_up: FloatArray,
    kind: Activation = "silu",
    *,
    gated: bool = True,
    up: FloatArray | None = None,
    first: int = 0,
    parameters: tuple[float, ...] = (),
) -> FloatArray:
    """Return act(first half) * second half, (T, 2n) to (T, n); if it is not `gated`, act(gate_up), of the same shape.

    With `up` (T, m), an ungated result is multiplied by n columns of `up` from `first` on.

    `silu` is x / (1 + exp(-x)); `gelu_tanh` is x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x³))); `gelu_erf` is
    x/2 * (1 + erf(x / sqrt(2))); `relu` is max(x, 0), `relu_squared` its square. `clamped_swiglu` (gpt-oss) is
    x / (1 + exp(-1.702 x)) of x up to 7, times 1 + the second half clamped to -7 and 7; it is always gated.

    `xielu` (Huang and Schlag 2024, arXiv:2411.13010) has the `parameters` alpha_n, alpha_p, beta and eps: it is
    alpha_p x² + beta x above 0, else alpha_n (exp(min(x, eps)) - 1 - x) + beta x. `limited_swiglu` has a limit: it is
    silu of x up to it, times the second half clamped to -limit and limit. `clamp` has one, c: x is kept from -c to c.
    """
    check_floats("activate", "gate_up", gate_up, 2)
    if gated and gate_up.shape[1] % 2:
        refuse("activate", "columns of gate_up", gate_up.shape[1], "an even number")
    if kind not in ACTIVATIONS:
        refuse("activate", "kind", repr(kind), f"one of {', '.join(ACTIVATIONS)}")
    if kind == ALWAYS_GATED and not gated and up is None:
        refuse("activate", "kind", repr(kind), "a kind without a gate")
    check_size("activate", "number of parameters", len(parameters), PARAMETER_COUNTS.get(kind, 0))
    if up is not None:
        _check_up(gate_up, up, first, gated)
    name, implementation = ACTIVATE.pick(ctx.device)
    if name == REFERENCE:
        ctx.ledger.count("activate", name, kind if gated or up is not None else f"{kind}+ungated")
    return implementation(ctx, gate_up, kind, gated, up, first, parameters)


def _check_up(gate: FloatArray, up: FloatArray, first: int, gated: bool) -> None:
    check_floats("activate", "up", up, 2)
    if gated:
        refuse("activate", "up", f"of shape {up.shape}", "None, as gate_up is gated")
    check_size("activate", "rows of up", up.shape[0], gate.shape[0])
    if not 0 <= first <= up.shape[1] - gate.shape[1]:
        refuse("activate", "first", first, f"so that {gate.shape[1]} of {up.shape[1]} columns follow")


_SQRT_2_OVER_PI = np.float32(math.sqrt(2 / math.pi))
_CUBIC = np.float32(0.044715)
_CLAMPED_SLOPE, _CLAMPED_LIMIT = np.float32(1.702), np.float32(7)
_ERF = np.frompyfunc(math.erf, 1, 1)


def _activate_reference(
    ctx: Context,
    gate_up: FloatArray,
    kind: str,
    gated: bool,
    up: FloatArray | None,
    first: int,
    parameters: tuple[float, ...],
) -> FloatArray:
    """Return act(first half) * second half, or act(gate_up), perhaps times columns of `up`."""
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
    if kind == "limited_swiglu":
        up = np.clip(up, -np.float32(parameters[0]), np.float32(parameters[0]))
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


def _relu(x: FloatArray) -> FloatArray:
    result: FloatArray = np.maximum(x, np.float32(0))
    return result


def _relu_squared(x: FloatArray) -> FloatArray:
    result: FloatArray = np.square(_relu(x))
    return result


def _clamped_silu(x: FloatArray) -> FloatArray:
    bounded = np.minimum(x, _CLAMPED_LIMIT)
    return bounded * _sigmoid(_CLAMPED_SLOPE * bounded)


def _limited_silu(x: FloatArray, limit: float) -> FloatArray:
    return _silu(np.minimum(x, np.float32(limit)))


def _xielu(x: FloatArray, alpha_n: float, alpha_p: float, beta: float, eps: float) -> FloatArray:
    below = np.minimum(x, np.float32(0)).astype(np.float64)  # e**x - 1 - x would lose its digits in 32 bits
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
    "relu": _relu,
    "limited_swiglu": _limited_silu,
    "clamp": lambda x, most: np.clip(x, np.float32(-most), np.float32(most)),
}


def _activate_native(
    ctx: Context,
    gate_up: FloatArray,
    kind: str,
    gated: bool,
    up: FloatArray | None,
    first: int,
    parameters: tuple[float, ...],
) -> FloatArray:
    """Return act(first half) * second half, or act(gate_up), perhaps times columns of `up`."""
    rows, columns = gate_up.shape
    out = empty(ctx, rows, columns // 2 if gated else columns)
    ctx.module.activate(ctx.native, gate_up, kind, out, gated, up, first, parameters)
    return out


ACTIVATE = Choice("activate", _activate_reference, _activate_native, f"{__name__}.gpu")
