"""All of a model as one operator: token ids and pages in, logits out.

The reference calls the operators one by one; a GPU replays them from a recorded step. The CPU has a native
implementation (csrc/layers/blocks.cpp), which computes the same bits in one call: it saves the returns to the
interpreter, whose code and data the weights have driven out of the caches each time. It serves steps that want the
logits of all tokens, as in decoding. A prompt wants one row of logits, which is picked between the layers and the
output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from mlxr.core.frozen import frozen
from mlxr.kernels.arrays import empty, join_columns, put_rows, take_outputs
from mlxr.kernels.checks import check_floats, check_size, refuse
from mlxr.kernels.choice import Choice
from mlxr.kernels.collectives import all_gather
from mlxr.kernels.context import Context
from mlxr.kernels.elementwise import NO_SOFTCAP, Hadamard, add, hadamard, scale
from mlxr.kernels.embed import embed
from mlxr.kernels.layers import Layers, NormWeight, StepInput, run_layers
from mlxr.kernels.layers.cpu import list_arrays
from mlxr.kernels.layers.reference import See, norm, run_seen
from mlxr.kernels.linear import LinearWeight, linear
from mlxr.kernels.lora import AdapterRows, add_lora, add_lora_rows
from mlxr.kernels.ragged import RowsOver
from mlxr.kernels.tensor import FloatArray, TensorSource


@frozen
class Ends:
    """Factors of a model's embeddings and logits, and the cap c of logits, c tanh(logit / c), or None."""

    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None


PLAIN_ENDS = Ends()


@frozen(eq=False)
class ModelWeights:
    """The embedding `table` (vocabulary, hidden), the layers, the final norm and the output weight.

    `output_columns` are the numbers of logits of each of several ranks, empty if one rank makes all. An encoder has no
    output, and perhaps no final norm. A row of the table `added` (rows, hidden) is added to each of its embeddings
    before `input_norm`. That table has `added_rows` rows for each type of token: one for each position, or one for all.
    """

    table: TensorSource
    layers: Layers
    norm: NormWeight | None
    output: LinearWeight | None
    ends: Ends = PLAIN_ENDS
    output_columns: tuple[int, ...] = ()
    added: TensorSource | None = None
    added_rows: int = 1
    input_norm: NormWeight | None = None
    table_rotation: Hadamard | None = None  # applied to the table's rows after they are looked up
    first_layers: tuple[Layers, ...] = ()  # layers after which pictures add rows, one by one, then all other layers


def make_model(model: ModelWeights) -> ModelWeights:
    """Check and return a model of prepared weights. Raises ValueError for shapes that do not fit."""
    columns = model.table.shape[1]
    for norm_weight in (model.norm, model.input_norm):
        if norm_weight is not None:
            check_floats("forward", "norm", norm_weight.weight, 1)
            check_size("forward", "length of norm", norm_weight.weight.shape[0], columns)
    if model.output is not None:
        check_size("forward", "in_features of output", model.output.in_features, columns)
    ends = model.ends
    if ends.softcap is not None and not 0 < ends.softcap < math.inf:
        refuse("forward", "softcap", ends.softcap, "a number above 0")
    if not (math.isfinite(ends.embedding_scale) and math.isfinite(ends.logit_scale)):
        refuse("forward", "scales", f"{ends.embedding_scale} and {ends.logit_scale}", "finite numbers")
    return model


def forward(ctx: Context, model: ModelWeights, step: StepInput) -> FloatArray:
    """Return logits (R, vocabulary) of the output rows, and write the batch's keys and values into the step's pools.

    Raises ValueError for shapes that do not fit, for tokens outside the vocabulary, for positions that the tables do
    not cover and for slots and pages outside the pools.
    """
    _, implementation = FORWARD.pick(ctx.device)
    return implementation(ctx, model, step)


def _run_operators(ctx: Context, model: ModelWeights, step: StepInput) -> FloatArray:
    """Run the model operator after operator and return the logits (R, vocabulary)."""
    return project(ctx, model, compute_states(ctx, model, step), step.output_adapters)


def project(ctx: Context, model: ModelWeights, states: FloatArray, adapters: Sequence[AdapterRows] = ()) -> FloatArray:
    """Return logits (R, vocabulary) of states (R, hidden) after the final norm; `adapters` update some of the rows."""
    assert model.output is not None, "the model has no output"
    states = hadamard(ctx, states, model.output.rotation)
    logits = linear(ctx, states, model.output)
    if model.output_columns:
        logits = all_gather(ctx, logits, model.output_columns)
    if adapters:
        logits = add_lora(ctx, states, logits, model.output, adapters)
    return scale(ctx, logits, model.ends.logit_scale, softcap=model.ends.softcap)


