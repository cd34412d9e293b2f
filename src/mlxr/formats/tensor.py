"""A tensor of a file: a name, a type, a shape and the raw blocks where the file has them.

Knows one tensor and the mapping that its bytes lie in; not which file format they came from. `data` is a read-only
view of the mapped file (nothing is copied until a value is wanted); `to_float32` decodes; `release` gives the pages
back to the operating system once the weights have been repacked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mlxr.core.errors import ModelError

from .ggml_types import by_name, decode_blocks
from .mapped_file import MappedFile


class WeightSource(Protocol):
    """A tensor that can be written to another file: a `TensorSource`, or several that count as one."""

    @property
    def name(self) -> str:
        """The tensor's name in its file."""
        ...

    @property
    def type_name(self) -> str:
        """Type as ggml spells it."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """In NumPy order; a stack of matrices has three axes."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of the raw blocks."""
        ...

    @property
    def data(self) -> NDArray[np.uint8]:
        """The raw blocks, as bytes."""
        ...

    def to_float32(self, start: int | None = None, stop: int | None = None) -> NDArray[np.float32]:
        """Decode [start:stop] of the first axis."""
        ...

    def take_matrix(self, index: int) -> WeightSource:
        """Part `index` of a stack."""
        ...

    def release(self) -> None:
        """Say that the mapped pages may go."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class TensorSource:
    """Weights as stored.

    name: the file's own. type_name: ggml's spelling. shape: NumPy order, so (out_features, in_features) for a matrix;
    blocks run along the last axis. data: uint8 (nbytes,), read-only. mapping: the file behind `data`, None for memory.
    """

    name: str
    type_name: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8] = field(repr=False)
    mapping: MappedFile | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        row = by_name(self.type_name)
        wanted = math.prod(self.shape[:-1]) * row.row_bytes(self.shape[-1])
        if self.data.dtype != np.uint8 or self.data.shape != (wanted,):
            raise ModelError(
                f"{self.name}: {self.type_name} {self.shape} needs uint8 ({wanted},), not "
                f"{self.data.dtype} {self.data.shape}"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the raw blocks."""
        return self.data.size

    @property
    def is_mapped(self) -> bool:
        """Whether `data` is a view of a mapped file."""
        return self.mapping is not None

    def to_float32(self, start: int | None = None, stop: int | None = None) -> NDArray[np.float32]:
        """Decode to a fresh array of the tensor's shape, or only [start:stop] of its first axis (NumPy's rules).

        A vector is decoded whole before it is cut, as its blocks are not rows.
        """
        row = by_name(self.type_name)
        if len(self.shape) == 1:
            return decode_blocks(row, self.data)[start:stop]
        first, last, _ = slice(start, stop).indices(self.shape[0])
        count = max(0, last - first)
        stride = self.nbytes // self.shape[0]
        values = decode_blocks(row, self.data[first * stride : (first + count) * stride])
        return values.reshape(count, *self.shape[1:])

    def take_rows(self, start: int, stop: int) -> TensorSource:
        """Rows [start:stop] of a matrix as a tensor of their own, under the same name; nothing is copied."""
        stride = self.nbytes // self.shape[0]
        shape, data = (stop - start, *self.shape[1:]), self.data[start * stride : stop * stride]
        return TensorSource(self.name, self.type_name, shape, data, self.mapping)

    def take_matrix(self, index: int) -> TensorSource:
        """Part `index` of the first axis, which the result does not have; nothing is copied."""
        part = self.take_rows(index, index + 1)
        return TensorSource(self.name, self.type_name, self.shape[1:], part.data, self.mapping)

    def release(self) -> None:
        """Tell the operating system that the mapped pages may go; they come back by themselves when read again."""
        if self.mapping is not None:
            self.mapping.release(self.data)
