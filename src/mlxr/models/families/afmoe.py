"""AFMoE (Trinity): each number that attention gives has a gate, whose weight is its own, and blocks are normed before
and after; layers with windows rotate, each fourth one neither rotates nor has one. Experts are chosen by sigmoids.

Source: llama.cpp, src/models/afmoe.cpp; transformers, models/afmoe.
"""

from __future__ import annotations

from dataclasses import replace

from mlxr.models import limits
from mlxr.models.components import NO_ROPE, Experts, Layer, Norms
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import FolderConfig, TensorLayout
from mlxr.models.folders.mixers import state_expert_width, state_experts
from mlxr.models.folders.rotations import state_rotation, state_windows
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model

_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_mlp_layernorm": "ffn_norm",
    "post_mlp_layernorm": "post_ffw_norm",
    "self_attn.gate_proj": "attn_gate",
    "mlp.router.gate": "ffn_gate_inp",
}
_EVERY = "global_attn_every_n_layers"  # of so many layers the last sees everything


def state(c: FolderConfig) -> None:
    """State the sizes of a model, whose embeddings are scaled and whose shares of experts sum up to `route_scale`."""
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


FAMILIES = (Family("afmoe", build, (Folder("afmoe", "AfmoeForCausalLM", state, TensorLayout(_NAMES)),)),)
