"""A matrix with low-rank updates added, as a weight tensor: decoded and added to in f32, some rows at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mlxr.kernels.sources import Decoded, Picked, Stack, View
from mlxr.kernels.tensor import ByteArray, FloatArray, IntArray, TensorSource


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """scale * b a, with `a` (rank, columns) and `b` (n, rank), for `rows` (n,) of a matrix."""

    rows: IntArray
    a: FloatArray
    b: FloatArray
    scale: float


def number_rows(name: str, rows: int) -> Decoded:
    """A tensor (rows, 1) of the numbers of its rows, to be cut and picked from as a weight of that name."""
    return Decoded(name, np.arange(rows, dtype=np.float32)[:, None])


def read_numbers(numbered: TensorSource) -> IntArray:
    """The numbers of the rows that are left of what `number_rows` made."""
    return numbered.to_float32()[:, 0].astype(np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Updated(View):
    """The rows of `source` with `updates` added, which have no row in common; as f32."""

    updates: Sequence[Update]

    type_name: ClassVar[str] = "f32"

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of rows and columns."""
        return self.source.shape

    @property
    def data(self) -> ByteArray:
        """All numbers as bytes, uint8 (nbytes,)."""
        return self.to_float32().view(np.uint8).reshape(-1)

    @property
    def nbytes(self) -> int:
        """Length of `data` in bytes."""
        return 4 * self.shape[0] * self.shape[1]

    def to_float32(self, start: int | None = None, stop: int | None = None) -> FloatArray:
        """Rows [start:stop] with what is added to them."""
        first, last, _ = slice(start, stop).indices(self.shape[0])
        values = np.array(self.source.to_float32(first, last), np.float32)
        for update in self.updates:
            places = np.flatnonzero((update.rows >= first) & (update.rows < last))
            values[update.rows[places] - first] += (update.b[places] @ update.a) * np.float32(update.scale)
        return values

    def pick_rows(self, rows: IntArray) -> TensorSource:
        """The same with these rows, in their order."""
        return Picked(Decoded(self.name, self.to_float32()), rows)

    def take_rows(self, start: int, stop: int) -> TensorSource:
        """Rows [start:stop] as a tensor of their own."""
        return Decoded(self.name, self.to_float32(start, stop))


@dataclass(frozen=True, slots=True, eq=False)
class UpdatedStack(Stack):
    """The matrices of the stack `source`, of which some are updated ones."""

    source: TensorSource
