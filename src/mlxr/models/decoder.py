"""The decoder: token ids and a paged cache in, logits out. One for all architectures.

Written against the operators only; its `Model` describes it, and its tensors have the weights. It schedules nothing:
the caller's batch says which tokens of which sequences run. `Routing` tells how evenly tokens were sent to experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Protocol

from mlxr.cache.shapes import form_groups
from mlxr.core.frozen import frozen
from mlxr.core.memory import read_available_bytes
from mlxr.kernels.arrays import fetch_rows, place_rows
from mlxr.kernels.context import Context
from mlxr.kernels.elementwise import sum_rows
from mlxr.kernels.forward import (
    Ends,
    ModelWeights,
    compute_seen,
    compute_states,
    compute_tapped,
    forward,
    make_model,
    project,
)
from mlxr.kernels.layers import Layers, StepInput, prepare_layers
from mlxr.kernels.layers.operators import (
    Attend,
    MixExperts,
    Norm,
    Operator,
    count_step_bytes,
    count_token_macs,
    count_weight_bytes,
    list_weights,
)
from mlxr.kernels.layers.operators import Layer as LoadedLayer
from mlxr.kernels.layers.reference import See
from mlxr.kernels.linear import LinearWeight, compare_products, move_weight, prepare
from mlxr.kernels.moe import ExpertsUse, read_use
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.rope import RopeTable
from mlxr.kernels.tensor import FloatArray, PoolArray, TensorSource, read_vector
from mlxr.models.adapter import OUTPUT, TABLE, Adapter, group_batch, group_rows
from mlxr.models.components import Weights
from mlxr.models.components.layer import TABLE as INPUTS_TABLE
from mlxr.models.components.weights import plan_experts
from mlxr.models.footprint import AttentionWork, ExpertsWork, StepWork, list_expert_bytes
from mlxr.models.model import Model
from mlxr.models.rotations import ROPE_FACTORS, Rotations, read_rope_factors
from mlxr.models.shares import take_share
from mlxr.models.weights import arrange_tensors, check_tensors, list_matrices, refuse_parted, split_joined


@frozen
class Routing:
    """Counts of all layers with experts together, since the model was loaded.

    `rows` are pairs of a token and an expert, in `layer_steps` calls of layers. `experts` had rows in these, counted in
    each call, and `file_reads` of them were read from the file. `evenness` is the entropy of a layer's rows over its
    experts, divided by that of even rows: 1 if all have as many and 0 if one has all; `busiest` the rows of its busiest
    expert, divided by the mean of its experts. Both are means over the layers that had rows, 0 without any.
    """

    rows: int
    layer_steps: int
    experts: int
    file_reads: int
    evenness: float
    busiest: float


def sum_up(uses: Sequence[ExpertsUse | None]) -> Routing | None:
    """Return the counts of all layers as one; None if there are none."""
    counted = [use for use in uses if use is not None]
    if not counted:
        return None
    filled = [use.rows for use in counted if any(use.rows)]
    layers = max(len(filled), 1)
    return Routing(
        rows=sum(map(sum, filled)),
        layer_steps=sum(use.steps for use in counted),
        experts=sum(use.groups for use in counted),
        file_reads=sum(use.reads for use in counted),
        evenness=sum(map(measure_evenness, filled)) / layers,
        busiest=sum(max(rows) * len(rows) / sum(rows) for rows in filled) / layers,
    )


def measure_evenness(rows: Sequence[int]) -> float:
    """Return the entropy of these counts, some of which are not 0, as a part of the largest possible one."""
    total = sum(rows)
    entropy = -sum(count / total * math.log(count / total) for count in rows if count)
    return entropy / math.log(len(rows)) if len(rows) > 1 else 1.0


FLOAT_TYPES = frozenset({"f32", "f16", "bf16"})


class Pools(Protocol):
    """The parts of the cache's arena that the decoder reads: one K and one V pool for each layer, or its states."""

    @property
    def k_pools(self) -> Sequence[PoolArray]:
        """The pools of keys, one per layer."""
        ...

    @property
    def v_pools(self) -> Sequence[PoolArray]:
        """The pools of values, one per layer."""
        ...

    @property
    def states(self) -> Sequence[PoolArray | None]:
        """The pool of each layer's states, (slots, floats); None for a layer that is not recurrent."""
        ...


