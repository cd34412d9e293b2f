"""What may be done with single pages of a pool, whatever the pool is made of: copy them, export and import bytes."""

from __future__ import annotations

import numpy as np

from mlxr.kernels.tensor import ByteArray, PoolArray


def is_on_host(pool: PoolArray) -> bool:
    """Whether the pool is in host memory, which any thread may read."""
    return isinstance(pool, np.ndarray)


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
