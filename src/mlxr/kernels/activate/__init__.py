"""Activation of the feed-forward, with a gate (Shazeer 2020, arXiv:2002.05202) or without."""

from __future__ import annotations

from typing import get_args

from mlxr.kernels.checks import check_floats, check_size, refuse
from mlxr.kernels.choice import REFERENCE, Choice
from mlxr.kernels.context import Context
from mlxr.kernels.tables import PARAMETER_COUNTS, Activation
from mlxr.kernels.tensor import FloatArray

__all__ = ["ACTIVATIONS", "ALWAYS_GATED", "PARAMETER_COUNTS", "Activation", "activate"]

ACTIVATIONS: tuple[str, ...] = get_args(Activation)
ALWAYS_GATED = "clamped_swiglu"

CHOICE = Choice(__name__)


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
    """act(first half) * second half: (T, 2n) to (T, n); if it is not `gated`, act(gate_up), of the same shape.

    With `up` (T, m), what is not gated is multiplied by its n columns from `first` on.

    `silu` is x / (1 + exp(-x)); `gelu_tanh` is x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x³))); `gelu_erf` is
    x/2 * (1 + erf(x / sqrt(2))); `relu_squared` is max(x, 0)². `clamped_swiglu` (gpt-oss) is x / (1 + exp(-1.702 x)) of
    x up to 7, times 1 + the second half clamped to -7 and 7; it is always gated.

    `xielu` (Huang and Schlag 2024, arXiv:2411.13010) has the `parameters` alpha_n, alpha_p, beta and eps: it is
    alpha_p x² + beta x above 0, else alpha_n (exp(min(x, eps)) - 1 - x) + beta x.
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
    name, implementation = CHOICE.pick(ctx.device)
    if name == REFERENCE:
        ctx.ledger.count("activate", name, kind if gated or up is not None else f"{kind}+ungated")
    result: FloatArray = implementation.activate(ctx, gate_up, kind, gated, up, first, parameters)
    return result


def _check_up(gate: FloatArray, up: FloatArray, first: int, gated: bool) -> None:
    check_floats("activate", "up", up, 2)
    if gated:
        refuse("activate", "up", f"of shape {up.shape}", "None, as gate_up is gated")
    check_size("activate", "rows of up", up.shape[0], gate.shape[0])
    if not 0 <= first <= up.shape[1] - gate.shape[1]:
        refuse("activate", "first", first, f"so that {gate.shape[1]} of {up.shape[1]} columns follow")
