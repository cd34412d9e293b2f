"""Gated activation of the feed-forward: SwiGLU and GeGLU (Shazeer 2020, arXiv:2002.05202)."""

from __future__ import annotations

from typing import Literal, get_args

from mlxr.kernels.checks import check_floats, refuse
from mlxr.kernels.choice import Choice
from mlxr.kernels.context import Context
from mlxr.kernels.tensor import FloatArray

__all__ = ["ACTIVATIONS", "Activation", "activate"]

Activation = Literal["silu", "gelu_tanh"]
ACTIVATIONS: tuple[str, ...] = get_args(Activation)

CHOICE = Choice(__name__)


def activate(ctx: Context, gate_up: FloatArray, kind: Activation = "silu") -> FloatArray:
    """act(first half) * second half: (T, 2n) to (T, n).

    `silu` is x / (1 + exp(-x)); `gelu_tanh` is x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x³))).
    """
    check_floats("activate", "gate_up", gate_up, 2)
    if gate_up.shape[1] % 2:
        refuse("activate", "columns of gate_up", gate_up.shape[1], "an even number")
    if kind not in ACTIVATIONS:
        refuse("activate", "kind", repr(kind), f"one of {', '.join(ACTIVATIONS)}")
    name, implementation = CHOICE.pick(ctx.device)
    ctx.ledger.count("activate", name, kind)
    result: FloatArray = implementation.activate(ctx, gate_up, kind)
    return result
