"""Which tensors a transformer layer has: their names, without the layer's prefix, and their shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mlxr.kernels.tensor import TensorSource
from mlxr.models.recurrent import is_convolution, list_recurrent
from mlxr.models.specs import Attention, Both, FeedForward, LayerInputs, LayerSpec, Mixture

Shape = tuple[int, ...]

# Names of the norms of a block: of its input, and of what it adds to the stream.
MIXER_NORMS = "attn_norm", "post_attention_norm"
SINKS = "attn_sinks.weight"
OUTPUT_SCALE = "layer_output_scale.weight"
ROUTER, CHOICE_BIAS, EXPERT_SCALES = "ffn_gate_inp", "exp_probs_b.bias", "ffn_down_exps.scale"
ROUTER_SCALE = "ffn_gate_inp.scale"
DENSE_POST_NORM, EXPERTS_NORM, EXPERTS_POST_NORM = "post_ffw_norm_1", "pre_ffw_norm_2", "post_ffw_norm_2"
ATTENTION_GATE = "attn_q.gate"  # the rows of a gate among those of the queries
SHARED, SHARED_GATE = "_shexp", "ffn_gate_inp_shexp.weight"
INPUT_GATE, INPUT_PROJECTION, INPUT_NORM = "inp_gate", "proj", "post_norm"  # of the input of a layer
# Of what makes the inputs of all layers.
TABLE, INPUTS_OF_STREAM, INPUTS_NORM = "per_layer_token_embd.weight", "per_layer_model_proj", "per_layer_proj_norm"
PROJECTIONS = {"qkv": ("attn_q", "attn_k", "attn_v"), "qk": ("attn_q", "attn_k"), "q": ("attn_q",)}


def list_tensors(spec: LayerSpec, hidden: int) -> Iterator[tuple[str, Shape]]:
    """Name, without the layer's prefix, and shape of each tensor of a layer."""
    for name in (*name_norms(spec, MIXER_NORMS), *name_norms(spec, name_feed_forward(spec))):
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
        yield ROUTER_SCALE, (hidden,)
        for name in (DENSE_POST_NORM, EXPERTS_NORM, EXPERTS_POST_NORM):
            yield f"{name}.weight", (hidden,)
        yield from _list_feed_forward(block.dense, hidden)
        yield from _list_mixture(block.mixture, hidden)
    elif isinstance(block, Mixture):
        yield from _list_mixture(block, hidden)
    elif block is not None:
        yield from _list_feed_forward(block, hidden)
    if spec.scales_output:
        yield OUTPUT_SCALE, (1,)
    if spec.inputs is not None:
        yield f"{INPUT_GATE}.weight", (spec.inputs.features, hidden)
        yield f"{INPUT_PROJECTION}.weight", (hidden, spec.inputs.features)
        yield f"{INPUT_NORM}.weight", (hidden,)


def _list_attention(attention: Attention, hidden: int) -> Iterator[tuple[str, Shape]]:
    queries, keys = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    for name in PROJECTIONS[attention.projected]:
        rows = keys if name != "attn_q" else 2 * queries if attention.gated else queries
        yield from _list_product(name, rows, hidden, attention.qkv_bias)
    yield from _list_product("attn_output", hidden, queries, attention.output_bias)
    if attention.sinks:
        yield SINKS, (attention.heads,)
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
        if is_wide and ROUTER not in name and "_norm." not in name and not is_convolution(name):
            yield tensor


def _list_feed_forward(block: FeedForward, hidden: int, suffix: str = "") -> Iterator[tuple[str, Shape]]:
    for name in block.projections:
        yield from _list_product(name + suffix, block.features, hidden, block.bias)
    yield from _list_product(f"ffn_down{suffix}", hidden, block.features, block.bias)


def _list_mixture(mixture: Mixture, hidden: int) -> Iterator[tuple[str, Shape]]:
    experts = mixture.experts
    yield from _list_product(ROUTER, experts, hidden, mixture.router_bias)
    if mixture.choice_bias:
        yield CHOICE_BIAS, (experts,)
    if mixture.expert_scales:
        yield EXPERT_SCALES, (experts,)
    for name, (rows, columns) in name_experts(mixture, hidden).items():
        yield f"{name}_exps.weight", (experts, rows, columns)
        if mixture.bias:
            yield f"{name}_exps.bias", (experts, rows)
    if mixture.shared_features:
        yield from _list_feed_forward(describe_shared(mixture), hidden, SHARED)
    if mixture.shared_gate:
        yield SHARED_GATE, (hidden,)


def name_experts(mixture: Mixture, hidden: int) -> dict[str, tuple[int, int]]:
    """The products of one expert, by the names that a block without experts has, and their shapes."""
    return dict.fromkeys(mixture.projections, (mixture.features, hidden)) | {"ffn_down": (hidden, mixture.features)}


def name_expert(product: str, expert: int) -> str:
    """Return the name of one expert's matrix as old GGUF files spell it, for a `product` such as blk.0.ffn_up."""
    return f"{product}.{expert}.weight"


def describe_shared(mixture: Mixture) -> FeedForward:
    """The block that all tokens of a mixture go through."""
    return FeedForward(mixture.shared_features, mixture.activation, gated=mixture.gated)


def list_inputs_tensors(spec: LayerInputs, layers: int, hidden: int, vocabulary: int) -> Iterator[tuple[str, Shape]]:
    """Name and shape of each tensor that makes the inputs of all layers."""
    yield TABLE, (vocabulary, layers * spec.features)
    yield f"{INPUTS_OF_STREAM}.weight", (layers * spec.features, hidden)
    yield f"{INPUTS_NORM}.weight", (spec.features,)


def _list_product(name: str, rows: int, columns: int, bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)


def name_feed_forward(spec: LayerSpec) -> tuple[str, str]:
    """The norms of the second block: of its input, and of what it adds to the stream."""
    return spec.norms.feed_forward, "post_ffw_norm"


def name_norms(spec: LayerSpec, names: tuple[str, str]) -> tuple[str | None, str | None]:
    """The norms that a block has of `names`; of blocks side by side the first one's norm is that of both."""
    before, after = names
    is_mixer = names == MIXER_NORMS
    if (spec.mixer if is_mixer else spec.feed_forward) is None:
        return None, None
    has_before = spec.norms.places != "after" and not (spec.is_parallel and not is_mixer)
    return before if has_before else None, None if spec.norms.places == "before" else after
