"""Heads that draft: a layer that guesses from the states of another model, with that model's table and output.

For each position it gets the model's state there and the token that follows; it returns the logits of the token after
that one. Its own result stands for the model's state at positions that the model has not computed yet, so that it can
go on with its own guesses. The layer keeps keys and values like those of a model. Knows no drafts and no answers.

An EAGLE-3 head has a folder of its own. It reads the model's stream before three of its layers, side by side, which a
product turns into one state. Its layer attends to the token's embedding and that state, each normed, in one row of
twice the width; the sum that leaves the layer stands for the state. Its output may have fewer tokens than the model;
`d2t` maps them to those of the model. Names and meanings are those of vLLM's `llama_eagle3.py`, which numbers the three
layers by their inputs; `eagle_config` numbers them by their outputs, as SGLang does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxr.cache.shapes import LayerCache
from mlxr.core.errors import ModelError
from mlxr.core.frozen import frozen
from mlxr.kernels.arrays import join_columns, take_outputs
from mlxr.kernels.elementwise import hadamard, scale
from mlxr.kernels.embed import embed
from mlxr.kernels.forward import ModelWeights, project
from mlxr.kernels.layers import NormWeight, StepInput, prepare_layers, run_layers
from mlxr.kernels.layers.operators import (
    Activate,
    Attend,
    Heads,
    MatMul,
    Norm,
    Operator,
    RopeAndWriteKV,
    count_weight_bytes,
    list_weights,
)
from mlxr.kernels.layers.reference import Registers, norm, run_layer, take
from mlxr.kernels.linear import LinearWeight, compare_products, linear, prepare
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.sources import pick_rows
from mlxr.kernels.tensor import FloatArray, TensorSource, read_vector
from mlxr.models.components import Attention, FeedForward, Norms, Weights
from mlxr.models.components.weights import Shape
from mlxr.models.decoder import Decoder, Pools
from mlxr.models.draft_layer import HEAD_NORM, OUTPUT, PRODUCT, STATE_NORM, TABLE, TOKEN_NORM, DraftLayer
from mlxr.models.families import llama, read_folder, read_model
from mlxr.models.fields import Fields
from mlxr.models.folders.config import Statement
from mlxr.models.folders.tensors import order_rows
from mlxr.models.model import Model
from mlxr.models.rotations import ROPE_FACTORS, Rotations, read_rope_factors


@frozen
class HeadShape:
    """Describe a head to the engine, as a model describes itself."""

    cache_layers: tuple[LayerCache, ...]
    heads: int
    vocab_size: int
    context_length: int
    is_causal: bool = True


class DraftHead:
    """The layer of the model's own file that drafts, ready to run.

    It uses the table, the final norm and the output of `target`, unless it has its own; `weight_bytes` are those of its
    own weights. `taps` is None: its states are those after the target's final norm. Raises ModelError for tensors of
    another size.
    """

    taps: tuple[int, ...] | None = None

    def __init__(self, target: Decoder, layer: DraftLayer) -> None:
        ctx, model = target.ctx, layer.model
        tensors, shared, own_layer = layer.tensors, target.weights, layer.layer
        self.ctx = ctx
        self.config = HeadShape(model.cache_layers, model.heads, model.vocab_size, model.context_length)
        self.read_share = 2 / (1 + len(target.config.layers))  # of the time that the model takes to read as many tokens
        self._rotations = Rotations([own_layer], model.context_length)
        weights = Weights(ctx, tensors, rotated=model.rotated)
        around = weights.of_model(Norms(own_layer.norms.eps))
        self._product = prepare(ctx, [tensors[PRODUCT]])
        self._token_norm, self._state_norm = (around.norm(name) for name in (TOKEN_NORM, STATE_NORM))
        layers = prepare_layers(ctx, [own_layer.load(weights, 0, model.hidden)])
        weights.check_turned()
        assert shared.norm is not None, "only decoders have layers that draft"
        own_output: LinearWeight | None = prepare(ctx, [tensors[OUTPUT]]) if OUTPUT in tensors else None
        self._norm = around.norm(HEAD_NORM) if f"{HEAD_NORM}.weight" in tensors else shared.norm
        self._own_output = own_output
        self._weights = ModelWeights(
            tensors.get(TABLE, shared.table),
            layers,
            self._norm,
            own_output or shared.output,
            shared.ends,
            table_rotation=None if TABLE in tensors else shared.table_rotation,
        )
        own = sum(map(count_weight_bytes, layers.layers[0].program)) + self._product.nbytes
        own += self._token_norm.nbytes + self._state_norm.nbytes
        self.weight_bytes = own + (0 if own_output is None else own_output.nbytes)

    def linear_weights(self) -> list[LinearWeight]:
        """Return every weight of its own that activations are multiplied by."""
        program = self._weights.layers.layers[0].program
        inner = [weight for operator in program for weight in list_weights(operator)]
        return [self._product, *inner, *([] if self._own_output is None else [self._own_output])]

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
        """Return logits (R, vocabulary) after the output rows of the batch, and what stands for these rows' states.

        `states` (T, hidden) are those of the positions before the batch's tokens. The keys and values go into the
        arena. Raises as a model's `forward` does.
        """
        ctx, weights = self.ctx, self._weights
        tables = self._rotations.cover(batch.longest_context)
        rows = hadamard(ctx, embed(ctx, batch.token_ids, weights.table), weights.table_rotation)
        tokens = scale(ctx, rows, weights.ends.embedding_scale)
        normed_tokens, _ = norm(ctx, tokens, self._token_norm)
        normed_states, _ = norm(ctx, states, self._state_norm)
        stream = linear(ctx, join_columns(ctx, normed_tokens, normed_states), self._product)
        step = StepInput(batch, tables, arena.k_pools, arena.v_pools, arena.states)
        stream, delta = run_layers(ctx, stream, weights.layers, step)
        residual = None if delta is None else take_outputs(ctx, delta, batch)
        made, _ = norm(ctx, take_outputs(ctx, stream, batch), self._norm, residual)
        return project(ctx, weights, made), made

    def name_tokens(self, numbers: list[int]) -> list[int]:
        """Return the token ids of columns of the logits."""
        return numbers


CLASSES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
_PLAIN = llama.FAMILIES[0].folders[0]  # Llama: the head's layer differs in its first product only
_TAPS = "eagle_aux_hidden_state_layer_ids"
_LAYER = ("midlayer.", "layers.0.", "model.layers.0.")  # the layer's name in folders
_MAP, _KNOWN, _FUSE, _FUSE_NORM = "d2t", "t2d", "fc.weight", "input_norm.weight"
_TABLE, _OUTPUT, _NORM = "embed_tokens.weight", "lm_head.weight", "norm.weight"


def is_eagle(config: Mapping[str, object]) -> bool:
    """Return True for the `config.json` of an EAGLE-3 head."""
    classes = config.get("architectures")
    return isinstance(classes, list) and len(classes) == 1 and classes[0] in CLASSES


def read_eagle_config(config: Mapping[str, object]) -> Model:
    """Return the sizes of the head's layer, as a Llama of one layer. Raises ModelError as `read_folder` does."""
    made = read_model(_read_plain(config))
    attention, block = _take_blocks(made)
    if len(made.layers) != 1 or attention.qkv_bias or block.bias:
        raise ModelError("an EAGLE-3 head of more than one layer, or with biases, is not supported")
    return made


