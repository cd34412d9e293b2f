"""gpt-oss: experts with biases and a clamped activation, windows in every other layer, and a sink for each head.

MiMo V2: values have fewer numbers than keys; most layers have windows, more heads of keys and a sink for each head. In
a folder the window is transformers' `sliding_window`, which is one more than the window in llama.cpp's files if
`sliding_window_size` states it. Source: llama.cpp, src/models/mimo2.cpp; transformers, models/mimo_v2_flash.
"""

from __future__ import annotations

from dataclasses import replace

from mlxr.models import limits
from mlxr.models.components import Experts, Layer, Norms
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import FolderConfig, TensorLayout
from mlxr.models.folders.mixers import read_expert_layers, state_expert_width, state_experts
from mlxr.models.folders.rotations import state_rotation, state_window_theta, state_windows
from mlxr.models.metadata import WINDOW_THETA, Metadata
from mlxr.models.model import Model

_TENSORS = TensorLayout({"post_attention_layernorm": "post_attention_norm"}, alternates=True)
_KV, _VALUES, _VALUE_SCALE = "attention.head_count_kv", "attention.value_length", "attention.value_scale"


def state(c: FolderConfig) -> None:
    """State the sizes of a model."""
    c.state_model(biases="block")
    keys = ("num_local_experts", "num_experts")
    state_expert_width(c, state_experts(c, count_keys=keys, features_key="intermediate_size"))
    state_rotation(c, truncates_yarn=False)
    state_windows(c, default=128, full_every=2)


def state_mimo2(c: FolderConfig) -> None:
    """State the sizes of a model."""
    c.fields.refuse_unless(("hybrid_layer_pattern",), (), "take the config.json of transformers 5, with layer_types")
    if c.fields.get("layer_types") is None:
        c.fields.refuse("layer_types", f"a list of {c.layers}")
    c.state_model(biases="block")
    usual = tuple(index > 0 for index in range(c.layers))
    flags = state_experts(
        c,
        count_keys=("n_routed_experts", "num_local_experts"),
        scoring="sigmoid",
        renormalises=True,
        layers=read_expert_layers(c) or usual,
    )
    state_expert_width(c, flags)
    state_rotation(c, theta=5e6, part=0.334)
    windowed = state_windows(c, default=129, states_layers=True)
    state_window_theta(c, 10000.0)
    before = c.fields.integer("sliding_window_size", 0, limits.MAX_CONTEXT - 1, default=0)
    if before and any(windowed):
        c.out.put("attention.sliding_window", before + 1, c.fields, "sliding_window_size")
    kv_heads = c.out.integer(_KV)
    c.out.put(_KV, [kv_heads * (1 + has) for has in windowed], c.fields, "num_key_value_heads")
    c.out.put(_VALUES, c.fields.integer("v_head_dim", 1, c.head_dim, default=128), c.fields, "v_head_dim")
    c.out.put(_VALUE_SCALE, c.fields.number("attention_value_scale", 1e-6, limits.MAX_SCALE, default=0.707))


def build(m: Metadata) -> Model:
    """Return the model of these metadata."""
    norms = Norms(m.rms_eps, feed_forward="post_attention_norm")
    rope, dense = m.rope(truncates_yarn=False), m.feed_forward()
    experts = Experts(
        m.experts,
        m.expert_features,
        "clamped_swiglu",
        m.routing("softmax_chosen"),
        bias=True,
        router_bias=True,
    )
    m.fields.note((WINDOW_THETA,))  # which is that of all layers
    return m.model(
        Layer(
            m.attention(rope, window=window, sinks=True),
            experts if has_experts else dense,
            norms,
        )
        for window, has_experts in zip(m.windows(full_every=2), m.has_experts, strict=True)
    )


def build_mimo2(m: Metadata) -> Model:
    """Return the model of these metadata."""
    norms, rope = Norms(m.rms_eps), m.rope()
    window_rope = replace(rope, theta=m.window_theta(rope.theta))
    rule = m.routing("sigmoid", renormalises=True, floor=1e-20)
    experts = Experts(m.experts, m.expert_features, m.activation(), rule, choice_bias=True)
    counts, scale = m.integers(_KV, 1, limits.MAX_HEADS), m.scale(_VALUE_SCALE) or 1.0
    layers = []
    for windowed, kv_heads, has_experts in zip(m.windowed(full_every=1), counts, m.has_experts, strict=True):
        attention = m.attention(
            window_rope if windowed else rope,
            kv_heads=kv_heads,
            value_dim=m.value_dim,
            window=m.window if windowed else None,
            sinks=windowed,
        )
        layers.append(Layer(replace(attention, value_scale=scale), experts if has_experts else m.feed_forward(), norms))
    return m.model(layers)


FAMILIES = (
    Family("gpt-oss", build, (Folder("gpt_oss", "GptOssForCausalLM", state, _TENSORS),)),
    Family("mimo2", build_mimo2, (Folder("mimo_v2_flash", "MiMoV2FlashForCausalLM", state_mimo2),)),
)
