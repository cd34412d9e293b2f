"""Collective operators of tensor parallelism: the sum over all ranks (all-reduce), their columns joined (all-gather).

Each rank is a device of its own. NumPy and the CPU have one rank; `gpu.py` has the launches, by which devices write
into each other's memory.
"""

# ruff: noqa: ARG001 -- every implementation takes the context
from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlxr.kernels.checks import check_floats, check_size, refuse
from mlxr.kernels.choice import REFERENCE, Choice
from mlxr.kernels.context import Context
from mlxr.kernels.tensor import FloatArray


def all_reduce(ctx: Context, x: FloatArray) -> FloatArray:
    """Return the sum of x (T, n) over all ranks of the context, n even. Raises ValueError for another shape."""
    check_floats("all_reduce", "x", x, 2)
    if x.shape[1] % 2:
        refuse("all_reduce", "columns of x", x.shape[1], "an even number")
    if not x.shape[0]:
        return x
    name, implementation = ALL_REDUCE.pick(ctx.device)
    if name == REFERENCE:
        ctx.ledger.count("all_reduce", name, "f32")
    return implementation(ctx, x)


def _sum_reference(ctx: Context, x: FloatArray) -> FloatArray:
    return add_up([x])


def add_up(parts: Sequence[FloatArray]) -> FloatArray:
    """Return the sum of the ranks' arrays, in the order of ranks, in f32."""
    total = np.zeros_like(parts[0])
    for number, part in enumerate(parts):
        total = part if number == 0 else total + part
    return total


ALL_REDUCE = Choice("all_reduce", _sum_reference, gpu=f"{__name__}.gpu")


def all_gather(ctx: Context, x: FloatArray, columns: Sequence[int]) -> FloatArray:
    """Return x (T, columns[r]) of all ranks r side by side. Raises ValueError if x is not this rank's share."""
    check_floats("all_gather", "x", x, 2)
    name, implementation = ALL_GATHER.pick(ctx.device)
    ranks = None if ctx.gpu is None else ctx.gpu.ranks
    rank, count = (0, 1) if ranks is None else (ranks.rank, ranks.count)
    check_size("all_gather", "number of columns", len(columns), count)
    check_size("all_gather", "columns of x", x.shape[1], columns[rank])
    if not x.shape[0] or ranks is None:
        return x
    if name == REFERENCE:
        ctx.ledger.count("all_gather", name, "f32")
    return implementation(ctx, x, tuple(columns))


def _gather_reference(ctx: Context, x: FloatArray, columns: tuple[int, ...]) -> FloatArray:
    return join([x])


def join(parts: Sequence[FloatArray]) -> FloatArray:
    """Join the columns of all ranks, in their order."""
    return np.concatenate(parts, axis=1)


ALL_GATHER = Choice("all_gather", _gather_reference, gpu=f"{__name__}.gpu")
