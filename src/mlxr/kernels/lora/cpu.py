"""The native adapter of csrc/lora/adapter.h: one call for all updates of a product."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlxr.kernels.context import Context
from mlxr.kernels.linear import LinearWeight
from mlxr.kernels.lora import AdapterRows, Parts, TablePart, narrow
from mlxr.kernels.native import NativeAdapter, NativeUpdates
from mlxr.kernels.tensor import FloatArray, IntArray


def prepare(ctx: Context, parts: Parts, table: TablePart | None) -> tuple[NativeAdapter, int]:
    """The native twin, which has the matrices in tiles and keeps the weights alive."""
    native = ctx.module.Adapter()
    for weight, own in parts.items():
        for part in own:
            a, b = narrow(part.a, np.ascontiguousarray(part.b.T))
            native.append(weight.payload, part.first, a, b, part.scale)
    if table is not None:
        (looked_up,) = narrow(np.ascontiguousarray(table.b))
        native.append_table(looked_up, table.scale)
    return native, native.nbytes


def list_native(adapters: Sequence[AdapterRows], token_ids: IntArray | None = None) -> NativeUpdates:
    """Adapters and their rows as native calls take them, with what is looked up by `token_ids`."""
    looked_up = [None if token_ids is None else one.look_up(token_ids) for one in adapters]
    return [(one.updates.payload, one.rows, one.factor, own) for one, own in zip(adapters, looked_up, strict=True)]


def add_lora(
    ctx: Context, x: FloatArray, out: FloatArray, weight: LinearWeight, adapters: Sequence[AdapterRows]
) -> FloatArray:
    """Add to `out` in place."""
    ctx.module.lora(ctx.native, weight.payload, list_native(adapters), x, out)
    return out


def add_lora_rows(ctx: Context, out: FloatArray, adapters: Sequence[tuple[AdapterRows, FloatArray]]) -> FloatArray:
    """Add to `out` in place."""
    native = [(one.updates.payload, one.rows, one.factor, looked_up) for one, looked_up in adapters]
    ctx.module.lora_table(ctx.native, native, out)
    return out
