"""A model as the sequence of its operators: the meaning, on any device."""

from __future__ import annotations

from collections.abc import Sequence

from mlxr.kernels.context import Context
from mlxr.kernels.embed import embed
from mlxr.kernels.forward.model import ModelWeights
from mlxr.kernels.layers import run_layers
from mlxr.kernels.linear import linear
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.rms_norm import rms_norm
from mlxr.kernels.rope import RopeTable
from mlxr.kernels.rows import take_outputs
from mlxr.kernels.scale import scale
from mlxr.kernels.tensor import FloatArray, PoolArray


def forward(
    ctx: Context,
    model: ModelWeights,
    batch: RaggedBatch,
    rope: RopeTable,
    k_pools: Sequence[PoolArray],
    v_pools: Sequence[PoolArray],
) -> FloatArray:
    """Run the model operator after operator and return the logits (R, vocabulary)."""
    return project(ctx, model, compute_states(ctx, model, batch, rope, k_pools, v_pools))


def project(ctx: Context, model: ModelWeights, states: FloatArray) -> FloatArray:
    """Logits (R, vocabulary) of states (R, hidden) after the final norm."""
    logits = linear(ctx, states, model.output)
    return scale(ctx, logits, model.ends.logit_scale, softcap=model.ends.softcap)


def compute_states(
    ctx: Context,
    model: ModelWeights,
    batch: RaggedBatch,
    rope: RopeTable,
    k_pools: Sequence[PoolArray],
    v_pools: Sequence[PoolArray],
) -> FloatArray:
    """States (R, hidden) of the output rows, after the final norm."""
    stream = scale(ctx, embed(ctx, batch.token_ids, model.table), model.ends.embedding_scale)
    stream, delta = run_layers(ctx, stream, model.layers, batch, rope, k_pools, v_pools)
    residual = None if delta is None else take_outputs(ctx, delta, batch)
    normed, _ = rms_norm(ctx, take_outputs(ctx, stream, batch), model.norm, model.eps, residual)
    return normed
