"""What the operators call an array, a weight tensor and a pool of pages, so that callers need not know NumPy.

A weight tensor is whatever has the attributes of `TensorSource`: usually raw blocks in a mapped file. It knows how to
decode itself; which kernels multiply by it without decoding is the business of `linear` and `embed`.

Pools hold pages of keys and values, and recurrent states. Pages are copied whole, and their bytes exported and
imported; the slots of a pool of states are pages, too. A page holds page_size * head_dim numbers of a KV head (as
csrc/attend/packed_pages.h), in pairs as products of pairs want them. Keys: groups of 16 positions (the last may have
fewer), each (head_dim / 2, positions of the group, 2). Values: pairs of positions, (page_size / 2, head_dim, 2). Of an
odd number of dimensions or positions the last stands alone, so that every page is exactly full. NumPy has no bf16; the
numbers travel as uint16. A page of q8 holds int8 numbers in the same order, and after them an f32 scale for each
position.
"""

# ruff: noqa: D102 -- methods of arrays are those of MLX and NumPy
from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from mlxr.core.memory import discard, read_unit_bytes

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
SCALE_BYTES = 4  # of q8: one f32 for each position and head
_POOL_TYPES = {dtype: name for name, dtype in POOL_DTYPES.items()}


class NumberType(Protocol):
    """The type of a device's numbers, as MLX has it."""

    @property
    def size(self) -> int:
        """Bytes of one number."""

    def __hash__(self) -> int:
        """Equal types have equal ones."""


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


STATE_BYTES = FLOAT32.itemsize  # of one number of a recurrent state


def allocate_states(ctx: Context, slots: int, floats: int) -> PoolArray:
    """A pool of states (slots, floats) in f32, zeroed, where the context's operators read and write it in place.

    On the CPU the memory is taken from the system when it is first written. On a GPU it is a `Pool`, whose `array` has
    one slot more, which padding writes to.
    """
    if ctx.gpu is not None:
        return cast(PoolArray, ctx.gpu.allocate_pool((slots, floats), "f32"))
    if ctx.native is None:
        return np.zeros((slots, floats), FLOAT32)
    states: PoolArray = ctx.module.zeros(ctx.native, slots * floats * STATE_BYTES).view(FLOAT32).reshape(slots, floats)
    return states


def is_on_host(pool: PoolArray) -> bool:
    """Whether the pool is in host memory, which any thread may read."""
    return isinstance(pool, np.ndarray)


def measure_written(pool: PoolArray, nbytes: int) -> int:
    """Bytes of memory that a pool takes when `nbytes` of it have been written: on a GPU all of it, always."""
    if not isinstance(pool, np.ndarray):
        return int(pool.nbytes)
    unit = read_unit_bytes()
    return min(int(pool.nbytes), -(-nbytes // unit) * unit)


def discard_pages(pool: PoolArray, start: int, stop: int) -> None:
    """Give the memory of pages `start` to `stop` - 1 back to the system; what they held is gone. Nothing on a GPU."""
    if isinstance(pool, np.ndarray):
        part = pool[start:stop]
        discard(part.ctypes.data, part.nbytes)


def copy_page(pool: PoolArray, source: int, target: int) -> None:
    """Copy the contents of page `source` to page `target`."""
    if isinstance(pool, np.ndarray):
        pool[target] = pool[source]
    else:
        pool.copy_page(source, target)


def read_page(pool: PoolArray, page: int) -> ByteArray:
    """The bytes of `page`; a view where the pool is in host memory."""
    if isinstance(pool, np.ndarray):
        part: ByteArray = pool[page].reshape(-1).view(np.uint8)
        return part
    copy: ByteArray = pool.read_page(page)
    return copy


def write_page(pool: PoolArray, page: int, source: ByteArray) -> None:
    """Overwrite `page` with bytes that `read_page` gave, of a pool of the same kind."""
    if isinstance(pool, np.ndarray):
        pool[page].reshape(-1).view(np.uint8)[:] = source
    else:
        pool.write_page(page, source)


Offsets = npt.NDArray[np.int64]
HalfWords = npt.NDArray[np.uint16]
Bytes = npt.NDArray[np.int8]
GROUP_POSITIONS = 16


def round_to_bf16(values: FloatArray) -> HalfWords:
    """To nearest even; not-a-number stays so."""
    raw = np.ascontiguousarray(values).view(np.uint32)
    rounded = (raw.astype(np.uint64) + 0x7FFF + (raw >> 16 & 1)) >> 16
    return np.where(np.isnan(values), raw >> 16 | 0x40, rounded).astype(np.uint16)


def widen_bf16(numbers: HalfWords) -> FloatArray:
    """Widen bfloat16 words to float32, which is exact."""
    return (numbers.astype(np.uint32) << 16).view(np.float32)


def round_to_q8(values: FloatArray) -> tuple[Bytes, FloatArray]:
    """int8 numbers (..., head_dim) and their scales (...): the largest magnitude is 127, rounding to nearest even.

    The scale is NaN where a value is infinite or not a number, 0 where all are below 1e-30.
    """
    top = np.abs(values).max(axis=-1)
    finite = np.isfinite(top)
    used = finite & (top >= np.float32(1e-30))
    inverse = np.divide(np.float32(127), top, out=np.zeros_like(top), where=used)
    numbers = np.rint(np.where(used[..., None], values, np.float32(0)) * inverse[..., None])
    scales = np.where(finite, np.where(used, top, np.float32(0)) / np.float32(127), np.float32(np.nan))
    return numbers.astype(np.int8), scales.astype(np.float32)


def widen_q8(pages: Bytes, offsets: Offsets) -> FloatArray:
    """Pages (pages, kv_heads, bytes) to numbers (pages, kv_heads, page_size, head_dim)."""
    numbers = pages[:, :, offsets].astype(np.float32)
    scales = np.ascontiguousarray(pages[:, :, offsets.size :]).view(np.float32)
    widened: FloatArray = numbers * scales[..., None]
    return widened


def locate_keys(page_size: int, head_dim: int) -> Offsets:
    """Where the numbers of a page of keys lie: (page_size, head_dim) offsets."""
    position, d = np.arange(page_size)[:, None], np.arange(head_dim)[None]
    start = position // GROUP_POSITIONS * GROUP_POSITIONS
    count = np.minimum(page_size - start, GROUP_POSITIONS)
    pair, within = start * head_dim + d // 2 * 2 * count, position - start
    alone = (head_dim % 2 == 1) & (d == head_dim - 1)
    return np.where(alone, pair + within, pair + 2 * within + d % 2)


def locate_values(page_size: int, head_dim: int) -> Offsets:
    """Where the numbers of a page of values lie: (page_size, head_dim) offsets."""
    position, d = np.arange(page_size)[:, None], np.arange(head_dim)[None]
    pair = position // 2 * 2 * head_dim
    alone = (page_size % 2 == 1) & (position == page_size - 1)
    return np.where(alone, pair + d, pair + 2 * d + position % 2)
