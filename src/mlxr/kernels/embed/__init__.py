"""Rows of an embedding table of any type; only the rows asked for are decoded, straight from the file's blocks."""

from __future__ import annotations

from mlxr.kernels.checks import check_ints, refuse
from mlxr.kernels.choice import REFERENCE, Choice
from mlxr.kernels.context import Context
from mlxr.kernels.tensor import FloatArray, IntArray, TensorSource

__all__ = ["embed"]

CHOICE = Choice(__name__)


def embed(ctx: Context, token_ids: IntArray, table: TensorSource) -> FloatArray:
    """Decode rows `token_ids` (T,) of `table` (rows, columns) into (T, columns).

    Raises ValueError for an id outside the table.
    """
    check_ints("embed", "token_ids", token_ids)
    if len(table.shape) != 2:
        refuse("embed", f"table {table.name}", f"of shape {table.shape}", "(rows, columns)")
    if token_ids.shape[0] and (token_ids.min() < 0 or token_ids.max() >= table.shape[0]):
        refuse("embed", "token_ids", token_ids.tolist(), f"ids from 0 to {table.shape[0] - 1}")
    name, implementation = CHOICE.pick(ctx.device)
    if name == REFERENCE:
        ctx.ledger.count("embed", name, table.type_name)
    result: FloatArray = implementation.embed(ctx, token_ids, table)
    return result
