"""Weight tensors made of others: decoded, cut, reordered, scaled, updated or joined.

Each is made of tensors of a file (`TensorSource`), and decodes or copies only when its data is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_float
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from mlxr.core.errors import ModelError
from mlxr.core.frozen import frozen
from mlxr.core.tables import WEIGHT_TYPES
from mlxr.kernels.tensor import ByteArray, FloatArray, IntArray, TensorSource, round_to_bf16, widen_bf16

_BLOCK_COLUMNS = {weight_type.name: weight_type.block_size for weight_type in WEIGHT_TYPES}
_FLOAT_BYTES = {"f32": 4, "f16": 2, "bf16": 2}


@frozen(eq=False)
class Decoded:
    """A tensor decoded to float32, such as a router's, which kernels must not round."""

    name: str
    values: FloatArray

    type_name: ClassVar[str] = "f32"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the numbers."""
        return self.values.shape

    @property
    def data(self) -> ByteArray:
        """The numbers as bytes, uint8."""
        return _as_bytes(self.values)

    @property
    def nbytes(self) -> int:
        """Length of `data` in bytes."""
        return self.values.nbytes

    @property
    def is_mapped(self) -> bool:
        """False: the bytes are not those of a file."""
        return False

    def to_float32(self, start: int | None = None, stop: int | None = None) -> FloatArray:
        """Return rows [start:stop] of the numbers, copied."""
        return self.values[start:stop].copy()

    def take_rows(self, start: int, stop: int) -> Decoded:
        """Return rows [start:stop] as a tensor."""
        return Decoded(self.name, self.values[start:stop])

    def take_matrix(self, index: int) -> Decoded:
        """Return part `index` of the first axis as a tensor."""
        return Decoded(self.name, self.values[index])

    def take_columns(self, columns: range) -> Decoded:
        """Return these columns of a matrix, copied."""
        return Decoded(self.name, np.ascontiguousarray(self.values[:, _as_slice(columns)]))

    def release(self) -> None:
        """Do nothing: the numbers are this object's own."""


@frozen(eq=False)
class View:
    """A matrix made of another one, `source`, each time its data is read; it has the name and type of the source."""

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
    def shape(self) -> tuple[int, ...]:
        """The number of rows and columns."""
        return self.source.shape

    @property
    def is_mapped(self) -> bool:
        """False: the bytes are not those of a file."""
        return False

    def take_matrix(self, index: int) -> TensorSource:
        """Raise ValueError: this is a matrix, not a stack."""
        raise ValueError(f"tensor {self.name} has no part {index}, as it is a matrix")

    def release(self) -> None:
        """Release the whole source."""
        self.source.release()


@frozen(eq=False)
class Columns(View):
    """Some columns of a matrix as the rows of another one, made each time its data is read.

    It has the source's type if that is one of floats, otherwise bf16.
    """

    rows: range

    @property
    def type_name(self) -> str:
        """The type of the source, or bf16."""
        return self.source.type_name if self.source.type_name in _FLOAT_BYTES else "bf16"

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, columns): the chosen columns of the source, by its rows."""
        return (len(self.rows), self.source.shape[0])

    @property
    def data(self) -> ByteArray:
        """The numbers as bytes, copied."""
        if self.source.type_name not in _FLOAT_BYTES:
            return round_to_bf16(self._decode(self.rows)).view(np.uint8).reshape(-1)
        size = _FLOAT_BYTES[self.source.type_name]
        numbers = self.source.data.view(f"u{size}").reshape(self.source.shape)
        return np.ascontiguousarray(numbers[:, _as_slice(self.rows)].T).view(np.uint8).reshape(-1)

    @property
    def nbytes(self) -> int:
        """Length of `data` in bytes."""
        return len(self.rows) * self.source.shape[0] * _FLOAT_BYTES[self.type_name]

    def to_float32(self, start: int | None = None, stop: int | None = None) -> FloatArray:
        """Return rows [start:stop] of the numbers, decoded."""
        decoded = self._decode(self.rows[start:stop])
        return decoded if self.source.type_name in _FLOAT_BYTES else widen_bf16(round_to_bf16(decoded))

    def _decode(self, rows: range) -> FloatArray:
        return np.ascontiguousarray(self.source.to_float32()[:, _as_slice(rows)].T)

    def take_rows(self, start: int, stop: int) -> Columns:
        """Return rows [start:stop] as a tensor."""
        return Columns(self.source, self.rows[start:stop])


def _as_bytes(values: npt.NDArray[Any]) -> ByteArray:
    return np.ascontiguousarray(values).view(np.uint8).reshape(-1)


def _as_slice(rows: range) -> slice:
    return slice(rows.start, rows.stop, rows.step)


@frozen(eq=False)
class Stack:
    """Matrices of one type and one shape as one tensor (parts, rows, columns), without a copy."""

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
        """True if there is only one part, in a mapped file; several are joined by copying."""
        return len(self.parts) == 1 and self.parts[0].is_mapped

    def to_float32(self, start: int | None = None, stop: int | None = None) -> FloatArray:
        """Return parts [start:stop], decoded into one array."""
        return np.stack([part.to_float32() for part in self.parts[start:stop]])

    def take_rows(self, start: int, stop: int) -> Stack:
        """Return parts [start:stop] as a stack."""
        return Stack(self.name, self.parts[start:stop])

    def take_matrix(self, index: int) -> TensorSource:
        """Return part `index`, a matrix."""
        return self.parts[index]

    def release(self) -> None:
        """Release the sources of all parts."""
        for part in self.parts:
            part.release()


@frozen(eq=False)
class Joined(Stack):
    """Matrices of one type and one width as one matrix, with their rows one after another."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows of all parts together, columns)."""
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])

    def to_float32(self, start: int | None = None, stop: int | None = None) -> FloatArray:
        """Return rows [start:stop] of all parts, decoded."""
        first, last, made, row = start or 0, self.shape[0] if stop is None else stop, list[FloatArray](), 0
        for part in self.parts:
            begin, end = max(first - row, 0), min(last - row, part.shape[0])
            row += part.shape[0]
            made += [part.to_float32(begin, end)] if begin < end else []
        return np.concatenate(made) if made else self.parts[0].to_float32(0, 0)

    def take_rows(self, start: int, stop: int) -> Picked:  # type: ignore[override]
        """Return rows [start:stop] as a tensor."""
        return Picked(self, np.arange(start, stop, dtype=np.int32))


