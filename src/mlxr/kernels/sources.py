"""Weight tensors that are not as a file has them: decoded ones, and several that count as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mlxr.core.errors import ModelError
from mlxr.kernels.tensor import ByteArray, FloatArray, IntArray, TensorSource


@dataclass(frozen=True, slots=True, eq=False)
class Decoded:
    """A small tensor decoded to float32 for kernels that shall not round it: a router. One axis becomes one row."""

    name: str
    values: FloatArray

    type_name: ClassVar[str] = "f32"

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, columns), or what is left of them."""
        return self.values.shape

    @property
    def data(self) -> ByteArray:
        """The numbers as bytes, uint8."""
        return self.values.view(np.uint8).reshape(-1)

    @property
    def nbytes(self) -> int:
        """Length of `data` in bytes."""
        return self.values.nbytes

    @property
    def is_mapped(self) -> bool:
        """No: the bytes are not those of a file."""
        return False

    def to_float32(self, start: int | None = None, stop: int | None = None) -> FloatArray:
        """Rows [start:stop] of the numbers, copied."""
        return self.values[start:stop].copy()

    def take_rows(self, start: int, stop: int) -> Decoded:
        """Rows [start:stop] as a tensor of their own."""
        return Decoded(self.name, self.values[start:stop])

    def take_matrix(self, index: int) -> Decoded:
        """Part `index` of the first axis, as a tensor of its own."""
        return Decoded(self.name, self.values[index])

    def take_columns(self, columns: range) -> Decoded:
        """These columns of a matrix, copied."""
        return Decoded(self.name, np.ascontiguousarray(self.values[:, _as_slice(columns)]))

    def release(self) -> None:
        """Do nothing: the numbers are this object's own."""


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """A matrix that is made of another one, `source`, each time when it is asked for; it has its name and type."""

    source: TensorSource

    @property
    def name(self) -> str:
        """The name of the source."""
        return self.source.name

    @property
    def type_name(self) -> str:
        """The type of the source."""
        return self.source.type_name

    @property
    def is_mapped(self) -> bool:
        """No: the bytes are not those of a file."""
        return False

    def take_matrix(self, index: int) -> TensorSource:
        """Refuse: this is one."""
        raise ValueError(f"tensor {self.name} has no part {index}, as it is a matrix")

    def release(self) -> None:
        """Release the whole source."""
        self.source.release()


@dataclass(frozen=True, slots=True, eq=False)
class Rows(View):
    """Some rows of a matrix, in their order, as a tensor of their own that is copied each time when it is asked for."""

    rows: range

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of rows and columns."""
        return (len(self.rows), self.source.shape[1])

    @property
    def data(self) -> ByteArray:
        """The blocks of the rows, copied."""
        blocks = self.source.data.reshape(self.source.shape[0], -1)
        return np.ascontiguousarray(blocks[_as_slice(self.rows)]).reshape(-1)

    @property
    def nbytes(self) -> int:
        """Length of `data` in bytes."""
        return self.source.nbytes // self.source.shape[0] * len(self.rows)

    def to_float32(self, start: int | None = None, stop: int | None = None) -> FloatArray:
        """Rows [start:stop] of these, decoded."""
        return np.ascontiguousarray(self.source.to_float32()[_as_slice(self.rows[start:stop])])

    def take_rows(self, start: int, stop: int) -> Rows:
        """Rows [start:stop] of these as a tensor of their own."""
        return Rows(self.source, self.rows[start:stop])


@dataclass(frozen=True, slots=True, eq=False)
class Columns(View):
    """Some columns of a matrix of floats as the rows of another one, copied each time when they are asked for."""

    rows: range

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, columns), where the matrix has columns and rows."""
        return (len(self.rows), self.source.shape[0])

    @property
    def data(self) -> ByteArray:
        """The numbers as bytes, copied."""
        size = self.source.nbytes // (self.source.shape[0] * self.source.shape[1])
        numbers = self.source.data.view(f"u{size}").reshape(self.source.shape)
        return np.ascontiguousarray(numbers[:, _as_slice(self.rows)].T).view(np.uint8).reshape(-1)

    @property
    def nbytes(self) -> int:
        """Length of `data` in bytes."""
        return self.source.nbytes // self.source.shape[1] * len(self.rows)

    def to_float32(self, start: int | None = None, stop: int | None = None) -> FloatArray:
        """Rows [start:stop] of the numbers, decoded."""
        return np.ascontiguousarray(self.source.to_float32()[:, _as_slice(self.rows[start:stop])].T)

    def take_rows(self, start: int, stop: int) -> Columns:
        """Rows [start:stop] as a tensor of their own."""
        return Columns(self.source, self.rows[start:stop])


