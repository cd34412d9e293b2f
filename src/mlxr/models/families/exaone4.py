"""EXAONE 4: heads of queries and keys are normed, and each block's result instead of its input.

The model of 32B has windows in three of four layers, and only these rotate; that of 1.2B has none, and all rotate. A
file with 64 layers that states no window is taken for one of 32B (llama.cpp, src/models/exaone4.cpp).

K-EXAONE norms inputs of blocks, as most do, and has experts, chosen by sigmoids, beside a block that all tokens go
through (exaone-moe.cpp).
"""

from __future__ import annotations

from mlxr.models.components import NO_ROPE, Experts, Layer, Norms
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import FolderConfig, TensorLayout
from mlxr.models.folders.mixers import read_expert_layers, state_expert_width, state_experts
from mlxr.models.folders.rotations import state_rotation, state_turning_layers, state_windows
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model

_LAYERS_OF_32B, _WINDOW_OF_32B, _WINDOWED = 64, 4096, "attention.sliding_window_layers"
_TENSORS = TensorLayout(
    {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
)


def state(c: FolderConfig) -> None:
    """State the sizes of a model. If a window is stated, layers without it rotate nothing."""
    c.state_model()
    c.state_width()
    state_rotation(c)
    windowed, everywhere = state_windows(c, full_every=4), (True,) * c.layers
    is_hybrid = c.fields.get("sliding_window") is not None or not c.fields.has("sliding_window")
    if not any(windowed) and c.layers == _LAYERS_OF_32B:
        c.out.put_own(_WINDOWED, list(windowed))
    state_turning_layers(c, windowed if is_hybrid else everywhere, windowed if any(windowed) else everywhere)


def state_mixture(c: FolderConfig) -> None:
    """State the sizes of a K-EXAONE, in which only layers with windows rotate."""
    c.state_model()
    flags = state_experts(
        c,
        shared_key="num_shared_experts",
        shared="count",
        scoring="sigmoid",
        renormalises=True,
        layers=read_expert_layers(c),
    )
    state_expert_width(c, flags)
    state_rotation(c)
    if isinstance(c.fields.get("sliding_window_pattern"), str):
        c.note(("sliding_window_pattern",))
        if c.fields.get("layer_types") is None:
            c.fields.refuse("sliding_window_pattern", "a number, or a list of layer_types")
    state_windows(c, full_every=4, states_layers=True)


def build_mixture(m: Metadata) -> Model:
    """Return the model of these metadata, which has experts in layers with a router."""
    norms, rope = Norms(m.rms_eps), m.rope()
    m.fields.note(("expert_shared_feed_forward_length",))
    experts = Experts(
        m.experts,
        m.expert_features,
        m.activation(),
        m.routing("sigmoid", renormalises=True, floor=1e-20),
        choice_bias=True,
        shared_features=m.integer("expert_shared_count", 0, default=1) * m.expert_features,
    )
    layers = []
    for windowed, has_experts in zip(m.windowed(full_every=4), m.has_experts, strict=True):
        window = m.window if windowed else None
        attention = m.attention(rope if windowed else NO_ROPE, window=window, head_norms="each")
        layers.append(Layer(attention, experts if has_experts else m.feed_forward(), norms))
    return m.model(layers)


def build(m: Metadata) -> Model:
    """Return the model of these metadata."""
    norms, rope, windowed = Norms(m.rms_eps, places="after"), m.rope(), m.windowed(full_every=4)
    window = m.window
    if m.layers == _LAYERS_OF_32B and m.stated_window is None and m.own.get(_WINDOWED) is None:
        windowed = m.all_but_last_of(4)
        window = _WINDOW_OF_32B if m.context > _WINDOW_OF_32B else None
    rotates = m.rotates(windowed if any(windowed) else (True,) * m.layers)
    return m.model(
        Layer(
            m.attention(rope if turns else NO_ROPE, window=window if has_window else None, head_norms="each"),
            m.feed_forward(),
            norms,
        )
        for has_window, turns in zip(windowed, rotates, strict=True)
    )


FAMILIES = (
    Family("exaone4", build, (Folder("exaone4", "Exaone4ForCausalLM", state, _TENSORS),)),
    Family("exaone-moe", build_mixture, (Folder("exaone_moe", "ExaoneMoeForCausalLM", state_mixture),)),
)
