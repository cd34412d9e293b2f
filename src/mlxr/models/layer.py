"""One transformer layer: which tensors it has, and its weights out of these, prepared for the operators.

Knows names and shapes; how a layer runs is the matter of `mlxr.kernels.layers`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from mlxr.core.errors import ModelError
from mlxr.kernels.context import Context
from mlxr.kernels.layers import (
    AttentionBlock,
    BothBlock,
    FeedForwardBlock,
    InputBlock,
    InputsBlock,
    Layer,
    MixerBlock,
    MixtureBlock,
    NormWeight,
    RecurrentBlock,
    make_attention,
    make_beside,
    make_both,
    make_feed_forward,
    make_input,
    make_inputs,
    make_mixture,
)
from mlxr.kernels.linear import LinearWeight, leave, prepare
from mlxr.kernels.moe import make_experts, make_router
from mlxr.kernels.sources import as_float32, take_halves
from mlxr.kernels.split_heads import HeadNorms
from mlxr.kernels.tensor import FloatArray, TensorSource, read_numbers, read_vector
from mlxr.models.recurrent import is_convolution, list_recurrent, read_recurrent
from mlxr.models.residency import ExpertBudget
from mlxr.models.specs import (
    Attention,
    Beside,
    Both,
    FeedForward,
    LayerInputs,
    LayerSpec,
    Mixture,
    Norms,
    Recurrence,
)

Shape = tuple[int, ...]

# Names of the norms of a block: of its input, and of what it adds to the stream.
_MIXER_NORMS = "attn_norm", "post_attention_norm"
_SINKS = "attn_sinks.weight"
_OUTPUT_SCALE = "layer_output_scale.weight"
_ROUTER, _CHOICE_BIAS, _EXPERT_SCALES = "ffn_gate_inp", "exp_probs_b.bias", "ffn_down_exps.scale"
_ROUTER_SCALE = "ffn_gate_inp.scale"
_DENSE_POST_NORM, _EXPERTS_NORM, _EXPERTS_POST_NORM = "post_ffw_norm_1", "pre_ffw_norm_2", "post_ffw_norm_2"
ATTENTION_GATE = "attn_q.gate"  # the rows of a gate among those of the queries
_SHARED, _SHARED_GATE = "_shexp", "ffn_gate_inp_shexp.weight"
_GATE, _PROJECTION, _INPUT_NORM = "inp_gate", "proj", "post_norm"  # of the input of a layer
TABLE, _OF_STREAM, _INPUTS_NORM = "per_layer_token_embd.weight", "per_layer_model_proj", "per_layer_proj_norm"  # of all
PROJECTIONS = {"qkv": ("attn_q", "attn_k", "attn_v"), "qk": ("attn_q", "attn_k"), "q": ("attn_q",)}


def list_tensors(spec: LayerSpec, hidden: int) -> Iterator[tuple[str, Shape]]:
    """Name, without the layer's prefix, and shape of each tensor of a layer."""
    for name in (*_name_norms(spec, _MIXER_NORMS), *_name_norms(spec, _name_feed_forward(spec))):
        if name is not None:
            yield f"{name}.weight", (hidden,)
            if spec.norms.bias:
                yield f"{name}.bias", (hidden,)
    if spec.attention is not None:
        yield from _list_attention(spec.attention, hidden)
    if spec.recurrence is not None:
        yield from list_recurrent(spec.recurrence, hidden)
    block = spec.feed_forward
    if isinstance(block, Both):
        yield _ROUTER_SCALE, (hidden,)
        for name in (_DENSE_POST_NORM, _EXPERTS_NORM, _EXPERTS_POST_NORM):
            yield f"{name}.weight", (hidden,)
        yield from _list_feed_forward(block.dense, hidden)
        yield from _list_mixture(block.mixture, hidden)
    elif isinstance(block, Mixture):
        yield from _list_mixture(block, hidden)
    elif block is not None:
        yield from _list_feed_forward(block, hidden)
    if spec.scales_output:
        yield _OUTPUT_SCALE, (1,)
    if spec.inputs is not None:
        yield f"{_GATE}.weight", (spec.inputs.features, hidden)
        yield f"{_PROJECTION}.weight", (hidden, spec.inputs.features)
        yield f"{_INPUT_NORM}.weight", (hidden,)


def _list_attention(attention: Attention, hidden: int) -> Iterator[tuple[str, Shape]]:
    queries, keys = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    for name in PROJECTIONS[attention.projected]:
        rows = keys if name != "attn_q" else 2 * queries if attention.gated else queries
        yield from _list_product(name, rows, hidden, attention.qkv_bias)
    yield from _list_product("attn_output", hidden, queries, attention.output_bias)
    if attention.sinks:
        yield _SINKS, (attention.heads,)
    if attention.head_norms is not None:
        for name, length in (("attn_q_norm", queries), ("attn_k_norm", keys)):
            if name == "attn_q_norm" or attention.projected != "q":
                yield f"{name}.weight", _shape_head_norm(attention, length)


