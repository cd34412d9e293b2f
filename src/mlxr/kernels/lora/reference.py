"""NumPy reference of `add_lora`, which defines its numbers."""

# ruff: noqa: ARG001 -- every implementation takes the context
from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlxr.kernels.context import Context
from mlxr.kernels.lora import LoraPart
from mlxr.kernels.tensor import FloatArray, IntArray


def add_lora(ctx: Context, x: FloatArray, out: FloatArray, updates: Sequence[tuple[IntArray, LoraPart]]) -> FloatArray:
    """Update after update, row after row, so that a row's bits do not depend on how many there are."""
    for rows, part in updates:
        columns = slice(part.first, part.first + part.b.shape[1])
        for row in rows:
            out[row, columns] += (part.a @ x[row] @ part.b) * np.float32(part.scale)
    return out
