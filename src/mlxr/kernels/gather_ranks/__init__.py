"""The columns that several ranks made, beside each other: logits, of which each rank has a part of the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

from mlxr.kernels.checks import check_floats, check_size
from mlxr.kernels.choice import REFERENCE, Choice
from mlxr.kernels.context import Context
from mlxr.kernels.tensor import FloatArray

__all__ = ["gather_ranks"]

CHOICE = Choice(__name__)


def gather_ranks(ctx: Context, x: FloatArray, columns: Sequence[int]) -> FloatArray:
    """The x (T, columns[r]) of all ranks r beside each other. Raises ValueError where x is not this rank's share."""
    check_floats("gather_ranks", "x", x, 2)
    name, implementation = CHOICE.pick(ctx.device)
    ranks = None if ctx.gpu is None else ctx.gpu.ranks
    rank, count = (0, 1) if ranks is None else (ranks.rank, ranks.count)
    check_size("gather_ranks", "number of columns", len(columns), count)
    check_size("gather_ranks", "columns of x", x.shape[1], columns[rank])
    if not x.shape[0] or ranks is None:
        return x
    if name == REFERENCE:
        ctx.ledger.count("gather_ranks", name, "f32")
    result: FloatArray = implementation.gather_ranks(ctx, x, tuple(columns))
    return result
