"""The norm of a recurrent mixer's result, and its gate: the norm first (gated delta net), or the gate (Mamba-2), which
may be all (Falcon-H1)."""

from __future__ import annotations

from mlxr.kernels.checks import check_floats, check_size, refuse
from mlxr.kernels.choice import REFERENCE, Choice
from mlxr.kernels.context import Context
from mlxr.kernels.tensor import FloatArray

__all__ = ["gated_norm"]

CHOICE = Choice(__name__)


def gated_norm(
    ctx: Context,
    x: FloatArray,
    gate: FloatArray,
    weight: FloatArray | None,
    eps: float,
    *,
    width: int,
    gate_first: bool = False,
    first: int = 0,
) -> FloatArray:
    """rms(x) * weight * silu(gate), or with `gate_first` rms(x * silu(gate)) * weight; x is (T, n). Without a weight
    x * silu(gate).

    Each `width` neighbours are divided by the root of their mean square plus eps. The gate is (T, m), of which the
    columns from `first` on count; the weight is (width,), the same for all, or (n,).
    """
    check_floats("gated_norm", "x", x, 2)
    check_floats("gated_norm", "gate", gate, 2)
    if weight is not None:
        check_floats("gated_norm", "weight", weight, 1)
    columns = x.shape[1]
    check_size("gated_norm", "rows of gate", gate.shape[0], x.shape[0])
    if width < 1 or columns % width:
        refuse("gated_norm", "width", width, f"a divisor of the {columns} columns of x")
    if weight is not None and weight.shape[0] not in (width, columns):
        refuse("gated_norm", "length of weight", weight.shape[0], f"{width} or {columns}")
    if first < 0 or first + columns > gate.shape[1]:
        refuse("gated_norm", "first column", first, f"0 to {gate.shape[1] - columns}")
    name, implementation = CHOICE.pick(ctx.device)
    if name == REFERENCE:
        ctx.ledger.count("gated_norm", name, name_variant(weight, gate_first))
    result: FloatArray = implementation.gated_norm(ctx, x, gate, weight, eps, width, gate_first, first)
    return result


def name_variant(weight: FloatArray | None, gate_first: bool) -> str:
    """What the ledger counts."""
    return "gate alone" if weight is None else "gate first" if gate_first else "norm first"
