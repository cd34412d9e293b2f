"""Pools of pages and of recurrent states: what may be done with single pages, and how bf16 and int8 lie within a page.

Pages are copied whole, and their bytes exported and imported; the slots of a pool of states are pages, too.

A page holds page_size * head_dim numbers of a KV head (as csrc/attend/packed_pages.h), in pairs as products of pairs
want them. Keys: groups of 16 positions (the last may have fewer), each (head_dim / 2, positions of the group, 2).
Values: pairs of positions, (page_size / 2, head_dim, 2). Of an odd number of dimensions or positions the last stands
alone, so that every page is exactly full. NumPy has no bf16; the numbers travel as uint16. A page of q8 holds int8
numbers in the same order, and after them an f32 scale for each position.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

from mlxr.core.memory import discard, read_unit_bytes
from mlxr.kernels.tensor import FLOAT32, ByteArray, FloatArray, PoolArray

if TYPE_CHECKING:
    from mlxr.kernels.context import Context

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
