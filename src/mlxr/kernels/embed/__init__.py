"""Rows of an embedding table of any type; only the rows asked for are decoded, straight from the file's blocks.

First the checks, then the reference in NumPy, then the call of the native kernel; `gpu.py` has the launch.
"""

# ruff: noqa: ARG001 -- every implementation takes the context
from __future__ import annotations

import numpy as np

from mlxr.kernels.arrays import empty
from mlxr.kernels.checks import check_ints, refuse
from mlxr.kernels.choice import REFERENCE, Choice
from mlxr.kernels.context import Context
from mlxr.kernels.tensor import FloatArray, IntArray, TensorSource


def embed(ctx: Context, token_ids: IntArray, table: TensorSource) -> FloatArray:
    """Decode rows `token_ids` (T,) of `table` (rows, columns) into (T, columns).

    Raises ValueError for an id outside the table.
    """
    check_ints("embed", "token_ids", token_ids)
    if len(table.shape) != 2:
        refuse("embed", f"table {table.name}", f"of shape {table.shape}", "(rows, columns)")
    if token_ids.shape[0] and (token_ids.min() < 0 or token_ids.max() >= table.shape[0]):
        refuse("embed", "token_ids", token_ids.tolist(), f"ids from 0 to {table.shape[0] - 1}")
    name, implementation = EMBED.pick(ctx.device)
    if name == REFERENCE:
        ctx.ledger.count("embed", name, table.type_name)
    return implementation(ctx, token_ids, table)


def _embed_reference(ctx: Context, token_ids: IntArray, table: TensorSource) -> FloatArray:
    rows = np.empty((token_ids.shape[0], table.shape[1]), np.float32)
    for index, token_id in enumerate(token_ids.tolist()):
        rows[index] = table.to_float32(token_id, token_id + 1)[0]
    return rows


def _embed_native(ctx: Context, token_ids: IntArray, table: TensorSource) -> FloatArray:
    out = empty(ctx, token_ids.shape[0], table.shape[1])
    ctx.module.embed(ctx.native, token_ids, table.type_name, table.data, out)
    return out


EMBED = Choice("embed", _embed_reference, _embed_native, f"{__name__}.gpu")
