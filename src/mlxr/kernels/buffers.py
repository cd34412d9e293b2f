"""Arrays for the results of native operators: large ones come out of memory that is used again, small ones from NumPy.

A fresh array of some megabytes costs a page fault for each of its pages. The native module keeps the memory of arrays
that nobody holds any more (csrc/runtime/buffers.h); an array may outlive its context.
"""

from __future__ import annotations

import numpy as np

from mlxr.kernels.context import Context
from mlxr.kernels.tensor import FloatArray

LARGE = 1 << 17  # numbers from which on memory is kept: below, the allocator of the C library does it


def empty(ctx: Context, rows: int, columns: int) -> FloatArray:
    """A float32 array (rows, columns) whose contents are undefined."""
    if rows * columns < LARGE:
        return np.empty((rows, columns), np.float32)
    return ctx.module.empty(ctx.native, rows, columns)
