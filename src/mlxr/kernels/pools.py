"""Pools of states, and what may be done with single pages of a pool, whatever it is made of.

Pages are copied whole, and their bytes exported and imported; the slots of a pool of states are pages, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np

from mlxr.core.memory import discard, read_unit_bytes
from mlxr.kernels.tensor import FLOAT32, ByteArray, PoolArray

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
