"""Types of the operators' arrays, weight tensors and pools of pages, so that callers need not know NumPy.

A weight tensor is anything with the attributes of `TensorSource`: usually raw blocks in a mapped file. It can decode
itself; `linear` and `embed` have the kernels that multiply by it without decoding.

Pools hold pages of keys and values, or recurrent states. Pages are copied whole, and their bytes exported and imported;
the slots of a pool of states are pages, too. A page holds page_size * head_dim numbers for each KV head (see
csrc/attend/packed_pages.h), in the pairs that instructions for products of pairs read. Keys: groups of 16 positions
(the last may have fewer), each (head_dim / 2, positions of the group, 2). Values: pairs of positions, (page_size / 2,
head_dim, 2). If the number of dimensions or positions is odd, the last one stands alone, so that every page is exactly
full. NumPy has no bf16, so its numbers are kept as uint16. A page of q8 holds int8 numbers in the same order, and after
them an f32 scale for each position.
"""

# ruff: noqa: D102 -- methods of arrays are those of MLX and NumPy
from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from mlxr.core.memory import discard, populate, read_unit_bytes

if TYPE_CHECKING:
    from mlxr.kernels.context import Context

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
SCALE_BYTES = 4  # bytes of a q8 scale: one f32 for each position and head
_POOL_TYPES = {dtype: name for name, dtype in POOL_DTYPES.items()}


class NumberType(Protocol):
    """MLX's type of numbers."""

    @property
    def size(self) -> int:
        """Bytes of one number."""

    def __hash__(self) -> int:
        """Return a hash, equal for equal types."""


class DeviceArray(Protocol):
    """An MLX array. While a step is recorded, `recording.Buffer` stands for one: it has only shape, type and `reshape`,
    and fails on anything else.
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
        """The number of elements."""

    @property
    def T(self) -> DeviceArray:  # noqa: N802 - as NumPy and MLX have it
        """The matrix with its axes exchanged."""

    @property
    def at(self) -> Any:
        """MLX's object for updates of chosen elements, as in `array.at[index].add(values)`."""

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
        """The type as ggml spells it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, columns), or one length."""

    @property
    def data(self) -> ByteArray:
        """The blocks as they are in the file, uint8 (nbytes,)."""

    @property
    def nbytes(self) -> int:
        """Length of `data` in bytes."""

    @property
    def is_mapped(self) -> bool:
        """True if `data` is a view of a mapped file, so that reading it copies nothing."""

    def to_float32(self, start: int | None = None, stop: int | None = None) -> FloatArray:
        """Decode rows [start:stop] (all by default) to float32; shape (n, columns), or 1-D for a vector."""

    def take_rows(self, start: int, stop: int) -> TensorSource:
        """Return rows [start:stop] of a matrix as a tensor, without a copy."""

    def take_matrix(self, index: int) -> TensorSource:
        """Return part `index` of the first axis of a stack, with one axis less, without a copy."""

    def release(self) -> None:
        """Let the operating system drop the mapped pages of `data` from memory; they can still be read again."""


def pool_type(pool: PoolArray) -> str:
    """Return the type of a pool's values: "bf16", "f16", "f32" or "q8"."""
    if not isinstance(pool, np.ndarray):
        kind: str = pool.kind
        return kind
    return _POOL_TYPES[pool.dtype]


def pool_row_length(kv_type: str, head_dim: int) -> int:
    """Return the elements of a position and head in a pool: its numbers, and for q8 the four bytes of their scale."""
    return head_dim + SCALE_BYTES if kv_type == "q8" else head_dim


def pool_head_dim(pool: PoolArray) -> int:
    """Return the numbers of a position and head in a pool, without the scale."""
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


STATE_BYTES = FLOAT32.itemsize  # bytes of one number of a recurrent state


def allocate_states(ctx: Context, slots: int, floats: int) -> PoolArray:
    """Return a pool of states (slots, floats) in f32, zeroed, which the context's operators read and write in place.

    On the CPU the system gives the memory when it is first written. On a GPU it is a `Pool`, whose `array` has one more
    slot, to which padding writes.
    """
    if ctx.gpu is not None:
        return cast(PoolArray, ctx.gpu.allocate_pool((slots, floats), "f32"))
    if ctx.native is None:
        return np.zeros((slots, floats), FLOAT32)
    states: PoolArray = ctx.module.zeros(ctx.native, slots * floats * STATE_BYTES).view(FLOAT32).reshape(slots, floats)
    return states


def is_on_host(pool: PoolArray) -> bool:
    """Return True if the pool is in host memory, which any thread may read."""
    return isinstance(pool, np.ndarray)


