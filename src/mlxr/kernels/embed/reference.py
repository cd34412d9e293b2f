"""Reference of `embed`: decode one row after another."""

# ruff: noqa: ARG001 -- every implementation takes the context
from __future__ import annotations

import numpy as np

from mlxr.kernels.context import Context
from mlxr.kernels.tensor import FloatArray, IntArray, TensorSource


def embed(ctx: Context, token_ids: IntArray, table: TensorSource) -> FloatArray:
    """Row `token_ids[t]` of the table as row t."""
    rows = np.empty((token_ids.shape[0], table.shape[1]), np.float32)
    for index, token_id in enumerate(token_ids.tolist()):
        rows[index] = table.to_float32(token_id, token_id + 1)[0]
    return rows