def _shape_head_norm(attention: Attention, columns: int) -> Shape:
    """Shape of the norm of so many columns of heads."""
    dim = attention.head_dim
    return {"each": (dim,), "joint": (columns,), "layer": (columns // dim, dim)}[attention.head_norms or "each"]


def list_matrices(tensors: Mapping[str, TensorSource]) -> Iterator[TensorSource]:
    """The matrices that may choose how results travel: all but routers, norms and convolutions, which are f32."""
    for name, tensor in tensors.items():
        is_wide = len(tensor.shape) >= 2 and name.endswith(".weight")
        if is_wide and _ROUTER not in name and "_norm." not in name and not is_convolution(name):
            yield tensor


def _list_feed_forward(block: FeedForward, hidden: int, suffix: str = "") -> Iterator[tuple[str, Shape]]:
    for name in block.projections:
        yield from _list_product(name + suffix, block.features, hidden, block.bias)
    yield from _list_product(f"ffn_down{suffix}", hidden, block.features, block.bias)


def _list_mixture(mixture: Mixture, hidden: int) -> Iterator[tuple[str, Shape]]:
    experts = mixture.experts
    yield from _list_product(_ROUTER, experts, hidden, mixture.router_bias)
    if mixture.choice_bias:
        yield _CHOICE_BIAS, (experts,)
    if mixture.expert_scales:
        yield _EXPERT_SCALES, (experts,)
    for name, (rows, columns) in name_experts(mixture, hidden).items():
        yield f"{name}_exps.weight", (experts, rows, columns)
        if mixture.bias:
            yield f"{name}_exps.bias", (experts, rows)
    if mixture.shared_features:
        yield from _list_feed_forward(_describe_shared(mixture), hidden, _SHARED)
    if mixture.shared_gate:
        yield _SHARED_GATE, (hidden,)


def name_experts(mixture: Mixture, hidden: int) -> dict[str, tuple[int, int]]:
    """The products of one expert, by the names that a block without experts has, and their shapes."""
    return dict.fromkeys(mixture.projections, (mixture.features, hidden)) | {"ffn_down": (hidden, mixture.features)}


def _describe_shared(mixture: Mixture) -> FeedForward:
    return FeedForward(mixture.shared_features, mixture.activation, gated=mixture.gated)


def list_inputs_tensors(spec: LayerInputs, layers: int, hidden: int, vocabulary: int) -> Iterator[tuple[str, Shape]]:
    """Name and shape of each tensor that makes the inputs of all layers."""
    yield TABLE, (vocabulary, layers * spec.features)
    yield f"{_OF_STREAM}.weight", (layers * spec.features, hidden)
    yield f"{_INPUTS_NORM}.weight", (spec.features,)


def _list_product(name: str, rows: int, columns: int, bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)


def _name_feed_forward(spec: LayerSpec) -> tuple[str, str]:
    return spec.norms.feed_forward, "post_ffw_norm"


def _name_norms(spec: LayerSpec, names: tuple[str, str]) -> tuple[str | None, str | None]:
    """The norms that a block has of `names`; of blocks side by side the first one's norm is that of both."""
    before, after = names
    is_mixer = names == _MIXER_NORMS
    if (spec.mixer if is_mixer else spec.feed_forward) is None:
        return None, None
    has_before = spec.norms.places != "after" and not (spec.is_parallel and not is_mixer)
    return before if has_before else None, None if spec.norms.places == "before" else after


class LayerReader:
    """Reads the weights of the layers of one model, one after another.

    With an `expert_budget` some experts of each layer are in memory at a time, else all of them. What the weights named
    in `summed` make are parts of sums over all ranks.
    """

    def __init__(
        self,
        ctx: Context,
        tensors: Mapping[str, TensorSource],
        expert_budget: ExpertBudget | None = None,
        summed: Collection[str] = (),
    ) -> None:
        self._ctx, self._tensors, self._expert_budget = ctx, tensors, expert_budget
        self._summed = summed

    def read(self, spec: LayerSpec, index: int, *, rope: int, group: int) -> Layer:
        """Prepare the weights of layer `index`; the sources are released one after another.

        `rope` and `group` are the numbers of its rotation table and of its group in the cache.
        """
        prefix = f"blk.{index}."
        block = self._read_mixer(prefix, spec, rope, group)
        other = self._read_second(prefix, spec, index)
        scale = self._read_scale(prefix + _OUTPUT_SCALE) if spec.scales_output else 1.0
        own = None if spec.inputs is None else self._read_input(prefix, spec.inputs, spec.norms, index)
        inputs = None if spec.inputs is None or index else self._read_inputs(spec.inputs)
        return Layer(block, other, spec.is_parallel, spec.residual_scale, scale, own, inputs)

    def _read_mixer(self, prefix: str, spec: LayerSpec, rope: int, group: int) -> MixerBlock | None:
        norm, post_norm = self._read_norms(prefix, spec, _MIXER_NORMS)
        match spec.mixer:
            case None:
                return None
            case Attention() as mixer:
                return self._read_attention(prefix, mixer, spec.norms, norm, post_norm, rope, group)
            case Beside(mixer, recurrence):
                assert post_norm is None, "no family norms what two mixers add"
                attention = self._read_attention(prefix, mixer, spec.norms, norm, None, rope, group)
                return make_beside(attention, self._read_recurrent(prefix, recurrence, spec.norms, None, None))
            case recurrence:
                return self._read_recurrent(prefix, recurrence, spec.norms, norm, post_norm)

    def _read_recurrent(
        self, prefix: str, mixer: Recurrence, norms: Norms, norm: NormWeight | None, post_norm: NormWeight | None
    ) -> RecurrentBlock:
        return read_recurrent(self._prepare, self._numbers, prefix, mixer, norms, norm, post_norm)

    def _read_second(
        self, prefix: str, spec: LayerSpec, index: int
    ) -> FeedForwardBlock | MixtureBlock | BothBlock | None:
        norm, post_norm = self._read_norms(prefix, spec, _name_feed_forward(spec))
        match spec.feed_forward:
            case None:
                return None
            case Both() as block:
                assert post_norm is not None, "the sum of both is normed"
                return self._read_both(prefix, block, spec.norms, norm, post_norm, index)
            case Mixture() as block:
                assert post_norm is None, "no family norms what its experts add"
                return self._read_mixture(prefix, block, norm, index)
            case block:
                return self._read_feed_forward(prefix, block, norm, post_norm)

    def _read_attention(
        self,
        prefix: str,
        attention: Attention,
        norms: Norms,
        norm: NormWeight | None,
        post_norm: NormWeight | None,
        rope: int,
        group: int,
    ) -> AttentionBlock:
        gate = None
        names = PROJECTIONS[attention.projected]
        if attention.gated:  # files have of each head the rows of its query, then those of its gate
            query, own = take_halves(self._tensors[f"{prefix}attn_q.weight"], attention.heads)
            gate = prepare(self._ctx, [own], None, (prefix + ATTENTION_GATE,))
            own_names = tuple(f"{prefix}{name}.weight" for name in names)
            qkv = prepare(self._ctx, [query, *(self._tensors[name] for name in own_names[1:])], None, own_names)
        else:
            qkv = self._prepare(prefix, *names)
        return make_attention(
            norm,
            qkv,
            self._prepare(prefix, "attn_output"),
            heads=attention.heads,
            kv_heads=attention.kv_heads,
            head_dim=attention.head_dim,
            scale=attention.scale,
            head_norms=self._read_head_norms(prefix, attention, norms),
            post_norm=post_norm,
            projected=attention.projected,
            sliding_window=attention.window,
            softcap=attention.softcap,
            sinks=self._vector(prefix + _SINKS) if attention.sinks else None,
            rope=rope,
            group=group,
            gate=gate,
        )

    def _read_feed_forward(
        self,
        prefix: str,
        block: FeedForward,
        norm: NormWeight | None = None,
        post_norm: NormWeight | None = None,
        suffix: str = "",
    ) -> FeedForwardBlock:
        up = self._prepare(prefix, *(name + suffix for name in block.projections))
        down = self._prepare(prefix, f"ffn_down{suffix}")
        return make_feed_forward(norm, up, down, block.activation, post_norm)

    def _read_both(
        self, prefix: str, block: Both, norms: Norms, norm: NormWeight | None, post_norm: NormWeight, index: int
    ) -> BothBlock:
        """A block and the experts beside it; what the router's input is divided by is in the weight of its norm."""
        dense_post, before, after = (
            self.read_norm(prefix + name, norms) for name in (_DENSE_POST_NORM, _EXPERTS_NORM, _EXPERTS_POST_NORM)
        )
        scale = self._vector(prefix + _ROUTER_SCALE)
        scale = scale * len(scale) ** -0.5
        router_norm = NormWeight(scale, norms.eps)
        dense = self._read_feed_forward(prefix, block.dense, norm, dense_post)
        mixture = self._read_mixture(prefix, block.mixture, before, index)
        return make_both(dense, mixture, router_norm, after, post_norm)

    def _read_mixture(self, prefix: str, mixture: Mixture, norm: NormWeight | None, index: int) -> MixtureBlock:
        """Expert after expert, so that one of them is in memory twice at most."""
        ctx, tensors = self._ctx, self._tensors
        experts = range(mixture.experts)
        choice_bias = self._vector(prefix + _CHOICE_BIAS) if mixture.choice_bias else None
        scales = self._vector(prefix + _EXPERT_SCALES) if mixture.expert_scales else None
        router_bias = [self._vector(f"{prefix}{_ROUTER}.bias")] if mixture.router_bias else None
        made = [
            [self._prepare_expert(prefix, names, expert) for names in (mixture.projections, ("ffn_down",))]
            for expert in experts
        ]
        slots = None
        if self._expert_budget is not None:
            largest = max(up.nbytes + down.nbytes for up, down in made)
            slots = self._expert_budget.count_slots(index, largest, mixture.experts)
        shared = mixture.shared_features
        return make_mixture(
            norm,
            prepare(
                ctx, [as_float32(tensors[f"{prefix}{_ROUTER}.weight"])], router_bias, (f"{prefix}{_ROUTER}.weight",)
            ),
            make_router(mixture.experts, mixture.rule, choice_bias, scales),
            make_experts(ctx, [up for up, _ in made], [down for _, down in made], mixture.activation, slots),
            self._read_feed_forward(prefix, _describe_shared(mixture), suffix=_SHARED) if shared else None,
            prepare(ctx, [as_float32(tensors[prefix + _SHARED_GATE])], None, (prefix + _SHARED_GATE,))
            if mixture.shared_gate
            else None,
        )

    def _prepare_expert(self, prefix: str, names: tuple[str, ...], expert: int) -> LinearWeight:
        weights = [self._tensors[f"{prefix}{name}_exps.weight"].take_matrix(expert) for name in names]
        biases = [self._tensors.get(f"{prefix}{name}_exps.bias") for name in names]
        vectors = [None if bias is None else read_vector(bias.take_matrix(expert)) for bias in biases]
        return (prepare if self._expert_budget is None else leave)(self._ctx, weights, vectors)

    def read_norm(self, name: str, norms: Norms) -> NormWeight:
        """The norm of that name."""
        bias = self._vector(f"{name}.bias") if norms.bias else None
        return NormWeight(self._vector(f"{name}.weight"), norms.eps, norms.kind, bias)

    def _read_input(self, prefix: str, spec: LayerInputs, norms: Norms, index: int) -> InputBlock:
        """What a layer does with its own input."""
        return make_input(
            self._prepare(prefix, _GATE),
            self._prepare(prefix, _PROJECTION),
            spec.activation,
            index * spec.features,
            self.read_norm(prefix + _INPUT_NORM, norms),
        )

    def _read_inputs(self, spec: LayerInputs) -> InputsBlock:
        """Read what makes the inputs of all layers. The table stays in its file."""
        return make_inputs(
            self._tensors[TABLE],
            self._prepare("", _OF_STREAM),
            NormWeight(self._vector(f"{_INPUTS_NORM}.weight"), spec.eps),
            table_scale=spec.table_scale,
            scale=spec.scale,
        )

    def _read_norms(
        self, prefix: str, spec: LayerSpec, names: tuple[str, str]
    ) -> tuple[NormWeight | None, NormWeight | None]:
        before, after = (
            None if name is None else self.read_norm(prefix + name, spec.norms) for name in _name_norms(spec, names)
        )
        return before, after

    def _read_head_norms(self, prefix: str, attention: Attention, norms: Norms) -> HeadNorms | None:
        if attention.head_norms is None:
            return None
        read = self._matrix if attention.head_norms == "layer" else self._vector
        q = read(f"{prefix}attn_q_norm.weight")
        k = q if attention.projected == "q" else read(f"{prefix}attn_k_norm.weight")
        return HeadNorms(q, k, norms.eps, attention.norms_values, attention.head_norms)

    def _read_scale(self, name: str) -> float:
        scale = float(self._vector(name)[0])
        if not math.isfinite(scale):
            raise ModelError(f"tensor {name} holds {scale}, expected a finite number")
        return scale

    def _prepare(self, prefix: str, *names: str) -> LinearWeight:
        biases = [self._tensors.get(f"{prefix}{name}.bias") for name in names]
        full_names = tuple(f"{prefix}{name}.weight" for name in names)
        weight = prepare(
            self._ctx,
            [self._tensors[name] for name in full_names],
            [None if bias is None else read_vector(bias) for bias in biases],
            full_names,
        )
        return replace(weight, is_share=True) if full_names[0] in self._summed else weight

    def _vector(self, name: str) -> FloatArray:
        return read_vector(self._tensors[name])

    def _matrix(self, name: str) -> FloatArray:
        """The numbers of a small matrix, row after row."""
        tensor = self._tensors[name]
        values: FloatArray = tensor.to_float32().reshape(-1)
        tensor.release()
        return values

    def _numbers(self, name: str) -> FloatArray:
        """A small tensor of any shape as numbers."""
        return read_numbers(self._tensors[name])
