"""Low-rank updates of a product (LoRA, Hu et al. 2021, arXiv:2106.09685): y += scale * B (A x), for chosen rows.

They are added in f32 after the exact product of the weight. On the CPU the sums of a row have one order, so its bits do
not depend on the rows beside it, on their adapters, or on threads and instruction sets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mlxr.kernels.checks import check_floats, check_ints, check_size, refuse
from mlxr.kernels.choice import REFERENCE, Choice
from mlxr.kernels.context import Context
from mlxr.kernels.linear import LinearWeight
from mlxr.kernels.tensor import FloatArray, IntArray

__all__ = ["MAX_RANK", "AdapterRows", "LoraPart", "add_lora", "list_rows", "make_part"]

CHOICE = Choice(__name__)
MAX_RANK = 256


@dataclass(frozen=True, slots=True, eq=False)
class LoraPart:
    """The update of some outputs of a weight: `a` (rank, in_features), `b` (rank, outputs), which is B transposed.

    The outputs are those from column `first` on. Both matrices are float32 and C-contiguous, in the host's memory.
    """

    first: int
    a: FloatArray
    b: FloatArray
    scale: float

    @property
    def nbytes(self) -> int:
        """Bytes of both matrices."""
        return self.a.nbytes + self.b.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class AdapterRows:
    """The `rows` (n,) of a batch, int32 and ascending, that one adapter updates, and its parts of each weight."""

    rows: IntArray
    parts: Mapping[LinearWeight, Sequence[LoraPart]]


def make_part(first: int, a: FloatArray, b: FloatArray, scale: float) -> LoraPart:
    """The update scale * b a, with `a` (rank, in_features) and `b` (outputs, rank), of the outputs from `first` on."""
    return LoraPart(first, np.ascontiguousarray(a, np.float32), np.ascontiguousarray(b.T, np.float32), scale)


def list_rows(ranges: Sequence[tuple[int, int]]) -> IntArray:
    """All rows of the ranges [first, last), which rise."""
    return np.concatenate([np.arange(first, last, dtype=np.int32) for first, last in ranges])


def add_lora(
    ctx: Context, x: FloatArray, out: FloatArray, weight: LinearWeight, adapters: Sequence[AdapterRows]
) -> FloatArray:
    """`out` (T, out_features), the product of x (T, in_features), with the updates of `adapters` added to their rows.

    `out` is taken over: its memory may be written. No row may be that of two adapters. Raises ValueError for shapes
    that do not fit and for ranks above MAX_RANK.
    """
    updates = [(one.rows, part) for one in adapters for part in one.parts.get(weight, ())]
    if not updates:
        return out
    for rows, part in updates:
        _check(x, out, rows, part)
    name, implementation = CHOICE.pick(ctx.device)
    if name == REFERENCE:
        ctx.ledger.count("lora", name, "f32")
    result: FloatArray = implementation.add_lora(ctx, x, out, updates)
    return result


def _check(x: FloatArray, out: FloatArray, rows: IntArray, part: LoraPart) -> None:
    check_ints("lora", "rows", rows)
    check_floats("lora", "a", part.a, 2)
    check_floats("lora", "b", part.b, 2)
    check_size("lora", "columns of a", part.a.shape[1], x.shape[1])
    check_size("lora", "ranks of b", part.b.shape[0], part.a.shape[0])
    if not 1 <= part.a.shape[0] <= MAX_RANK:
        refuse("lora", "rank", part.a.shape[0], f"1 to {MAX_RANK}")
    if part.first < 0 or part.first + part.b.shape[1] > out.shape[1]:
        refuse("lora", "outputs", f"{part.b.shape[1]} from {part.first} on", f"within {out.shape[1]} columns")