def _as_slice(rows: range) -> slice:
    return slice(rows.start, rows.stop, rows.step)


@dataclass(frozen=True, slots=True, eq=False)
class Stack:
    """Matrices of one type and one shape as one tensor (parts, rows, columns), each of which stays where it is."""

    name: str
    parts: Sequence[TensorSource]

    @property
    def type_name(self) -> str:
        """The type that all parts have."""
        return self.parts[0].type_name

    @property
    def shape(self) -> tuple[int, ...]:
        """(parts, rows, columns), as NumPy orders them."""
        return (len(self.parts), *self.parts[0].shape)

    @property
    def data(self) -> ByteArray:
        """The blocks of all parts, copied."""
        return np.concatenate([part.data for part in self.parts])

    @property
    def nbytes(self) -> int:
        """Bytes of all parts together."""
        return sum(part.nbytes for part in self.parts)

    @property
    def is_mapped(self) -> bool:
        """Whether there is but one part, in a mapped file: several are joined."""
        return len(self.parts) == 1 and self.parts[0].is_mapped

    def to_float32(self, start: int | None = None, stop: int | None = None) -> FloatArray:
        """Parts [start:stop], decoded into one array."""
        return np.stack([part.to_float32() for part in self.parts[start:stop]])

    def take_rows(self, start: int, stop: int) -> Stack:
        """Parts [start:stop] as a stack of their own."""
        return Stack(self.name, self.parts[start:stop])

    def take_matrix(self, index: int) -> TensorSource:
        """Part `index`, a matrix."""
        return self.parts[index]

    def release(self) -> None:
        """Release the sources of all parts."""
        for part in self.parts:
            part.release()


@dataclass(frozen=True, slots=True, eq=False)
class Picked(View):
    """Some rows of a matrix, in an order of their own, as a tensor; its blocks are copied when they are asked for."""

    rows: IntArray

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, columns), as NumPy orders them."""
        return (len(self.rows), *self.source.shape[1:])

    @property
    def data(self) -> ByteArray:
        """The blocks of the rows, copied."""
        return self.source.data.reshape(self.source.shape[0], -1)[self.rows].reshape(-1)

    @property
    def nbytes(self) -> int:
        """Length of `data` in bytes."""
        return self.source.nbytes // self.source.shape[0] * len(self.rows)

    def to_float32(self, start: int | None = None, stop: int | None = None) -> FloatArray:
        """Decode rows [start:stop] of those picked."""
        rows = self.rows[start:stop]
        runs = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
        if len(rows) > 1 and 2 * len(runs) > len(rows):  # scattered: one by one takes longer than all at once
            first = int(rows.min())
            return np.ascontiguousarray(self.source.to_float32(first, int(rows.max()) + 1)[rows - first])
        parts = [self.source.to_float32(int(run[0]), int(run[-1]) + 1) for run in runs if len(run)]
        return np.concatenate(parts) if parts else self.source.to_float32(0, 0)

    def take_rows(self, start: int, stop: int) -> Picked:
        """Rows [start:stop] as a tensor of their own."""
        return Picked(self.source, self.rows[start:stop])


def part_groups(groups: int, sizes: Sequence[int]) -> list[IntArray]:
    """Which rows the parts of a tensor have that has `groups` groups of rows, each with so many of each part."""
    rows = np.arange(groups * sum(sizes), dtype=np.int32).reshape(groups, -1)
    return [part.reshape(-1) for part in np.split(rows, np.cumsum(sizes)[:-1], axis=1)]


def pick_parts(tensor: TensorSource, parts: Sequence[IntArray]) -> Picked:
    """The rows of these parts of a tensor, one part after another."""
    return Picked(tensor, np.concatenate(parts))


def take_halves(tensor: TensorSource, groups: int) -> tuple[Picked, Picked]:
    """The first halves of `groups` groups of rows, and the second ones."""
    half = tensor.shape[0] // groups // 2
    first, second = part_groups(groups, (half, half))
    return Picked(tensor, first), Picked(tensor, second)


def as_float32(tensor: TensorSource) -> Decoded:
    """The tensor decoded, whole; its source is released. A vector becomes a matrix of one row."""
    values = np.ascontiguousarray(np.atleast_2d(tensor.to_float32()), np.float32)
    tensor.release()
    return Decoded(tensor.name, values)


def stack_vectors(name: str, parts: Sequence[TensorSource]) -> Decoded:
    """Vectors of one length, decoded, as the rows of one tensor. Raises ModelError for others."""
    for part in parts:
        if part.shape != parts[0].shape or len(part.shape) != 1:
            raise ModelError(f"tensor {part.name} has shape {part.shape}, expected a vector as {parts[0].name} is")
    return Decoded(name, np.stack([part.to_float32() for part in parts]))
