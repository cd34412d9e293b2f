"""A head that drafts: a layer that guesses from the states of another model, with the table and output of that.

For each position it gets what the model made of the tokens up to there, and the token that follows; it gives the logits
of the token after that one. Its own result stands for the model's state where the model has not been yet, so that it
can go on with its own guesses. The layer keeps keys and values, as those of a model do. Knows no drafts and no answers.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlxr.cache.shapes import LayerCache
from mlxr.kernels.elementwise import scale
from mlxr.kernels.embed import embed
from mlxr.kernels.forward import ModelWeights, project
from mlxr.kernels.layers import StepInput, prepare_layers, run_layers
from mlxr.kernels.layers.operators import count_weight_bytes, list_weights
from mlxr.kernels.layers.reference import norm
from mlxr.kernels.linear import LinearWeight, linear, prepare
from mlxr.kernels.linear.compare import compare_products
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.rows import join_columns, take_outputs
from mlxr.kernels.tensor import FloatArray
from mlxr.models.components import Norms, Weights
from mlxr.models.decoder import Decoder, Pools
from mlxr.models.draft_layer import HEAD_NORM, OUTPUT, PRODUCT, STATE_NORM, TABLE, TOKEN_NORM, DraftLayer
from mlxr.models.rotations import Rotations


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Describe a head to the engine, as a model describes itself."""

    cache_layers: tuple[LayerCache, ...]
    heads: int
    vocab_size: int
    context_length: int


class DraftHead:
    """The layer that drafts of the model's own file, ready to run.

    It shares the table, the final norm and the output of `target`, but for those that it has of its own; `weight_bytes`
    are those of its own weights. `taps` is None: its states are those after the target's final norm. Raises ModelError
    for tensors of another size.
    """

    taps: tuple[int, ...] | None = None

    def __init__(self, target: Decoder, layer: DraftLayer) -> None:
        ctx, model = target.ctx, layer.model
        tensors, shared, own_layer = layer.tensors, target.weights, layer.layer
        self.ctx = ctx
        self.config = HeadShape(model.cache_layers, model.heads, model.vocab_size, model.context_length)
        self.read_share = 2 / (1 + len(target.config.layers))  # of the time that the model takes to read as many tokens
        self._rotations = Rotations([own_layer], model.context_length)
        weights = Weights(ctx, tensors)
        around = weights.of_model(Norms(own_layer.norms.eps))
        self._product = prepare(ctx, [tensors[PRODUCT]])
        self._token_norm, self._state_norm = (around.norm(name) for name in (TOKEN_NORM, STATE_NORM))
        layers = prepare_layers(ctx, [own_layer.load(weights, 0, model.hidden)])
        self._has_output = OUTPUT in tensors
        own_output: LinearWeight | None = prepare(ctx, [tensors[OUTPUT]]) if OUTPUT in tensors else None
        self._weights = ModelWeights(
            tensors.get(TABLE, shared.table),
            layers,
            around.norm(HEAD_NORM) if f"{HEAD_NORM}.weight" in tensors else shared.norm,
            own_output or shared.output,
            shared.ends,
        )
        own = sum(map(count_weight_bytes, layers.layers[0].program)) + self._product.nbytes
        own += self._token_norm.nbytes + self._state_norm.nbytes
        self.weight_bytes = own + (0 if own_output is None else own_output.nbytes)

    def linear_weights(self) -> list[LinearWeight]:
        """Every weight of its own that activations are multiplied by."""
        program = self._weights.layers.layers[0].program
        inner = [weight for operator in program for weight in list_weights(operator)]
        return [self._product, *inner, *([self._weights.output] if self._has_output else [])]

    def compare_products(self, reference: DraftHead) -> float:
        """Return the largest error of any weight's products; `reference` is the same head on the reference backend."""
        return max(
            compare_products(self.ctx, weight, reference.ctx, own)
            for weight, own in zip(self.linear_weights(), reference.linear_weights(), strict=True)
        )

    def fuse(self, states: FloatArray) -> FloatArray:
        """Return the target's states (T, hidden) as they are, which `forward` reads."""
        return states

    def forward(self, batch: RaggedBatch, states: FloatArray, arena: Pools) -> tuple[FloatArray, FloatArray]:
        """Logits (R, vocabulary) after the output rows of the batch, and what stands for states of their positions.

        `states` (T, hidden) are those of the positions before the batch's tokens. The keys and values go into the
        arena. Raises as a model's `forward` does.
        """
        ctx, weights = self.ctx, self._weights
        tables = self._rotations.cover(batch.longest_context)
        tokens = scale(ctx, embed(ctx, batch.token_ids, weights.table), weights.ends.embedding_scale)
        normed_tokens, _ = norm(ctx, tokens, self._token_norm)
        normed_states, _ = norm(ctx, states, self._state_norm)
        stream = linear(ctx, join_columns(ctx, normed_tokens, normed_states), self._product)
        step = StepInput(batch, tables, arena.k_pools, arena.v_pools, arena.states)
        stream, delta = run_layers(ctx, stream, weights.layers, step)
        residual = None if delta is None else take_outputs(ctx, delta, batch)
        made, _ = norm(ctx, take_outputs(ctx, stream, batch), weights.norm, residual)
        return project(ctx, weights, made), made

    def name_tokens(self, numbers: list[int]) -> list[int]:
        """Return the token ids of columns of the logits."""
        return numbers
