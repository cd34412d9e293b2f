"""NumPy reference of `add_lora`, which defines its numbers."""

# ruff: noqa: ARG001 -- every implementation takes the context
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mlxr.kernels.context import Context
from mlxr.kernels.linear import LinearWeight
from mlxr.kernels.lora import AdapterRows, Parts, TablePart
from mlxr.kernels.tensor import FloatArray


def prepare(ctx: Context, parts: Parts, table: TablePart | None) -> tuple[Any, int]:
    """The parts as they are."""
    matrices = [matrix for own in parts.values() for part in own for matrix in (part.a, part.b)]
    return (dict(parts), table), sum(matrix.nbytes for matrix in [*matrices, *([] if table is None else [table.b])])


def add_lora(
    ctx: Context, x: FloatArray, out: FloatArray, weight: LinearWeight, adapters: Sequence[AdapterRows]
) -> FloatArray:
    """Update after update, row after row, so that a row's bits do not depend on how many there are."""
    for one in adapters:
        for part in one.updates.payload[0][weight]:
            columns = slice(part.first, part.first + part.b.shape[0])
            for row in one.rows:
                out[row, columns] += (part.b @ (part.a @ x[row])) * np.float32(one.multiply(part.scale))
    return out


def add_lora_rows(ctx: Context, out: FloatArray, adapters: Sequence[tuple[AdapterRows, FloatArray]]) -> FloatArray:
    """Row after row, in the same way."""
    for one, looked_up in adapters:
        table = one.updates.payload[1]
        for row, numbers in zip(one.rows, looked_up, strict=True):
            out[row] += (numbers @ table.b) * np.float32(one.multiply(table.scale))
    return out
