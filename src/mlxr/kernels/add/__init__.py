"""The sum of two arrays: the residual stream and what a block adds to it, where no norm does that in passing."""

from __future__ import annotations

from mlxr.kernels.checks import check_floats, refuse
from mlxr.kernels.choice import REFERENCE, Choice
from mlxr.kernels.context import Context
from mlxr.kernels.tensor import FloatArray

__all__ = ["add"]

CHOICE = Choice(__name__)


def add(ctx: Context, x: FloatArray, other: FloatArray, factor: float = 1.0) -> FloatArray:
    """(x + other) * factor, each step rounded; x and other (T, n), which are left as they are.

    Raises ValueError for shapes that differ.
    """
    check_floats("add", "x", x, 2)
    check_floats("add", "other", other, 2)
    if other.shape != x.shape:
        refuse("add", "other", f"of shape {other.shape}", f"shape {x.shape} of x")
    if not x.shape[0]:
        return x
    name, implementation = CHOICE.pick(ctx.device)
    if name == REFERENCE:
        ctx.ledger.count("add", name, "f32" if factor == 1.0 else "f32+scale")
    result: FloatArray = implementation.add(ctx, x, other, factor)
    return result
