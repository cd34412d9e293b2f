"""Gemma 4: Gemma 3's layers, whose outputs are scaled, with heads of two sizes.

Value heads are normed, too; in layers without a window the values may be the keys. The last layers may read the keys
and values of the last layer of their kind before them. Layers of the small models get embeddings of their own; those of
26B-A4B have experts beside their feed-forward block. In layers with a window of the large models, tokens of a picture
see all of it.
"""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

from mlxr.core.errors import ModelError
from mlxr.kernels.rope_and_write_kv import Projected
from mlxr.models import limits
from mlxr.models.components import Attention, DenseAndExperts, Experts, Layer, LayerInputs, Norms, Rope
from mlxr.models.families.gemma import NORM_NAMES
from mlxr.models.families.gemma4_ear import make_ears
from mlxr.models.families.gemma4_tower import make_plain_tower, make_tower
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import EXPERTS, Flags, FolderConfig, TensorLayout
from mlxr.models.folders.mixers import state_expert_width, state_experts
from mlxr.models.folders.rotations import state_rotation, state_window_theta, state_windows
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model
from mlxr.models.rotations import ROPE_FACTORS

_ROTATION = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
_INPUTS, _DEFAULT_INPUTS = "hidden_size_per_layer_input", 256


def state(c: FolderConfig) -> None:
    """State the sizes of a model."""
    c.state_model(activation="gelu_tanh", tied=True)
    sees = "use_bidirectional_attention"
    c.fields.refuse_unless((sees,), ("vision",), "only causal attention is supported")
    c.note(EXPERTS)
    if c.fields.flag("enable_moe_block", False):
        state_expert_width(c, state_experts(c, used_key="top_k_experts", renormalises=True))
    else:
        c.state_width()
    head_dim, kv_heads = _state_heads(c)
    state_rotation(c, unstated=_ROTATION, head_dim=head_dim)
    c.out.vectors.setdefault(ROPE_FACTORS, [1.0] * (c.out.integer("rope.dimension_count") // 2))
    windowed = state_windows(c, default=512, full_every=6, last_full=True, states_layers=True)
    state_window_theta(c, 10000.0)
    _state_layers(c, windowed, kv_heads)
    is_large = not c.out.integer("embedding_length_per_layer_input")
    if c.whole.get("vision_config") is not None and is_large != (c.fields.get(sees) is not None):
        c.fields.refuse(sees, '"vision" of models whose layers get no embeddings of their own, else null')
    c.state_softcaps()


def _state_heads(c: FolderConfig) -> tuple[int, int]:
    """State the size of heads; return that of layers without a window, and their heads of keys: stated for all of them,
    or for each by its number."""
    fields, full, names = c.fields, c.fields, ("global_head_dim", "num_global_key_value_heads")
    layers = fields.mapping("per_layer_config")
    if layers is not None:
        names = "head_dim", "num_key_value_heads"
        stated = {repr(fields.get("per_layer_config")[number]): number for number in layers.names()}  # type: ignore[index]
        if len(stated) != 1:
            fields.refuse("per_layer_config", "the same of all layers without a window")
        full = layers.mapping(next(iter(stated.values()))) or fields
    head_dim = full.integer(names[0], 2, limits.MAX_HEAD_DIM, default=512 if layers is None else c.head_dim)
    for name in ("attention.key_length", "attention.value_length"):
        c.out.put(name, head_dim, full, names[0])
    for name in ("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"):
        c.out.put(name, c.head_dim, fields, c.head_key)
    kv_heads = c.out.integer("attention.head_count_kv")
    if layers is not None or fields.flag("attention_k_eq_v", False):
        kv_heads = full.integer(names[1], 1, limits.MAX_HEADS, default=kv_heads)
        c.out.put("attention.head_count_kv", c.out.integer("attention.head_count_kv"), full, names[1])
    return head_dim, kv_heads


def _state_layers(c: FolderConfig, windowed: Flags, full_kv_heads: int) -> None:
    """State how the layers differ."""
    fields, out = c.fields, c.out
    shared = fields.integer("num_kv_shared_layers", 0, c.layers, default=0)
    out.put("attention.shared_kv_layers", shared, fields, "num_kv_shared_layers")
    kv_heads, width = out.integer("attention.head_count_kv"), out.integer("feed_forward_length")
    is_wide = shared and fields.flag("use_double_wide_mlp", False)
    shared_width = 2 * fields.integer("intermediate_size", 1, limits.MAX_WIDTH // 2) if is_wide else width
    out.values["attention.head_count_kv"] = [kv_heads if flag else full_kv_heads for flag in windowed]
    out.values["feed_forward_length"] = [width] * (c.layers - shared) + [shared_width] * shared
    unstated = 0 if fields.has(_INPUTS) else _DEFAULT_INPUTS  # null says: none
    features = fields.integer(_INPUTS, 0, limits.MAX_WIDTH, default=unstated)
    out.put("embedding_length_per_layer_input", features, fields, _INPUTS)
    out.put_own("attention.keys_as_values", fields.flag("attention_k_eq_v", False))


def build(m: Metadata) -> Model:
    """Return the model of these metadata."""
    norms, windowed, softcap = (
        Norms(m.rms_eps, places="both"),
        m.windowed(full_every=6),
        m.scale("attn_logit_softcapping"),
    )
    own = m.layers - m.integer("attention.shared_kv_layers", 0, m.layers, default=0)  # layers with their own keys
    if not {*windowed} <= {*windowed[:own]}:
        m.fields.refuse("attention.shared_kv_layers", "so many that each kind of layer stands before them")
    window_heads, heads = _read_heads(m, windowed)
    widths, experts, inputs = _read_widths(m, own), _read_experts(m), _read_inputs(m)
    window_heads = replace(window_heads, whole_pictures=inputs is None)
    layers = []
    for index, is_windowed in enumerate(windowed):
        attention = replace(window_heads if is_windowed else heads, softcap=softcap)
        if index >= own:
            reads = max(other for other in range(own) if windowed[other] == is_windowed)
            attention = replace(attention, projected="q", reads=reads)
        dense = m.feed_forward("gelu_tanh", features=widths[index])
        has_experts = experts is not None and m.has_experts[index]
        block = DenseAndExperts(dense, experts) if experts is not None and has_experts else dense
        layers.append(Layer(attention, block, norms, scales_output=True, inputs=inputs))
    return m.model(layers, embedding_scale=sqrt(m.hidden), final_softcap=m.scale("final_logit_softcapping"))


def _read_heads(m: Metadata, windowed: tuple[bool, ...]) -> tuple[Attention, Attention]:
    """Read the attention of layers with a window, and of those without."""
    if ROPE_FACTORS not in m.tensors:
        raise ModelError(f"tensor {ROPE_FACTORS} is missing, which says how much of a head turns; convert it anew")
    counts = m.integers("attention.head_count_kv", 1, limits.MAX_HEADS)
    kinds = {flag: {n for n, one in zip(counts, windowed, strict=True) if one == flag} for flag in (True, False)}
    if max(map(len, kinds.values())) > 1 or any(m.heads % count for count in counts):
        wants = f"divisors of the {m.heads} heads, as many for all layers with a window, and for all without"
        m.fields.refuse("attention.head_count_kv", wants)
    dim = m.integer("attention.key_length_swa", 2, limits.MAX_HEAD_DIM)
    for name in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if m.integer(name, 2, limits.MAX_HEAD_DIM, default=dim) != dim:
            m.fields.refuse(name, f"the key length {dim}")
    window_rope = Rope(m.window_theta(10000.0), dim, interleaved=False, has_factors=False)
    kv_heads = min(kinds[False] or kinds[True])
    window_heads = m.attention(
        window_rope,
        kv_heads=min(kinds[True] or kinds[False]),
        head_dim=dim,
        window=m.window,
        head_norms="each",
        scale=1.0,
    )
    heads = m.attention(m.rope(), kv_heads=kv_heads, head_norms="each", scale=1.0)
    projected: Projected = "qk" if _has_keys_as_values(m, windowed, kv_heads) else "qkv"
    return replace(window_heads, norms_values=True), replace(heads, norms_values=True, projected=projected)


def _has_keys_as_values(m: Metadata, windowed: tuple[bool, ...], kv_heads: int) -> bool:
    """Return True if the values of layers without a window are their keys, by a key of our own or by the tensors of the
    first such layer."""
    full = next((index for index, flag in enumerate(windowed) if not flag), None)
    has_values = full is None or f"blk.{full}.attn_v.weight" in m.tensors
    joined = m.tensors.get(f"blk.{full}.attn_qkv.weight")
    if joined is not None:  # of queries and keys alone if values are keys
        has_values = joined.shape[0] != (m.heads + kv_heads) * m.head_dim
    return m.own.flag("attention.keys_as_values", not has_values)


def _read_widths(m: Metadata, own: int) -> tuple[int, ...]:
    """Return the features of each layer's feed-forward block; layers that read other layers' keys may have more."""
    widths = m.integers("feed_forward_length", 1, limits.MAX_WIDTH)
    if max(len({*widths[:own]}), len({*widths[own:]})) > 1:
        m.fields.refuse("feed_forward_length", "as many for all layers with keys of their own, and for all others")
    return widths


def _read_experts(m: Metadata) -> Experts | None:
    if not m.experts:
        return None
    rule, activation = m.routing(renormalises=True), m.activation("gelu_tanh")
    return Experts(m.experts, m.expert_features, activation, rule, expert_scales=True)


def _read_inputs(m: Metadata) -> LayerInputs | None:
    features = m.integer("embedding_length_per_layer_input", 0, default=0)
    if not features:
        return None
    # a product is divided by the root of the hidden size before its norm, which takes that back, but for eps
    eps = m.rms_eps * m.hidden
    return LayerInputs(features, m.activation("gelu_tanh"), table_scale=features**0.5, scale=0.5**0.5, eps=eps)


TOWERS = make_tower("gemma4"), make_plain_tower("gemma4")
EARS = make_ears("gemma4")
_LAYOUT = TensorLayout(NORM_NAMES)
_UNIFIED = {_INPUTS: 0, "sliding_window": 1024, "use_bidirectional_attention": "vision"}  # what 12B need not state
FAMILIES = (
    Family(
        "gemma4",
        build,
        (
            Folder("gemma4_text", "Gemma4ForCausalLM", state, _LAYOUT),
            Folder("gemma4_unified_text", "Gemma4UnifiedForCausalLM", state, _LAYOUT, left_out=_UNIFIED),
        ),
    ),
)