@frozen(eq=False)
class Picked(View):
    """Some rows of a matrix, in any order, as a tensor; its blocks are copied when they are read."""

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
        """Return rows [start:stop] as a tensor."""
        return Picked(self.source, self.rows[start:stop])


@frozen(eq=False)
class PaddedRows(View):
    """A matrix with each `rows` rows padded to `padded` by rows of zeros: blocks of zero bytes are zeros in every type.

    Its blocks are made when they are read.
    """

    rows: int
    padded: int

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, columns), as NumPy orders them."""
        return (self.source.shape[0] // self.rows * self.padded, *self.source.shape[1:])

    @property
    def data(self) -> ByteArray:
        """The blocks of all rows, copied."""
        return self._pad(self.source.data.reshape(self.source.shape[0], -1)).reshape(-1)

    @property
    def nbytes(self) -> int:
        """Length of `data` in bytes."""
        return self.source.nbytes // self.rows * self.padded

    def _pad(self, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        groups = rows.reshape(-1, self.rows, rows.shape[1])
        return np.pad(groups, ((0, 0), (0, self.padded - self.rows), (0, 0))).reshape(-1, rows.shape[1])

    def to_float32(self, start: int | None = None, stop: int | None = None) -> FloatArray:
        """Return rows [start:stop] of the numbers."""
        return np.asarray(self._pad(self.source.to_float32())[start:stop], np.float32)

    def take_rows(self, start: int, stop: int) -> Picked:
        """Return rows [start:stop] as a tensor."""
        return Picked(self, np.arange(start, stop, dtype=np.int32))


def part_groups(groups: int, sizes: Sequence[int]) -> list[IntArray]:
    """Return the rows of each part of a tensor with `groups` groups of rows, each with `sizes[i]` rows of part i."""
    rows = np.arange(groups * sum(sizes), dtype=np.int32).reshape(groups, -1)
    return [part.reshape(-1) for part in np.split(rows, np.cumsum(sizes)[:-1], axis=1)]


def pick_parts(tensor: TensorSource, parts: Sequence[IntArray]) -> Picked:
    """Return the rows of these parts of a tensor, one part after another."""
    return Picked(tensor, np.concatenate(parts))


def take_halves(tensor: TensorSource, groups: int) -> tuple[Picked, Picked]:
    """Return the first halves of `groups` groups of rows, and the second halves."""
    half = tensor.shape[0] // groups // 2
    first, second = part_groups(groups, (half, half))
    return Picked(tensor, first), Picked(tensor, second)


def as_float32(tensor: TensorSource) -> Decoded:
    """Return the whole tensor decoded, and release it. A vector becomes a matrix of one row."""
    values = np.ascontiguousarray(np.atleast_2d(tensor.to_float32()), np.float32)
    tensor.release()
    return Decoded(tensor.name, values)


def stack_vectors(name: str, parts: Sequence[TensorSource]) -> Decoded:
    """Return vectors of one length, decoded, as the rows of one tensor. Raises ModelError if the lengths differ."""
    for part in parts:
        if part.shape != parts[0].shape or len(part.shape) != 1:
            raise ModelError(f"tensor {part.name} has shape {part.shape}, expected a vector as {parts[0].name} is")
    return Decoded(name, np.stack([part.to_float32() for part in parts]))


def cut_vector(tensor: TensorSource, start: int, stop: int) -> Decoded:
    """Return the numbers [start:stop] of a small vector, decoded."""
    values = np.ascontiguousarray(tensor.to_float32()[start:stop], np.float32)
    return Decoded(tensor.name, values)


def cut_columns(tensor: TensorSource, start: int, stop: int) -> Reordered:
    """Return columns [start:stop] of a matrix. Raises ModelError if they are not whole blocks of its type."""
    block_columns = _BLOCK_COLUMNS.get(tensor.type_name, 1)
    if start % block_columns or stop % block_columns:
        raise ModelError(
            f"tensor {tensor.name} of type {tensor.type_name} cannot be cut at columns {start} and {stop}, as its "
            f"blocks have {block_columns}; take another type, or fewer GPUs"
        )
    return pick_columns(tensor, range(start, stop))


@frozen(eq=False, slots=False)
class Reordered(View):
    """A matrix whose column i is column `columns[i]` of the source.

    It keeps the source's type if only whole blocks move; otherwise it is f32, decoded when it is read.
    """

    columns: IntArray

    @cached_property
    def _blocks(self) -> IntArray | None:
        """The order of the blocks of a row; None if columns leave their block."""
        size = _BLOCK_COLUMNS.get(self.source.type_name)
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
        if self._blocks is None:
            return _as_bytes(self.to_float32())
        block_bytes = (
            self.source.nbytes * len(self.columns) // (self.source.shape[1] * self.shape[0] * len(self._blocks))
        )
        blocks = self.source.data.reshape(self.shape[0], -1, block_bytes)
        return np.ascontiguousarray(blocks[:, self._blocks]).reshape(-1)

    @property
    def nbytes(self) -> int:
        """Length of `data` in bytes."""
        if self._blocks is None:
            return 4 * self.shape[0] * self.shape[1]
        return self.source.nbytes * len(self.columns) // self.source.shape[1]

    def to_float32(self, start: int | None = None, stop: int | None = None) -> FloatArray:
        """Return rows [start:stop] of the numbers."""
        return np.ascontiguousarray(self.source.to_float32(start, stop)[:, self.columns])

    def take_rows(self, start: int, stop: int) -> TensorSource:
        """Return rows [start:stop] as a tensor."""
        return Reordered(self.source.take_rows(start, stop), self.columns)


def pick_rows(tensor: TensorSource, rows: Sequence[int]) -> Picked:
    """Return a tensor whose row i is row `rows[i]` of another one."""
    return Picked(tensor, np.array(rows, np.int32))


def pick_columns(tensor: TensorSource, columns: Sequence[int]) -> Reordered:
    """Return a matrix whose column i is column `columns[i]` of another one."""
    return Reordered(tensor, np.array(columns, np.int32))


def pick_numbers(tensor: TensorSource, places: Sequence[int]) -> Decoded:
    """Return a small tensor decoded, with the numbers along its last axis taken from `places`."""
    return Decoded(tensor.name, np.ascontiguousarray(tensor.to_float32()[..., np.array(places, np.int32)]))


def add_one(tensor: TensorSource) -> Decoded:
    """Return a small tensor with 1 added to each number."""
    return Decoded(tensor.name, tensor.to_float32() + np.float32(1.0))


def turn_matrix(tensor: TensorSource) -> Decoded:
    """Return a small matrix transposed."""
    return Decoded(tensor.name, np.ascontiguousarray(tensor.to_float32().T))


def take_rates(logarithms: TensorSource) -> Decoded:
    """Return -exp(x): the rates of decay of states, whose logarithms model folders keep."""
    # In float32 the last bit of NumPy's exp depends on the processor.
    return Decoded(logarithms.name, -np.exp(logarithms.to_float32().astype(np.float64)).astype(np.float32))


def make_zeros(name: str, rows: int, columns: int) -> Decoded:
    """Return a small matrix of zeros."""
    return Decoded(name, np.zeros((rows, columns), np.float32))


def make_choice(name: str, rows: int, columns: int) -> Decoded:
    """Return a matrix (rows, columns) whose product with a vector is the vector's first `rows` numbers."""
    return Decoded(name, np.eye(rows, columns, dtype=np.float32))


