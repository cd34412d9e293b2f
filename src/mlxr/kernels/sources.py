"""Weight tensors that are not as a file has them: decoded ones, and several that count as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mlxr.core.errors import ModelError
from mlxr.kernels.tensor import ByteArray, FloatArray, TensorSource


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

    def to_float32(self, start: int | None = None, stop: int | None = None) -> FloatArray:
        """Rows [start:stop] of the numbers, copied."""
        return self.values[start:stop].copy()

    def take_rows(self, start: int, stop: int) -> Decoded:
        """Rows [start:stop] as a tensor of their own."""
        return Decoded(self.name, self.values[start:stop])

    def take_matrix(self, index: int) -> Decoded:
        """Part `index` of the first axis, as a tensor of its own."""
        return Decoded(self.name, self.values[index])

    def release(self) -> None:
        """Do nothing: the numbers are this object's own."""


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
