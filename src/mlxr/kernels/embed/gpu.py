"""`embed` on a GPU: the whole table is on the device as stored; a kernel expands the requested rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mlxr.kernels.context import Context
from mlxr.kernels.gpu.device import Upload
from mlxr.kernels.gpu.kernel import Kernel
from mlxr.kernels.linear.parts import FLOATS, arrange_blocks, pick_blocks
from mlxr.kernels.tensor import DeviceArray, IntArray, TensorSource

THREADS = 256
HOST = "host"  # the ledger's variant for rows decoded on the host, if MLX has no operation for a type
PICK = Kernel("embed_pick", Path(__file__).parent, "pick.body", ("table", "ids", "sizes"), ("out",))
KERNELS = (PICK,)


def embed(ctx: Context, token_ids: IntArray, table: TensorSource) -> DeviceArray:
    """Return rows `token_ids` of `table` in f32."""
    gpu = ctx.gpu
    if not is_placed(ctx, table):
        ctx.ledger.count("embed", HOST, table.type_name)
        return gpu.mx.array(np.concatenate([table.to_float32(i, i + 1) for i in token_ids.tolist()]))
    ids, upload = gpu.place_ids(token_ids), hold_table(ctx, table)
    if table.type_name in FLOATS and gpu.launcher is None:
        return gpu.watch.run_mlx(
            "embed", table.type_name, lambda: gpu.mx.take(upload.array, ids, axis=0).astype(gpu.mx.float32), ids
        )
    if table.type_name in FLOATS:
        return _pick_floats(ctx, upload.array, ids)
    return pick_blocks(ctx, upload, table, ids, gpu.mx.float32)


def is_placed(ctx: Context, table: TensorSource) -> bool:
    """Return True if rows are looked up on the device, which then needs the whole table."""
    return ctx.gpu.launcher is not None or table.type_name in FLOATS


def hold_table(ctx: Context, table: TensorSource) -> Upload:
    """Return the table on the device, where it stays."""
    return ctx.gpu.table(table, arrange_blocks)


def _pick_floats(ctx: Context, table: DeviceArray, ids: DeviceArray) -> DeviceArray:
    launcher, columns, tokens = ctx.gpu.launcher, table.shape[1], ids.shape[0]
    if not tokens:
        return ctx.gpu.mx.zeros((0, columns), ctx.gpu.mx.float32)
    (out,) = launcher.launch(
        PICK,
        [table, ids, launcher.numbers(columns)],
        groups=(-(-columns // THREADS), tokens, 1),
        threads=THREADS,
        outputs=[((tokens, columns), ctx.gpu.mx.float32)],
    )
    return out