def _take_blocks(own: Model) -> tuple[Attention, FeedForward]:
    """Return the blocks of the head's layer."""
    attention, block = own.layers[0].mixer, own.layers[0].feed_forward
    assert isinstance(attention, Attention)
    assert isinstance(block, FeedForward)
    return attention, block


def _read_plain(config: Mapping[str, object]) -> Statement:
    """Return the metadata that the folder of a head amounts to."""
    return read_folder({**config, "architectures": [_PLAIN.hf_class], "model_type": _PLAIN.model_type})


def find_taps(config: Mapping[str, object], layers: int) -> tuple[int, ...]:
    """Return the layers before which the head reads the stream of a model with `layers` layers; raises ModelError if
    they do not exist."""
    fields = Fields(config)
    own, nested = fields.get(_TAPS), fields.get("eagle_config")
    if own is None and isinstance(nested, dict) and isinstance(nested.get(_TAPS), list):
        own = [number + 1 if isinstance(number, int) else None for number in nested[_TAPS]]
    if own is None:
        own = [2, layers // 2, layers - 3]
    are_numbers = isinstance(own, list) and all(type(tap) is int and 0 <= tap <= layers for tap in own)
    if not isinstance(own, list) or not are_numbers or not own or own != sorted(own):
        raise ModelError(f"{_TAPS} is {own!r:.80}, expected numbers of the model's {layers} layers in rising order")
    return tuple(own)


class EagleHead:
    """An EAGLE-3 head of a folder's `config` and `tensors`, ready to run for `target`.

    Without a table or an output of its own it uses the target's. Raises ModelError, naming the tensor or the key, for a
    head that does not fit.
    """

    def __init__(self, target: Decoder, config: Mapping[str, object], tensors: Mapping[str, TensorSource]) -> None:
        self.ctx, shared = target.ctx, target.weights
        own = read_eagle_config(config)
        first = target.config.layers[0]
        if first.inputs is not None or first.streams is not None:
            raise ModelError("an EAGLE-3 head cannot read a model whose layers have inputs or streams of their own")
        self.taps: tuple[int, ...] | None = find_taps(config, len(target.config.layers))
        named = {_rename(name): tensor for name, tensor in tensors.items()}
        _check(named, config, own, target.config, len(self.taps))
        vocabulary = target.config.vocab_size
        self.config = HeadShape(own.cache_layers, own.heads, vocabulary, own.context_length)
        self.read_share = 2 / (1 + len(target.config.layers))
        vectors = _read_plain(config).list_vectors()
        factors = read_rope_factors(vectors, ROPE_FACTORS) if ROPE_FACTORS in vectors else None
        self._rotations = Rotations(own.layers, own.context_length, factors)
        self._norms_first = bool(config.get("norm_before_residual", False))
        self._fuse = prepare(self.ctx, [named[_FUSE]])
        self._fuse_norm = _read_norm(named, _FUSE_NORM, own) if _FUSE_NORM in named else None
        self._token_norm = _read_norm(named, "input_layernorm.weight", own)
        self._state_norm = _read_norm(named, "hidden_norm.weight", own)
        self._norm = _read_norm(named, _NORM, own)
        self._table = named.get(_TABLE, shared.table)
        self._table_rotation = None if _TABLE in named else shared.table_rotation
        output = prepare(self.ctx, [named[_OUTPUT]]) if _OUTPUT in named else shared.output
        assert output is not None, "only decoders have heads"
        self._output = output
        self._tokens = _read_map(named[_MAP], vocabulary) if _MAP in named else None
        self._operators = _make_operators(self.ctx, named, own)
        norms = (self._fuse_norm, self._token_norm, self._state_norm, self._norm)
        self.weight_bytes = sum(map(count_weight_bytes, self._operators)) + self._fuse.nbytes
        self.weight_bytes += sum(one.nbytes for one in norms if one is not None)
        self.weight_bytes += self._output.nbytes if _OUTPUT in named else 0
        self.weight_bytes += self._table.nbytes if _TABLE in named else 0

    def fuse(self, states: FloatArray) -> FloatArray:
        """Make one state (T, hidden) of the target's three, side by side."""
        if self._fuse_norm is not None:
            states, _ = norm(self.ctx, states, self._fuse_norm)
        return linear(self.ctx, states, self._fuse)

    def forward(self, batch: RaggedBatch, states: FloatArray, arena: Pools) -> tuple[FloatArray, FloatArray]:
        """Return logits (R, own vocabulary) after the output rows, and what stands for the states of their positions.

        `states` (T, hidden) are fused ones, or the second result of an earlier call. Raises as a model's `forward`
        does.
        """
        ctx, tables = self.ctx, self._rotations.cover(batch.longest_context)
        rows = hadamard(ctx, embed(ctx, batch.token_ids, self._table), self._table_rotation)
        tokens, _ = norm(ctx, rows, self._token_norm)
        normed, _ = norm(ctx, states, self._state_norm)
        stream = normed if self._norms_first else states
        registers: Registers = {"stream": stream, "normed": join_columns(ctx, tokens, normed), "delta": None}
        step = StepInput(batch, tables, arena.k_pools, arena.v_pools, arena.states)
        run_layer(ctx, registers, self._operators, step, 0)
        delta = take_outputs(ctx, take(registers, "delta"), batch)
        made, summed = norm(ctx, take_outputs(ctx, take(registers, "stream"), batch), self._norm, delta)
        return linear(ctx, hadamard(ctx, made, self._output.rotation), self._output), summed

    def name_tokens(self, numbers: list[int]) -> list[int]:
        """Return the target's token ids of columns of the logits."""
        return numbers if self._tokens is None else [self._tokens[number] for number in numbers]


def _rename(name: str) -> str:
    """Return the name of a tensor without the layer's prefix, or the module's."""
    for prefix in (*_LAYER, "model."):
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def _check(
    tensors: Mapping[str, TensorSource],
    config: Mapping[str, object],
    own: Model,
    target: Model,
    taps: int,
) -> None:
    attention, block = _take_blocks(own)
    hidden, queries, keys, features = own.hidden, attention.queries, attention.keys, block.features
    columns = Fields(config).integer("draft_vocab_size", 1, target.vocab_size, default=target.vocab_size)
    needed: dict[str, Shape] = {
        _FUSE: (hidden, taps * target.hidden),
        _NORM: (hidden,),
        "input_layernorm.weight": (hidden,),
        "hidden_norm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, 2 * hidden),
        "self_attn.k_proj.weight": (keys, 2 * hidden),
        "self_attn.v_proj.weight": (keys, 2 * hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "mlp.gate_proj.weight": (features, hidden),
        "mlp.up_proj.weight": (features, hidden),
        "mlp.down_proj.weight": (hidden, features),
    }
    optional: dict[str, Shape] = {
        _FUSE_NORM: (taps * target.hidden,),
        _TABLE: (target.vocab_size, hidden),
        _OUTPUT: (columns, hidden),
        _MAP: (columns,),
        _KNOWN: (target.vocab_size,),
    }
    for name, what in ((_TABLE, "table"), (_OUTPUT, "output")):
        if name not in tensors and (hidden != target.hidden or (name == _OUTPUT and columns != target.vocab_size)):
            raise ModelError(f"tensor {name} is missing, as the model's {what} does not fit this EAGLE-3 head")
    if columns != target.vocab_size and _MAP not in tensors:
        raise ModelError(f"tensor {_MAP} is missing, which names the {columns} tokens of this EAGLE-3 head")
    for name in needed:
        if name not in tensors:
            raise ModelError(f"tensor {name} is missing, which an EAGLE-3 head needs")
    known = {**needed, **optional}
    for name, tensor in tensors.items():
        if name not in known:
            raise ModelError(f"tensor {name} has no place in an EAGLE-3 head")
        if tensor.shape != known[name]:
            raise ModelError(
                f"tensor {name} has shape {tensor.shape}, expected {known[name]} in an EAGLE-3 head for a model of "
                f"hidden {target.hidden} and {target.vocab_size} tokens"
            )


def _read_norm(tensors: Mapping[str, TensorSource], name: str, own: Model) -> NormWeight:
    return NormWeight(read_vector(tensors[name]), own.layers[0].norms.eps)


def _read_map(tensor: TensorSource, vocabulary: int) -> list[int]:
    """Return the token ids of the head's columns; the tensor has for each column its distance to the id."""
    if tensor.type_name != "i64":
        raise ModelError(f"tensor {_MAP} is {tensor.type_name}, expected i64")
    steps = memoryview(tensor.data.tobytes()).cast("q").tolist()
    tokens = [place + step for place, step in enumerate(steps)]
    if not all(0 <= token < vocabulary for token in tokens):
        raise ModelError(f"tensor {_MAP} leads beyond the {vocabulary} tokens of the model")
    return tokens


def _order_rows(name: str, tensor: TensorSource, own: Model) -> TensorSource:
    """Return a projection with its rows as rotations need them."""
    order = order_rows(f"blk.0.attn_{name}.weight", own)
    return tensor if order is None else pick_rows(tensor, order)


def _make_operators(ctx: Any, tensors: Mapping[str, TensorSource], own: Model) -> tuple[Operator, ...]:
    """List the operators of a layer, whose first product reads the joined row instead of a norm of the stream."""
    q, k, v, output = (f"self_attn.{name}_proj.weight" for name in "qkvo")
    gate, up, down = (f"mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
    projections = [_order_rows("q", tensors[q], own), _order_rows("k", tensors[k], own), tensors[v]]
    attention, block = _take_blocks(own)
    heads = Heads(attention.heads, attention.kv_heads, attention.head_dim, attention.scale)
    return (
        MatMul(
            prepare(ctx, projections),
            "normed",
            "x",
        ),
        RopeAndWriteKV(heads),
        Attend(heads),
        MatMul(prepare(ctx, [tensors[output]]), "x", "delta"),
        Norm(_read_norm(tensors, "post_attention_layernorm.weight", own), "stream", "normed"),
        MatMul(prepare(ctx, [tensors[gate], tensors[up]]), "normed", "x"),
        Activate(block.activation, block.features, is_gated=True),
        MatMul(prepare(ctx, [tensors[down]]), "x", "delta"),
    )
