"""AFMoE (Trinity): attention has a gate for each number of its result, with a weight of its own, and blocks are normed
before and after. Layers with windows rotate; every fourth one has no window and rotates nothing. Experts are chosen by
sigmoids.

Laguna: gates by softplus, of each head or of each number; most layers may have windows, more heads and a rotation of
their own. Source: llama.cpp, src/models/afmoe.cpp and laguna.cpp; transformers, models/afmoe and laguna.
"""

from __future__ import annotations

from dataclasses import replace

from mlxr.models import limits
from mlxr.models.components import NO_ROPE, Experts, Layer, Norms
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import FolderConfig, TensorLayout
from mlxr.models.folders.mixers import read_expert_layers, state_expert_width, state_experts
from mlxr.models.folders.rotations import find_rope, state_rotation, state_window_theta, state_windows
from mlxr.models.metadata import WINDOW_PATTERN, Metadata
from mlxr.models.model import Model

_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_mlp_layernorm": "ffn_norm",
    "post_mlp_layernorm": "post_ffw_norm",
    "self_attn.gate_proj": "attn_gate",
    "mlp.router.gate": "ffn_gate_inp",
}
_EVERY = "global_attn_every_n_layers"  # the last of so many layers sees everything
_LAGUNA = TensorLayout({"self_attn.g_proj": "attn_gate", "mlp.experts.e_score_correction_bias": "exp_probs_b.bias"})
_HEADS, _WINDOW_DIM, _CAP = "attention.head_count", "rope.dimension_count_swa", "router_logit_softcapping"


def state(c: FolderConfig) -> None:
    """State the sizes of a model; its embeddings are scaled, and its shares of experts sum up to `route_scale`."""
    c.fields.refuse_unless(("mup_enabled",), (True,), "embeddings that are not scaled are not supported there")
    c.fields.refuse_unless(("n_group", "num_expert_groups", "num_limited_groups"), (1,), "not supported there")
    c.fields.refuse_unless(("score_func",), ("sigmoid",), "not supported there")
    c.fields.refuse_unless(("route_norm",), (True,), "shares that do not sum up are not supported there")
    if c.fields.get("mup_enabled") is None:
        c.fields.refuse("mup_enabled", "true")
    c.state_model(kv_heads=c.heads)
    flags = state_experts(
        c,
        first_key="num_dense_layers",
        shared_key="num_shared_experts",
        shared="count",
        scoring="sigmoid",
        renormalises=True,
    )
    c.out.put(
        "expert_weights_scale", c.fields.number("route_scale", 0.0, limits.MAX_SCALE, 1.0), c.fields, "route_scale"
    )
    state_expert_width(c, flags)
    state_rotation(c)
    every = c.fields.integer(_EVERY, 1, limits.MAX_LAYERS, default=4)
    if c.fields.get("layer_types") is None and every != 4:
        c.fields.refuse(_EVERY, "4, or a list of layer_types")
    state_windows(c, default=1024, full_every=4, states_layers=True)


def state_laguna(c: FolderConfig) -> None:
    """State the sizes of a model."""
    c.fields.refuse_unless(("moe_apply_router_weight_on_input",), (False,), "not supported")
    c.fields.refuse_unless(("gating",), (True, "per-head", "per-element"), "expected per-head or per-element")
    c.state_model(biases="block")
    c.state_width()
    if c.fields.get("num_attention_heads_per_layer") is not None:
        counts = c.fields.integers("num_attention_heads_per_layer", c.layers, 1, limits.MAX_HEADS)
        c.out.put(_HEADS, list(counts), c.fields, "num_attention_heads_per_layer")
    c.out.put_own("attention.gates_heads", c.fields.get("gating") != "per-element", c.fields, "gating")
    state_experts(
        c,
        shared_key="shared_expert_intermediate_size",
        scoring="sigmoid",
        renormalises=True,
        layers=read_expert_layers(c) or tuple(index > 0 for index in range(c.layers)),
    )
    scale = c.fields.number("moe_routed_scaling_factor", 1e-6, limits.MAX_SCALE, default=1.0)
    c.out.put("expert_weights_scale", scale, c.fields, "moe_routed_scaling_factor")
    cap = c.fields.number("moe_router_logit_softcapping", 0.0, limits.MAX_SCALE, default=0.0)
    c.out.put(_CAP, cap, c.fields, "moe_router_logit_softcapping")
    state_rotation(c, theta=500000.0, part=0.5)
    if c.fields.get("layer_types") is None:  # no layer has a window
        c.note(("sliding_window",))
    elif any(state_windows(c, default=512, states_layers=True)):
        state_window_theta(c, 10000.0)
        part = find_rope(c.fields, windowed=True).number("partial_rotary_factor", 0.0, 1.0, default=1.0)
        c.out.put(_WINDOW_DIM, int(part * c.head_dim))


def build(m: Metadata) -> Model:
    """Return the model of these metadata."""
    norms, rope = Norms(m.rms_eps, places="both"), m.rope()
    experts = Experts(
        m.experts,
        m.expert_features,
        m.activation(),
        m.routing("sigmoid", renormalises=True, floor=1e-20),
        choice_bias=True,
        shared_features=m.integer("expert_shared_count", 0, default=0) * m.expert_features,
    )
    layers = []
    for windowed, has_experts in zip(m.windowed(full_every=4), m.has_experts, strict=True):
        window = m.window if windowed else None
        attention = m.attention(rope if windowed else NO_ROPE, window=window, head_norms="each")
        block = experts if has_experts else m.feed_forward()
        layers.append(Layer(replace(attention, own_gate=True), block, norms))
    return m.model(layers, embedding_scale=m.hidden**0.5)


def build_laguna(m: Metadata) -> Model:
    """Return the model of these metadata."""
    norms, rope = Norms(m.rms_eps), m.rope()
    dim = m.integer(_WINDOW_DIM, 2, limits.MAX_HEAD_DIM, default=rope.dim)
    window_rope = replace(rope, theta=m.window_theta(rope.theta), dim=dim, scaling=None, has_factors=False)
    experts = Experts(
        m.experts,
        m.expert_features,
        m.activation(),
        m.routing("sigmoid", renormalises=True),
        choice_bias=True,
        shared_features=m.shared_features() or m.expert_features,
        router_cap=m.scale(_CAP),
    )
    gate = m.tensors.get("blk.0.attn_gate.weight")
    by_heads = m.own.flag("attention.gates_heads", gate is None or gate.shape[0] == m.head_counts[0])
    kv_heads, layers = m.integer("attention.head_count_kv", 1, limits.MAX_HEADS), []
    every_fourth = m.fields.get(WINDOW_PATTERN) is None and m.stated_window is not None  # from the first one on
    windowed = tuple(index % 4 != 0 for index in range(m.layers)) if every_fourth else m.windowed(full_every=4)
    for heads, has_window, has_experts in zip(m.head_counts, windowed, m.has_experts, strict=True):
        own_rope, window = (window_rope, m.window) if has_window else (rope, None)
        attention = m.attention(own_rope, heads=heads, kv_heads=kv_heads, window=window, head_norms="each")
        attention = replace(attention, own_gate=True, gates_heads=by_heads, softplus=True)
        layers.append(Layer(attention, experts if has_experts else m.feed_forward(), norms))
    return m.model(layers)


FAMILIES = (
    Family("afmoe", build, (Folder("afmoe", "AfmoeForCausalLM", state, TensorLayout(_NAMES)),)),
    Family("laguna", build_laguna, (Folder("laguna", "LagunaForCausalLM", state_laguna, _LAGUNA),)),
)
