"""What attention gives times the sigmoid of a gate, of every number or of every head (Qiu et al. 2025,
arXiv:2505.06708)."""

from __future__ import annotations

from mlxr.kernels.checks import check_floats, check_size, refuse
from mlxr.kernels.choice import REFERENCE, Choice
from mlxr.kernels.context import Context
from mlxr.kernels.tensor import FloatArray

__all__ = ["gate_heads"]

CHOICE = Choice(__name__)


def gate_heads(ctx: Context, x: FloatArray, gates: FloatArray) -> FloatArray:
    """x / (1 + exp(-gate)): x (T, n), gates (T, m), each of which is that of n / m neighbours: m is n, or the heads."""
    check_floats("gate_heads", "x", x, 2)
    check_floats("gate_heads", "gates", gates, 2)
    check_size("gate_heads", "rows of gates", gates.shape[0], x.shape[0])
    if not gates.shape[1] or x.shape[1] % gates.shape[1]:
        refuse("gate_heads", "columns of gates", gates.shape[1], f"a divisor of the {x.shape[1]} columns of x")
    name, implementation = CHOICE.pick(ctx.device)
    if name == REFERENCE:
        ctx.ledger.count("gate_heads", name, "elements" if gates.shape[1] == x.shape[1] else "heads")
    result: FloatArray = implementation.gate_heads(ctx, x, gates)
    return result
