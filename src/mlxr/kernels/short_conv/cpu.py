"""Calls the native `short_conv` of csrc/mixers."""

from __future__ import annotations

from mlxr.kernels.buffers import empty
from mlxr.kernels.context import Context
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.short_conv import Convolution
from mlxr.kernels.states import place_states
from mlxr.kernels.tensor import FloatArray


def short_conv(
    ctx: Context, x: FloatArray, conv: Convolution, batch: RaggedBatch, pool: FloatArray, first: int, at: int
) -> FloatArray:
    """The convolution of the batch's tokens."""
    out = empty(ctx, x.shape[0], conv.channels)
    places = place_states(batch, pool, at)
    ctx.module.short_conv(ctx.native, x, first, conv.weight, conv.bias, conv.kind, out, *places)
    return out