def make_vector(name: str, numbers: Sequence[float]) -> Decoded:
    """Return numbers as a tensor of f32."""
    return Decoded(name, np.array(numbers, np.float32))


def make_words(numbers: Sequence[int]) -> npt.NDArray[np.uint64]:
    """Return integers as unsigned 64-bit numbers, as files keep large ones."""
    return np.array(numbers, np.uint64)


def round_float(number: float) -> float:
    """Return a number rounded to float32."""
    return c_float(number).value


def scale_rows(source: TensorSource, factors: Sequence[float], counts: Sequence[int]) -> Scaled:
    """Return the tensor with the first `counts[0]` rows multiplied by `factors[0]`, the next `counts[1]` by the next.

    Raises ValueError if the counts do not add up to its rows.
    """
    rows = np.repeat(np.asarray(factors, np.float32), counts)
    if (len(rows),) != source.shape[:1] or len(source.shape) != 2:
        raise ValueError(f"scale_rows: tensor {source.name} has shape {source.shape}, expected {len(rows)} rows")
    return Scaled(source, rows)


@frozen(eq=False, slots=False)
class Scaled(View):
    """The rows of `source`, multiplied by `factors` (rows,), in the source's type if that is f16 or bf16, else in f32.

    `data` is made when it is first read, and kept until `release`.
    """

    factors: FloatArray

    @property
    def type_name(self) -> str:
        """The type of the source, or f32."""
        return self.source.type_name if self.source.type_name in ("f16", "bf16") else "f32"

    @cached_property
    def data(self) -> ByteArray:
        """The numbers as bytes, uint8 (nbytes,)."""
        return _as_bytes(self._multiply(None, None))

    @property
    def nbytes(self) -> int:
        """Length of `data` in bytes."""
        rows, columns = self.shape
        return rows * columns * (4 if self.type_name == "f32" else 2)

    def to_float32(self, start: int | None = None, stop: int | None = None) -> FloatArray:
        """Return rows [start:stop], decoded and multiplied."""
        values = self._multiply(start, stop)
        return widen_bf16(values) if self.type_name == "bf16" else values.astype(np.float32)

    def take_rows(self, start: int, stop: int) -> Scaled:
        """Return rows [start:stop] as a tensor."""
        return Scaled(self.source.take_rows(start, stop), self.factors[start:stop])

    def release(self) -> None:
        """Release the source, and what was made."""
        self.__dict__.pop("data", None)
        self.source.release()

    def _multiply(self, start: int | None, stop: int | None) -> npt.NDArray[Any]:
        """Return rows [start:stop] in this tensor's type, bf16 as words."""
        values: FloatArray = self.source.to_float32(start, stop) * self.factors[start:stop, None]
        match self.type_name:
            case "bf16":
                return round_to_bf16(values)
            case "f16":
                return values.astype(np.float16)
            case _:
                return values