def measure_written(pool: PoolArray, nbytes: int) -> int:
    """Return the bytes of memory that a pool takes when `nbytes` of it have been written: on a GPU always all."""
    if not isinstance(pool, np.ndarray):
        return int(pool.nbytes)
    unit = read_unit_bytes()
    return min(int(pool.nbytes), -(-nbytes // unit) * unit)


def discard_pages(pool: PoolArray, start: int, stop: int) -> None:
    """Give the memory of pages `start` to `stop` - 1 back to the system, with their contents. On a GPU, do nothing."""
    if isinstance(pool, np.ndarray):
        part = pool[start:stop]
        discard(part.ctypes.data, part.nbytes)


def populate_pages(pool: PoolArray, start: int, stop: int) -> None:
    """Let the system give the memory of pages `start` to `stop` - 1 before they are written. On a GPU, do nothing."""
    if isinstance(pool, np.ndarray):
        part = pool[start:stop]
        populate(part.ctypes.data, part.nbytes)


def copy_page(pool: PoolArray, source: int, target: int) -> None:
    """Copy the contents of page `source` to page `target`."""
    if isinstance(pool, np.ndarray):
        pool[target] = pool[source]
    else:
        pool.copy_page(source, target)


def read_page(pool: PoolArray, page: int) -> ByteArray:
    """Return the bytes of `page`; a view if the pool is in host memory."""
    if isinstance(pool, np.ndarray):
        part: ByteArray = pool[page].reshape(-1).view(np.uint8)
        return part
    copy: ByteArray = pool.read_page(page)
    return copy


def write_page(pool: PoolArray, page: int, source: ByteArray) -> None:
    """Overwrite `page` with bytes that `read_page` returned for a pool of the same kind."""
    if isinstance(pool, np.ndarray):
        pool[page].reshape(-1).view(np.uint8)[:] = source
    else:
        pool.write_page(page, source)


Offsets = npt.NDArray[np.int64]
HalfWords = npt.NDArray[np.uint16]
Bytes = npt.NDArray[np.int8]
GROUP_POSITIONS = 16


def round_to_bf16(values: FloatArray) -> HalfWords:
    """Round f32 to bf16 words, ties to even; NaN stays NaN."""
    raw = np.ascontiguousarray(values).view(np.uint32)
    rounded = (raw.astype(np.uint64) + 0x7FFF + (raw >> 16 & 1)) >> 16
    return np.where(np.isnan(values), raw >> 16 | 0x40, rounded).astype(np.uint16)


def widen_bf16(numbers: HalfWords) -> FloatArray:
    """Widen bfloat16 words to float32, which is exact."""
    return (numbers.astype(np.uint32) << 16).view(np.float32)


def round_to_q8(values: FloatArray) -> tuple[Bytes, FloatArray]:
    """Return int8 numbers (..., head_dim) and their scales (...): the largest magnitude is 127, ties round to even.

    The scale is NaN if a value is infinite or NaN, and 0 if all magnitudes are below 1e-30.
    """
    top = np.abs(values).max(axis=-1)
    finite = np.isfinite(top)
    used = finite & (top >= np.float32(1e-30))
    inverse = np.divide(np.float32(127), top, out=np.zeros_like(top), where=used)
    numbers = np.rint(np.where(used[..., None], values, np.float32(0)) * inverse[..., None])
    scales = np.where(finite, np.where(used, top, np.float32(0)) / np.float32(127), np.float32(np.nan))
    return numbers.astype(np.int8), scales.astype(np.float32)


def widen_q8(pages: Bytes, offsets: Offsets) -> FloatArray:
    """Convert q8 pages (pages, kv_heads, bytes) to f32 numbers (pages, kv_heads, page_size, head_dim)."""
    numbers = pages[:, :, offsets].astype(np.float32)
    scales = np.ascontiguousarray(pages[:, :, offsets.size :]).view(np.float32)
    widened: FloatArray = numbers * scales[..., None]
    return widened


def locate_keys(page_size: int, head_dim: int) -> Offsets:
    """Return the offsets (page_size, head_dim) of the numbers in a page of keys."""
    position, d = np.arange(page_size)[:, None], np.arange(head_dim)[None]
    start = position // GROUP_POSITIONS * GROUP_POSITIONS
    count = np.minimum(page_size - start, GROUP_POSITIONS)
    pair, within = start * head_dim + d // 2 * 2 * count, position - start
    alone = (head_dim % 2 == 1) & (d == head_dim - 1)
    return np.where(alone, pair + within, pair + 2 * within + d % 2)


def locate_values(page_size: int, head_dim: int) -> Offsets:
    """Return the offsets (page_size, head_dim) of the numbers in a page of values."""
    position, d = np.arange(page_size)[:, None], np.arange(head_dim)[None]
    pair = position // 2 * 2 * head_dim
    alone = (page_size % 2 == 1) & (position == page_size - 1)
    return np.where(alone, pair + d, pair + 2 * d + position % 2)
