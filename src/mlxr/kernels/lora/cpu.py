"""Calls the native `lora` of csrc/operators/lora.inc: one call for all updates of a product."""

from __future__ import annotations

from collections.abc import Sequence

from mlxr.kernels.context import Context
from mlxr.kernels.lora import LoraPart
from mlxr.kernels.tensor import FloatArray, IntArray


def add_lora(ctx: Context, x: FloatArray, out: FloatArray, updates: Sequence[tuple[IntArray, LoraPart]]) -> FloatArray:
    """Add to `out` in place."""
    native = [(rows, part.a, part.b, part.scale, part.first) for rows, part in updates]
    ctx.module.lora(ctx.native, x, out, native)
    return out
