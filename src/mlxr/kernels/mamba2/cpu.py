"""Calls the native `mamba2` of csrc/mixers."""

from __future__ import annotations

from mlxr.kernels.buffers import empty
from mlxr.kernels.context import Context
from mlxr.kernels.mamba2 import StateSpace
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.states import place_states
from mlxr.kernels.tensor import FloatArray


def mamba2(
    ctx: Context,
    xbc: FloatArray,
    x: FloatArray,
    space: StateSpace,
    batch: RaggedBatch,
    pool: FloatArray,
    first: int,
    at: int,
) -> FloatArray:
    """What the columns of the batch's tokens give."""
    out = empty(ctx, x.shape[0], space.results)
    numbers = space.rates, space.bias, space.skip, space.groups, space.state_dim
    ctx.module.mamba2(ctx.native, xbc, x, first, *numbers, out, *place_states(batch, pool, at))
    return out