@frozen(eq=False)
class Update:
    """A low-rank update, scale * b a with `a` (rank, columns) and `b` (n, rank), of `rows` (n,) of a matrix."""

    rows: IntArray
    a: FloatArray
    b: FloatArray
    scale: float


def number_rows(name: str, rows: int) -> Decoded:
    """Return a tensor (rows, 1) of its row numbers, to be cut and picked from like the weight of that name."""
    return Decoded(name, np.arange(rows, dtype=np.float32)[:, None])


def read_row_numbers(numbered: TensorSource) -> IntArray:
    """Return the row numbers that are left in a tensor of `number_rows`."""
    return numbered.to_float32()[:, 0].astype(np.int32)


@frozen(eq=False)
class Updated(View):
    """The rows of `source` with `updates` added, in f32; no row is in two updates."""

    updates: Sequence[Update]

    type_name: ClassVar[str] = "f32"

    @property
    def data(self) -> ByteArray:
        """All numbers as bytes, uint8 (nbytes,)."""
        return _as_bytes(self.to_float32())

    @property
    def nbytes(self) -> int:
        """Length of `data` in bytes."""
        return 4 * self.shape[0] * self.shape[1]

    def to_float32(self, start: int | None = None, stop: int | None = None) -> FloatArray:
        """Return rows [start:stop] with their updates added."""
        first, last, _ = slice(start, stop).indices(self.shape[0])
        values = np.array(self.source.to_float32(first, last), np.float32)
        for update in self.updates:
            places = np.flatnonzero((update.rows >= first) & (update.rows < last))
            values[update.rows[places] - first] += (update.b[places] @ update.a) * np.float32(update.scale)
        return values

    def pick_rows(self, rows: IntArray) -> TensorSource:
        """Return a tensor of these rows, in their order."""
        return Picked(Decoded(self.name, self.to_float32()), rows)

    def take_rows(self, start: int, stop: int) -> TensorSource:
        """Return rows [start:stop] as a tensor."""
        return Decoded(self.name, self.to_float32(start, stop))


@frozen(eq=False)
class UpdatedStack(Stack):
    """The matrices of the stack `source`, some of them updated."""

    source: TensorSource
