"""A model as the sequence of its operators: the meaning, on any device."""

from __future__ import annotations

from collections.abc import Sequence

from mlxr.kernels.context import Context
from mlxr.kernels.embed import embed
from mlxr.kernels.forward.model import ModelWeights
from mlxr.kernels.gather_ranks import gather_ranks
from mlxr.kernels.layers import StepInput, run_layers
from mlxr.kernels.layers.reference import norm
from mlxr.kernels.linear import linear
from mlxr.kernels.lora import AdapterRows, add_lora, add_lora_rows
from mlxr.kernels.rows import take_outputs
from mlxr.kernels.scale import scale
from mlxr.kernels.tensor import FloatArray


def forward(ctx: Context, model: ModelWeights, step: StepInput) -> FloatArray:
    """Run the model operator after operator and return the logits (R, vocabulary)."""
    return project(ctx, model, compute_states(ctx, model, step), step.output_adapters)


def project(ctx: Context, model: ModelWeights, states: FloatArray, adapters: Sequence[AdapterRows] = ()) -> FloatArray:
    """Logits (R, vocabulary) of states (R, hidden) after the final norm, some of whose rows `adapters` update."""
    logits = linear(ctx, states, model.output)
    if model.output_columns:
        logits = gather_ranks(ctx, logits, model.output_columns)
    if adapters:
        logits = add_lora(ctx, states, logits, model.output, adapters)
    return scale(ctx, logits, model.ends.logit_scale, softcap=model.ends.softcap)


def compute_states(ctx: Context, model: ModelWeights, step: StepInput) -> FloatArray:
    """States (R, hidden) of the output rows, after the final norm."""
    stream = embed(ctx, step.batch.token_ids, model.table)
    if step.adapters:
        stream = add_lora_rows(ctx, step.batch.token_ids, stream, step.adapters)
    stream = scale(ctx, stream, model.ends.embedding_scale)
    stream, delta = run_layers(ctx, stream, model.layers, step)
    residual = None if delta is None else take_outputs(ctx, delta, step.batch)
    normed, _ = norm(ctx, take_outputs(ctx, stream, step.batch), model.norm, residual)
    return normed