def compute_tapped(
    ctx: Context, model: ModelWeights, parts: Sequence[Layers], step: StepInput
) -> tuple[FloatArray, FloatArray]:
    """Return the result of `compute_states`, and the stream (R, taps * hidden) of the output rows at each tap.

    `parts` are the model's layers in pieces, some perhaps empty; taps are before each piece except the first.
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
    normed = _end(ctx, model, stream, delta, step)
    tapped = taps[0]
    for tap in taps[1:]:
        tapped = join_columns(ctx, tapped, tap)
    return normed, tapped


def compute_states(ctx: Context, model: ModelWeights, step: StepInput) -> FloatArray:
    """Return states (R, hidden) of the output rows, after the final norm."""
    rows = step.batch.rows_over
    if rows is not None and model.first_layers:
        return _end(ctx, model, *_run_with_rows(ctx, model, step, rows), step)
    stream, delta = run_layers(ctx, _embed(ctx, model, step), model.layers, step)
    return _end(ctx, model, stream, delta, step)


def compute_seen(ctx: Context, model: ModelWeights, step: StepInput, see: See) -> FloatArray:
    """Return the result of `compute_states`, calling `see` for each product; pictures are left out."""
    stream, delta = run_seen(ctx, _embed(ctx, model, step), model.layers, step, see)
    return _end(ctx, model, stream, delta, step)


def _run_with_rows(
    ctx: Context, model: ModelWeights, step: StepInput, rows: RowsOver
) -> tuple[FloatArray, FloatArray | None]:
    """Run all layers, and add the rows of pictures after each of the first ones ("deepstack")."""
    stream, hidden = _embed(ctx, model, step), model.table.shape[1]
    delta: FloatArray | None = None
    for number, layer in enumerate(model.first_layers):
        last = number + 1 == len(model.first_layers)
        stop = len(model.layers.layers) if last else number + 1
        stream, delta = run_layers(ctx, stream, layer, step.cut(number, stop))
        if not last:
            stream = stream if delta is None else add(ctx, stream, delta)
            added = rows.values[:, hidden * (number + 1) : hidden * (number + 2)]
            stream = put_rows(ctx, stream, rows.places, added, adds=True)
    return stream, delta


def _end(
    ctx: Context, model: ModelWeights, stream: FloatArray, delta: FloatArray | None, step: StepInput
) -> FloatArray:
    """Return the output rows of what leaves the last layer, after the final norm."""
    rows, residual = take_outputs(ctx, stream, step.batch), None
    if delta is not None:
        residual = take_outputs(ctx, delta, step.batch)
    if model.norm is None:
        return rows if residual is None else add(ctx, rows, residual)
    normed, _ = norm(ctx, rows, model.norm, residual)
    return normed


def _embed(ctx: Context, model: ModelWeights, step: StepInput) -> FloatArray:
    """Return the stream before the first layer."""
    stream = hadamard(ctx, embed(ctx, step.batch.token_ids, model.table), model.table_rotation)
    if step.adapters:
        stream = add_lora_rows(ctx, step.batch.token_ids, stream, step.adapters)
    stream = scale(ctx, stream, model.ends.embedding_scale)
    if step.batch.rows_over is not None:
        rows = step.batch.rows_over
        stream = put_rows(ctx, stream, rows.places, rows.values[:, : stream.shape[1]])
    if model.added is not None:
        stream = add(ctx, stream, embed(ctx, step.batch.place_types(model.added_rows), model.added))
    return stream if model.input_norm is None else norm(ctx, stream, model.input_norm)[0]


def _forward_native(ctx: Context, model: ModelWeights, step: StepInput) -> FloatArray:
    """Run the whole model in one native call if it is a plain one, otherwise the operators."""
    batch, norm = step.batch, model.norm
    is_plain = norm is not None and model.added is None and model.input_norm is None and batch.rows_over is None
    is_plain = is_plain and model.table_rotation is None and model.output is not None and model.output.rotation is None
    if len(batch.output_rows) != batch.tokens or not model.layers.layers or not is_plain:
        return _run_operators(ctx, model, step)
    assert norm is not None
    assert model.output is not None
    logits = empty(ctx, batch.tokens, model.output.out_features)
    ctx.module.forward(
        ctx.native,
        model.layers.payload,
        model.table.type_name,
        model.table.data,
        norm.weight,
        norm.bias,
        norm.eps,
        norm.kind == "layer",
        model.output.payload,
        logits,
        *list_arrays(step),
        model.ends.embedding_scale,
        model.ends.logit_scale,
        model.ends.softcap or NO_SOFTCAP,
    )
    return logits


FORWARD = Choice("forward", _run_operators, _forward_native, _run_operators)
