"""A model as the sequence of its operators: the meaning, on any device."""

from __future__ import annotations

from collections.abc import Sequence

from mlxr.kernels.collectives import gather_ranks
from mlxr.kernels.context import Context
from mlxr.kernels.elementwise import add, scale
from mlxr.kernels.embed import embed
from mlxr.kernels.forward.model import ModelWeights
from mlxr.kernels.layers import Layers, StepInput, run_layers
from mlxr.kernels.layers.reference import norm
from mlxr.kernels.linear import linear
from mlxr.kernels.lora import AdapterRows, add_lora, add_lora_rows
from mlxr.kernels.rows import join_columns, take_outputs
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


def compute_tapped(
    ctx: Context, model: ModelWeights, parts: Sequence[Layers], step: StepInput
) -> tuple[FloatArray, FloatArray]:
    """`compute_states`, and the stream (R, taps * hidden) of the output rows before each of the `parts` but the first.

    The parts are the model's layers, cut in pieces of which some may be empty.
    """
    stream = _embed(ctx, model, step)
    delta: FloatArray | None = None
    taps: list[FloatArray] = []
    first = 0
    for number, part in enumerate(parts):
        if number:
            stream, delta = (stream if delta is None else add(ctx, stream, delta)), None
            taps.append(take_outputs(ctx, stream, step.batch).copy())
        if part.layers:
            stream, delta = run_layers(ctx, stream, part, step.cut(first, first + len(part.layers)))
            first += len(part.layers)
    residual = None if delta is None else take_outputs(ctx, delta, step.batch)
    normed, _ = norm(ctx, take_outputs(ctx, stream, step.batch), model.norm, residual)
    tapped = taps[0]
    for tap in taps[1:]:
        tapped = join_columns(ctx, tapped, tap)
    return normed, tapped


def compute_states(ctx: Context, model: ModelWeights, step: StepInput) -> FloatArray:
    """States (R, hidden) of the output rows, after the final norm."""
    stream, delta = run_layers(ctx, _embed(ctx, model, step), model.layers, step)
    residual = None if delta is None else take_outputs(ctx, delta, step.batch)
    normed, _ = norm(ctx, take_outputs(ctx, stream, step.batch), model.norm, residual)
    return normed


def _embed(ctx: Context, model: ModelWeights, step: StepInput) -> FloatArray:
    """The stream before the first layer."""
    stream = embed(ctx, step.batch.token_ids, model.table)
    if step.adapters:
        stream = add_lora_rows(ctx, step.batch.token_ids, stream, step.adapters)
    return scale(ctx, stream, model.ends.embedding_scale)
