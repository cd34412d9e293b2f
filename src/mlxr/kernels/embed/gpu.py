"""`embed` on a GPU: the whole table is there as stored; the rows asked for are expanded by a kernel."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlxr.kernels.context import Context
from mlxr.kernels.linear.gpu import FLOATS, arrange_blocks, pick_blocks
from mlxr.kernels.tensor import IntArray, TensorSource


def embed(ctx: Context, token_ids: IntArray, table: TensorSource) -> Any:
    """Rows `token_ids` of `table` in f32."""
    gpu = ctx.gpu
    if gpu.launcher is None and table.type_name not in FLOATS:
        return gpu.mx.array(np.concatenate([table.to_float32(i, i + 1) for i in token_ids.tolist()]))
    ids, upload = gpu.place_ids(token_ids), gpu.table(table, arrange_blocks)
    if table.type_name in FLOATS:
        return gpu.mx.take(upload.array, ids, axis=0).astype(gpu.mx.float32)
    return pick_blocks(ctx, upload, table, ids, gpu.mx.float32)
