"""Weight tensors with other values, or in another order, than in their file: those of a folder as GGUF has them."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_float
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mlxr.kernels.cut import find_block
from mlxr.kernels.sources import Decoded, Picked, View
from mlxr.kernels.tensor import ByteArray, FloatArray, IntArray, TensorSource


@dataclass(frozen=True, eq=False)
class Reordered(View):
    """A matrix whose column i is column `columns[i]` of the source.

    It keeps the source's type where whole blocks of it move, else it is f32, decoded when it is asked for.
    """

    columns: IntArray

    @cached_property
    def _blocks(self) -> IntArray | None:
        """The order of the blocks of a row; None where columns leave their block."""
        size = find_block(self.source)
        if size is None or len(self.columns) % size:
            return None
        firsts = self.columns[::size]
        moved = firsts[:, None] + np.arange(size, dtype=np.int32)
        return None if np.any(firsts % size) or np.any(moved.reshape(-1) != self.columns) else firsts // np.int32(size)

    @property
    def type_name(self) -> str:
        """The type of the source, or f32."""
        return "f32" if self._blocks is None else self.source.type_name

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of rows and columns."""
        return (self.source.shape[0], len(self.columns))

    @property
    def data(self) -> ByteArray:
        """The blocks in their order, copied."""
        order = self._blocks
        if order is None:
            return self.to_float32().view(np.uint8).reshape(-1)
        blocks = self.source.data.reshape(self.shape[0], len(order), -1)
        return np.ascontiguousarray(blocks[:, order]).reshape(-1)

    @property
    def nbytes(self) -> int:
        """Length of `data` in bytes."""
        return 4 * self.shape[0] * self.shape[1] if self._blocks is None else self.source.nbytes

    def to_float32(self, start: int | None = None, stop: int | None = None) -> FloatArray:
        """Rows [start:stop] of the numbers."""
        return np.ascontiguousarray(self.source.to_float32(start, stop)[:, self.columns])

    def take_rows(self, start: int, stop: int) -> TensorSource:
        """Rows [start:stop] as a tensor of their own."""
        return Reordered(self.source.take_rows(start, stop), self.columns)


def pick_rows(tensor: TensorSource, rows: Sequence[int]) -> Picked:
    """Return a tensor whose row i is row `rows[i]` of another one."""
    return Picked(tensor, np.array(rows, np.int32))


def pick_columns(tensor: TensorSource, columns: Sequence[int]) -> Reordered:
    """Return a matrix whose column i is column `columns[i]` of another one."""
    return Reordered(tensor, np.array(columns, np.int32))


def add_one(tensor: TensorSource) -> Decoded:
    """Return a small tensor with 1 added to each number."""
    return Decoded(tensor.name, tensor.to_float32() + np.float32(1.0))


def take_rates(logarithms: TensorSource) -> Decoded:
    """Return -exp(x): the rates of decay of states, of which folders keep logarithms."""
    # In float32 the last bit of NumPy's exp depends on the processor.
    return Decoded(logarithms.name, -np.exp(logarithms.to_float32().astype(np.float64)).astype(np.float32))


def make_vector(name: str, numbers: Sequence[float]) -> Decoded:
    """Return numbers as a tensor of f32."""
    return Decoded(name, np.array(numbers, np.float32))


def round_float(number: float) -> float:
    """Return the number that 32 bits keep of another one."""
    return c_float(number).value
