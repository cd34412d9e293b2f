"""What the operators call an array and a weight tensor, so that callers need not know NumPy.

A weight tensor is whatever has the attributes of `TensorSource`: usually raw blocks in a mapped file. It knows how to
decode itself; which kernels multiply by it without decoding is the business of `linear` and `embed`.
"""

# ruff: noqa: D102 -- methods of arrays are those of MLX and NumPy
from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int32]
ByteArray = npt.NDArray[np.uint8]
PoolArray = npt.NDArray[Any]  # f16, f32, int8 (q8), or bf16 as uint16: one K or V pool of the cache

FLOAT32 = np.dtype(np.float32)
FLOAT16 = np.dtype(np.float16)
INT32 = np.dtype(np.int32)
UINT32 = np.dtype(np.uint32)
INT8 = np.dtype(np.int8)
BFLOAT16 = np.dtype(np.uint16)  # NumPy has no bf16
POOL_DTYPES: dict[str, np.dtype[Any]] = {"bf16": BFLOAT16, "f16": FLOAT16, "f32": FLOAT32, "q8": INT8}
SCALE_BYTES = 4  # of q8: one f32 for each position and head
_POOL_TYPES = {dtype: name for name, dtype in POOL_DTYPES.items()}


class NumberType(Protocol):
    """The type of a device's numbers, as MLX has it."""

    @property
    def size(self) -> int:
        """Bytes of one number."""


class DeviceArray(Protocol):
    """An array of MLX. What stands for one while a step is recorded (`recording.Buffer`) has shape, type and `reshape`
    alone, and fails on all else.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """The lengths of the axes."""

    @property
    def ndim(self) -> int:
        """The number of axes."""

    @property
    def dtype(self) -> NumberType:
        """The type of the numbers."""

    @property
    def nbytes(self) -> int:
        """The size in bytes."""

    @property
    def itemsize(self) -> int:
        """The size of a number."""

    @property
    def size(self) -> int:
        """How many numbers it has."""

    @property
    def T(self) -> DeviceArray:  # noqa: N802 - as NumPy and MLX have it
        """The matrix with rows and columns exchanged."""

    @property
    def at(self) -> Any:
        """What adds to chosen numbers."""

    # fmt: off
    def reshape(self, *shape: int | tuple[int, ...]) -> DeviceArray: ...
    def astype(self, dtype: NumberType, /) -> DeviceArray: ...
    def view(self, dtype: NumberType, /) -> DeviceArray: ...
    def transpose(self, *axes: int) -> DeviceArray: ...
    def swapaxes(self, first: int, second: int) -> DeviceArray: ...
    def squeeze(self, axis: int) -> DeviceArray: ...
    def sum(self, axis: int, keepdims: bool = False) -> DeviceArray: ...
    def __len__(self) -> int: ...
    def __array__(self) -> npt.NDArray[Any]: ...
    def __getitem__(self, index: object, /) -> DeviceArray: ...
    def __setitem__(self, index: object, values: object, /) -> None: ...
    def tolist(self) -> list[Any]: ...
    def __add__(self, other: float | DeviceArray, /) -> DeviceArray: ...
    def __radd__(self, other: float, /) -> DeviceArray: ...
    def __sub__(self, other: float | DeviceArray, /) -> DeviceArray: ...
    def __mul__(self, other: float | DeviceArray, /) -> DeviceArray: ...
    def __rmul__(self, other: float, /) -> DeviceArray: ...
    def __truediv__(self, other: float | DeviceArray, /) -> DeviceArray: ...
    def __rtruediv__(self, other: float, /) -> DeviceArray: ...
    def __floordiv__(self, other: int, /) -> DeviceArray: ...
    def __mod__(self, other: int, /) -> DeviceArray: ...
    def __matmul__(self, other: DeviceArray, /) -> DeviceArray: ...
    def __and__(self, other: DeviceArray, /) -> DeviceArray: ...
    def __or__(self, other: DeviceArray, /) -> DeviceArray: ...
    def __lt__(self, other: float | DeviceArray, /) -> DeviceArray: ...
    def __le__(self, other: float | DeviceArray, /) -> DeviceArray: ...
    def __gt__(self, other: float | DeviceArray, /) -> DeviceArray: ...
    def __ge__(self, other: float | DeviceArray, /) -> DeviceArray: ...
    def __eq__(self, other: object, /) -> DeviceArray: ...  # type: ignore[override]
    def __ne__(self, other: object, /) -> DeviceArray: ...  # type: ignore[override]
    # fmt: on


class TensorSource(Protocol):
    """One named tensor in a file of weights, undecoded.

    `shape` is in NumPy order, (rows, columns) = (out_features, in_features); columns are contiguous and quantised.
    `type_name` is ggml's spelling ("f32", "f16", "q4_k", ...). `data` is the raw blocks as bytes, read-only.
    """

    @property
    def name(self) -> str:
        """The tensor's name in the file."""

    @property
    def type_name(self) -> str:
        """Type as ggml spells it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, columns), or one length."""

    @property
    def data(self) -> ByteArray:
        """The blocks as the file holds them, uint8 (nbytes,)."""

    @property
    def nbytes(self) -> int:
        """Length of `data` in bytes."""

    @property
    def is_mapped(self) -> bool:
        """Whether `data` is a view of a mapped file, so that nothing is copied when it is asked for."""

    def to_float32(self, start: int | None = None, stop: int | None = None) -> FloatArray:
        """Decode rows [start:stop] (all by default) to float32; shape (n, columns), or 1-D for a vector."""

    def take_rows(self, start: int, stop: int) -> TensorSource:
        """Rows [start:stop] of a matrix as a tensor of their own, nothing copied."""

    def take_matrix(self, index: int) -> TensorSource:
        """Part `index` of the first axis of a stack, one axis less, nothing copied."""

    def release(self) -> None:
        """Tell the operating system that the mapped pages behind `data` may go; reading again still works."""


def pool_type(pool: PoolArray) -> str:
    """How a pool keeps its values, as ggml spells it: "bf16", "f16" or "f32", or "q8"."""
    if not isinstance(pool, np.ndarray):
        kind: str = pool.kind
        return kind
    return _POOL_TYPES[pool.dtype]


def pool_row_length(kv_type: str, head_dim: int) -> int:
    """Elements of a position and head in a pool: its numbers, and for q8 four bytes of their scale."""
    return head_dim + SCALE_BYTES if kv_type == "q8" else head_dim


def pool_head_dim(pool: PoolArray) -> int:
    """Numbers of a position and head."""
    return int(pool.shape[3]) - (SCALE_BYTES if pool_type(pool) == "q8" else 0)


def read_numbers(tensor: TensorSource) -> FloatArray:
    """Decode a small tensor of any shape into an array of its own, then release the source."""
    values = np.array(tensor.to_float32(), dtype=np.float32, order="C", copy=True)
    tensor.release()
    return values


def read_vector(tensor: TensorSource) -> FloatArray:
    """Decode a small 1-D tensor (norm weight, bias) into an array of its own, then release the source."""
    if len(tensor.shape) != 1:
        raise ValueError(f"read_vector: tensor {tensor.name} has shape {tensor.shape}, expected one dimension")
    return read_numbers(tensor)
