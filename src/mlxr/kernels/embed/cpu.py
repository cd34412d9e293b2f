"""`embed` on the CPU: the rows asked for are decoded natively from the raw blocks, bit for bit as the format says."""

from __future__ import annotations

from mlxr.kernels.buffers import empty
from mlxr.kernels.context import Context
from mlxr.kernels.tensor import FloatArray, IntArray, TensorSource


def embed(ctx: Context, token_ids: IntArray, table: TensorSource) -> FloatArray:
    """Rows `token_ids` of `table`. Raises ValueError for an id outside the table or a type without a decoder."""
    out = empty(ctx, token_ids.shape[0], table.shape[1])
    ctx.module.embed(ctx.native, token_ids, table.type_name, table.data, out)
    return out
