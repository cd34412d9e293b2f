"""The sum of what several ranks have, each on a device of its own: a product whose inputs they share.

Every rank gets the same bits: all add up the same numbers, in the order of the ranks.
"""

from __future__ import annotations

from mlxr.kernels.checks import check_floats, refuse
from mlxr.kernels.choice import REFERENCE, Choice
from mlxr.kernels.context import Context
from mlxr.kernels.tensor import FloatArray

__all__ = ["sum_ranks"]

CHOICE = Choice(__name__)


def sum_ranks(ctx: Context, x: FloatArray) -> FloatArray:
    """The sum over all ranks of the context of their x (T, n), n even. Raises ValueError for another shape."""
    check_floats("sum_ranks", "x", x, 2)
    if x.shape[1] % 2:
        refuse("sum_ranks", "columns of x", x.shape[1], "an even number")
    if not x.shape[0]:
        return x
    name, implementation = CHOICE.pick(ctx.device)
    if name == REFERENCE:
        ctx.ledger.count("sum_ranks", name, "f32")
    result: FloatArray = implementation.sum_ranks(ctx, x)
    return result
