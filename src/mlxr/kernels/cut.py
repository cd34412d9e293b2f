"""Parts of weight tensors: some columns of a matrix, in whole blocks, and some numbers of a vector."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mlxr.core.errors import ModelError
from mlxr.kernels.sources import Decoded, View
from mlxr.kernels.tensor import ByteArray, FloatArray, TensorSource


def cut_vector(tensor: TensorSource, start: int, stop: int) -> Decoded:
    """The numbers [start:stop] of a small vector, decoded."""
    values = np.ascontiguousarray(tensor.to_float32()[start:stop], np.float32)
    return Decoded(tensor.name, values)


def cut_columns(tensor: TensorSource, start: int, stop: int) -> Cut:
    """The columns [start:stop] of a matrix. Raises ModelError where they are no whole blocks of its type."""
    rows, columns = tensor.shape
    block_columns = find_block(tensor) or 1
    if start % block_columns or stop % block_columns:
        raise ModelError(
            f"tensor {tensor.name} of type {tensor.type_name} cannot be cut at columns {start} and {stop}, as its "
            f"blocks have {block_columns}; take another type, or fewer GPUs"
        )
    row_bytes = tensor.nbytes // rows
    return Cut(tensor, start, stop, row_bytes * start // columns, row_bytes * stop // columns)


def find_block(tensor: TensorSource) -> int | None:
    """Return the columns of a block, of floats one; None for a type that kernels do not know."""
    from mlxr.kernels.linear.parts import FLOATS, LAYOUTS  # what knows GPUs costs nothing where there is none

    layout = LAYOUTS.get(tensor.type_name)
    return None if layout is None else 1 if tensor.type_name in FLOATS else layout.block_size


@dataclass(frozen=True, slots=True, eq=False)
class Cut(View):
    """Columns [start:stop] of `source`, which are bytes [first:last] of each row, copied when they are asked for."""

    start: int
    stop: int
    first: int
    last: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of rows and columns."""
        return (self.source.shape[0], self.stop - self.start)

    @property
    def data(self) -> ByteArray:
        """The blocks of these columns, row after row, copied."""
        blocks = self.source.data.reshape(self.source.shape[0], -1)
        return np.ascontiguousarray(blocks[:, self.first : self.last]).reshape(-1)

    @property
    def nbytes(self) -> int:
        """Length of `data` in bytes."""
        return self.source.shape[0] * (self.last - self.first)

    def to_float32(self, start: int | None = None, stop: int | None = None) -> FloatArray:
        """Rows [start:stop] of these columns, decoded."""
        return np.ascontiguousarray(self.source.to_float32(start, stop)[:, self.start : self.stop])

    def take_rows(self, start: int, stop: int) -> Cut:
        """Rows [start:stop] as a tensor of their own."""
        return Cut(self.source.take_rows(start, stop), self.start, self.stop, self.first, self.last)
