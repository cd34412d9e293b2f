"""Calls the native `gated_delta` of csrc/mixers."""

from __future__ import annotations

from mlxr.kernels.buffers import empty
from mlxr.kernels.context import Context
from mlxr.kernels.gated_delta import EPS, DeltaRule
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.states import place_states
from mlxr.kernels.tensor import FloatArray


def gated_delta(
    ctx: Context,
    qkv: FloatArray,
    x: FloatArray,
    rule: DeltaRule,
    batch: RaggedBatch,
    pool: FloatArray,
    first: int,
    at: int,
) -> FloatArray:
    """Run the rule in native code over the tokens of the batch."""
    out = empty(ctx, x.shape[0], rule.results)
    ctx.module.gated_delta(
        ctx.native,
        qkv,
        x,
        first,
        rule.rates,
        rule.bias,
        rule.key_heads,
        rule.value_heads,
        rule.key_dim,
        rule.is_tiled,
        EPS,
        rule.key_dim**-0.5,
        out,
        *place_states(batch, pool, at),
    )
    return out