class Decoder:
    """A model ready to run.

    `tensors` are by canonical name; their files must stay open, as rows of tables of embeddings are read when needed.
    Loading goes layer by layer and releases each source, so at most one layer is in memory twice; `progress` is called
    with (parts done, parts in all). Raises ModelError for tensors that do not fit the configuration.

    With `expert_bytes` the experts of all layers take so much memory at most, and the others are read from their file
    as they are used. Without it, that is so if free memory has no room for the model. It changes no bit.

    On a context of several ranks it is this rank's share of the model, and so is `config`.

    `weight_bytes` is the memory that weights take, tables of embeddings as stored; `step_bytes` the bytes that a step
    of one token reads.
    """

    def __init__(
        self,
        ctx: Context,
        config: Model,
        tensors: Mapping[str, TensorSource],
        progress: Callable[[int, int], None] | None = None,
        expert_bytes: int | None = None,
    ) -> None:
        stored = tensors.keys()
        tensors = arrange_tensors(config, tensors)
        check_tensors(config, tensors)
        whole, tensors = tensors, split_joined(config, tensors)
        refuse_parted(config, whole, tensors)
        share = take_share(ctx, config, tensors)
        config, tensors = share.model, share.tensors
        self.ctx = ctx
        self.config = config
        ctx.choose_activations(tensor.type_name for tensor in list_matrices(tensors))
        layers, sizes = config.layers, list_expert_bytes(config, tensors)
        total_bytes = sum(tensor.nbytes for name, tensor in tensors.items() if name != INPUTS_TABLE)
        budget = plan_experts(sizes, total_bytes, ctx.device, expert_bytes, read_available_bytes())
        weights = Weights(ctx, tensors, budget, share.summed, config.rotated)
        factors = read_rope_factors(tensors, ROPE_FACTORS) if ROPE_FACTORS in tensors else None
        self._parts: dict[tuple[int, ...], list[Layers]] = {}  # of the layers, for callers that look between them
        self._rotations = Rotations(layers, config.context_length, factors)
        places = form_groups(config.cache_layers).places[: len(layers)]
        loaded: list[LoadedLayer] = []
        for index, (layer, place) in enumerate(zip(layers, places, strict=True)):
            rope, group = self._rotations.find(layer), 0 if place is None else place.group
            loaded.append(layer.load(weights, index, config.hidden, rope=rope, group=group))
            if progress is not None:
                progress(index + 1, len(layers) + 1)
        table = tensors["token_embd.weight"]
        is_tied = config.is_tied and not share.columns
        bias = [read_vector(tensors["output.bias"])] if config.has_output_bias else None
        output = None
        turned = config.rotated
        table_rotation = turned.make(TABLE, config.hidden) if turned is not None and turned.has_table else None
        if config.has_output:
            rotation = table_rotation if is_tied else weights.turn([OUTPUT])
            output = prepare(ctx, [table if is_tied else tensors[OUTPUT]], bias, (OUTPUT,))
            output = replace(output, rotation=rotation)
        weights.check_turned(stored - whole.keys())  # those of a layer that drafts
        ends = weights.of_model(layers[-1].norms)
        if config.loops > 1:
            once = list(loaded)
            if config.norms_loops and config.output_norm is not None:
                between = Norm(ends.norm(config.output_norm), "stream", "stream")
                once[-1] = replace(once[-1], operators=(*once[-1].operators, between))
            loaded = once * (config.loops - 1) + loaded
        added, input_norm = (None, None) if config.embeddings is None else config.embeddings.load(ends)
        self._dense = [dense.load(ends) for dense in config.dense]
        self._classifier = [dense.load(ends) for dense in config.classifier]
        self._weights = make_model(
            ModelWeights(
                table,
                prepare_layers(ctx, loaded),
                None if config.output_norm is None else ends.norm(config.output_norm),
                output,
                Ends(config.embedding_scale, config.logit_scale, config.final_softcap),
                share.columns,
                added,
                max(1, 0 if config.embeddings is None else config.embeddings.positions),
                input_norm,
                None if table_rotation is None else table_rotation.invert(),
                self._part_first(loaded),
            )
        )
        if progress is not None:
            progress(len(layers) + 1, len(layers) + 1)

    def _part_first(self, loaded: Sequence[LoadedLayer]) -> tuple[Layers, ...]:
        """Return the first layers one by one, behind which pictures add something, and the rest."""
        count = self.config.picture_layers
        if not count:
            return ()
        return tuple(prepare_layers(self.ctx, part) for part in (*([one] for one in loaded[:count]), loaded[count:]))

    @property
    def weights(self) -> ModelWeights:
        """The prepared weights, for a head that drafts with the same table and output."""
        return self._weights

    @property
    def step_bytes(self) -> int:
        """Bytes of weights that a step of one token reads, without its rows of tables of embeddings."""
        return self.work.count_weight_bytes(1)

    @property
    def weight_bytes(self) -> int:
        """Size of all weights in bytes."""
        once = [one for layer in self._weights.layers.layers[-len(self.config.layers) :] for one in layer.program]
        return sum(map(count_weight_bytes, once)) + self._ends_bytes + self._weights.table.nbytes

    @property
    def expert_memory(self) -> tuple[int, int]:
        """Bytes of the experts that are in memory at a time, and of all."""
        mixes = self._mixes
        return sum(mix.experts.held_bytes for mix in mixes), sum(mix.experts.nbytes for mix in mixes)

    def read_routing(self) -> Routing | None:
        """Return the counts of experts so far; None without experts. On a GPU only the computing thread may call it."""
        return sum_up([read_use(self.ctx, mix.experts) for mix in self._mixes])

    @property
    def _mixes(self) -> list[MixExperts]:
        return [operator for operator in self._operators if isinstance(operator, MixExperts)]

    @property
    def _ends_bytes(self) -> int:
        parts = (self._weights.norm, self._weights.input_norm, self._weights.output)
        return sum(part.nbytes for part in parts if part is not None)

    @cached_property
    def work(self) -> StepWork:
        """The bytes that a step reads and its multiply-adds; see StepWork."""
        operators, output = self._operators, self._weights.output
        groups = form_groups(self.config.cache_layers)
        pair_macs = [0] * len(groups.paged)
        experts: dict[tuple[int, int], int] = {}
        for operator in operators:
            if isinstance(operator, MixExperts):
                key = len(operator.experts.up), operator.used
                experts[key] = experts.get(key, 0) + operator.experts.nbytes
            if isinstance(operator, Attend):
                heads = operator.heads
                pair_macs[heads.group] += heads.heads * heads.head_dim + heads.value_columns
        attention = (AttentionWork(macs, shape.window) for macs, shape in zip(pair_macs, groups.paged, strict=True))
        return StepWork(
            sum(map(count_step_bytes, operators)) + self._ends_bytes,
            sum(map(count_token_macs, operators)),
            0 if output is None else output.in_features * output.out_features,
            tuple(attention),
            tuple(ExpertsWork(*key, nbytes) for key, nbytes in experts.items()),
        )

    @cached_property
    def _first_layers(self) -> list[int]:
        """The first layer of each group with pages."""
        groups = form_groups(self.config.cache_layers)
        numbers = [None if place is None else place.group for place in groups.places]
        return [numbers.index(group) for group in range(len(groups.paged))]

    @property
    def _operators(self) -> list[Operator]:
        return [operator for layer in self._weights.layers.layers for operator in layer.program]

    def linear_weights(self) -> list[LinearWeight]:
        """Return every weight that activations are multiplied by, layer by layer, the output's last."""
        inner = [weight for operator in self._operators for weight in list_weights(operator)]
        return inner if self._weights.output is None else [*inner, self._weights.output]

    def compare_products(self, reference: Decoder) -> float:
        """Return the largest error of any weight's products; `reference` is the same model on the reference backend."""
        return max(
            compare_products(self.ctx, weight, reference.ctx, own)
            for weight, own in zip(self.linear_weights(), reference.linear_weights(), strict=True)
        )

    def move_weights(self, floats: float, quantised: float) -> None:
        """Change each weight of a model on the reference backend by a random part of it, of this standard deviation."""
        for weight in self.linear_weights():
            move_weight(weight, floats if set(weight.variant.split("+")) <= FLOAT_TYPES else quantised)

    def forward(self, batch: RaggedBatch, arena: Pools) -> FloatArray:
        """Run the batch, write its keys and values into the pools, return the logits (R, vocab) of its output rows.

        Raises as `forward_hidden` does.
        """
        tables = self._turn(batch)
        logits: FloatArray = self.ctx.run_step(
            lambda step: forward(self.ctx, self._weights, _join(step, tables, arena)),
            batch,
            [arena.k_pools[layer] for layer in self._first_layers],
            (id(self), tables[0].positions),
            next((states for states in arena.states if states is not None), None),
            # rows of learned positions are looked up on the host, and biases by the distance are gathered
            records=not (self.config.has_rows or self.config.has_biases),
        )
        return logits

    def _turn(self, batch: RaggedBatch) -> Sequence[RopeTable]:
        """Return the rotation tables for a batch: of all positions, or of its tokens if they stand on three axes."""
        tables = self._rotations.cover(batch.longest_context)
        return self._rotations.gather(batch.axes) if batch.axes.shape[1] else tables

    def forward_hidden(self, batch: RaggedBatch, arena: Pools) -> FloatArray:
        """Do `forward` without the output weights: return states (R, hidden) of the output rows, after the final norm.

        They are on the host. Raises ValueError for tokens outside the vocabulary or slots and pages outside the pools,
        ModelError for a context beyond `context_length`.
        """
        tables = self._turn(batch)
        states = compute_states(self.ctx, self._weights, _join(batch, tables, arena))
        return fetch_rows(self.ctx, states)

    @property
    def sums_states(self) -> bool:
        """True on a GPU, from which `forward_sums` brings one row of a text to the host, not all of them."""
        return self.ctx.gpu is not None

    def forward_sums(self, batch: RaggedBatch, arena: Pools, counts: Sequence[int]) -> FloatArray:
        """Do `forward_hidden`; return only sums of the output rows, (parts, hidden): `counts` rows for each part."""
        states = compute_states(self.ctx, self._weights, _join(batch, self._turn(batch), arena))
        return fetch_rows(self.ctx, sum_rows(self.ctx, states, counts))

    def forward_seen(self, batch: RaggedBatch, arena: Pools, see: See) -> FloatArray:
        """Do `forward_hidden`, operator after operator; `see` gets each weight with the rows that it multiplies."""
        states = compute_seen(self.ctx, self._weights, _join(batch, self._turn(batch), arena), see)
        return fetch_rows(self.ctx, states)

    def forward_tapped(self, batch: RaggedBatch, arena: Pools, taps: Sequence[int]) -> tuple[FloatArray, FloatArray]:
        """Do `forward_hidden`; return also the stream of its rows before each of the layers `taps`, (R, taps * hidden).

        A tap may be the number of layers: then it is the output of the last one. The bits of the states are the same.
        """
        ends = [0, *sorted(taps), len(self._weights.layers.layers)]
        parts = self._parts.get(tuple(ends))
        if parts is None:
            layers = self._weights.layers.layers
            pieces = pairwise(ends)
            parts = self._parts[tuple(ends)] = [prepare_layers(self.ctx, layers[a:b]) for a, b in pieces]
        step = _join(batch, self._turn(batch), arena)
        return compute_tapped(self.ctx, self._weights, parts, step)

    def finish(self, vector: FloatArray, *, ranks: bool = False) -> FloatArray:
        """Return the result for the pooled vector (hidden,) of a text: a vector, or with `ranks` logits of labels."""
        parts = self._classifier if ranks else self._dense
        if not parts:
            return vector
        x = place_rows(self.ctx, vector[None])
        for part in parts:
            x = part.run(self.ctx, x)
        made: FloatArray = fetch_rows(self.ctx, x)[0]
        return made

    def project(self, hidden: FloatArray, adapters: Sequence[Adapter | None] = ()) -> FloatArray:
        """Return the logits (R, vocab) of states (R, hidden) from `forward_hidden`; `adapters` has that of each row."""
        rows = group_rows(adapters, range(len(adapters) + 1))
        return project(self.ctx, self._weights, place_rows(self.ctx, hidden), rows)


def _join(batch: RaggedBatch, tables: Sequence[RopeTable], arena: Pools) -> StepInput:
    return StepInput(batch, tables, arena.k_pools, arena.v_pools, arena.states, group_batch(batch))
