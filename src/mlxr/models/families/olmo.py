"""OLMo 1 to 3, and OLMoE: layer norms without weights in the first; later queries and keys are normed as whole rows.

OLMo 2 and 3 norm each block's result instead of its input; OLMo 3 has windows in three of four layers, whose rotation
is not stretched. OLMoE has experts.
"""

from __future__ import annotations

from mlxr.models.components import Experts, Layer, Norms, Rope
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import LAYER_EPS, FolderConfig, TensorLayout, state_clamp
from mlxr.models.folders.mixers import state_expert_width, state_experts
from mlxr.models.folders.rotations import state_rotation, state_windows
from mlxr.models.metadata import WINDOW_THETA, Metadata
from mlxr.models.model import Model

_TENSORS = TensorLayout(
    {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
)


def state_olmo(c: FolderConfig) -> None:
    """State the sizes of an OLMo 1; all of its norms have one eps, and some models clamp queries, keys and values."""
    c = c.rename({}, {"layer_norm_eps": 1e-5})
    c.state_model(kv_heads=c.heads, eps=(LAYER_EPS,), eps_key="layer_norm_eps", biases="block")
    c.state_width()
    state_clamp(c, c.fields)
    state_rotation(c)


def state_olmo2(c: FolderConfig) -> None:
    """State the sizes of an OLMo 2."""
    c.state_model(biases="block")
    c.state_width()
    state_rotation(c)


def state_olmo3(c: FolderConfig) -> None:
    """State an OLMo 3: OLMo 2 with windows, for which GGUF has no other name."""
    state_olmo2(c)
    state_windows(c, full_every=4)


def state_olmoe(c: FolderConfig) -> None:
    """State the sizes of an OLMoE."""
    c.state_model(kv_heads=c.heads, biases="block")
    state_expert_width(c, state_experts(c, features_key="intermediate_size"))
    state_rotation(c)


def build_olmo(m: Metadata) -> Model:
    """Return the model of these metadata, which rotates neighbours."""
    norms = Norms(m.layer_eps, kind="layer", has_weights=False)
    attention = m.attention(m.rope(interleaved=True), clamp=m.clamp())
    return m.model([Layer(attention, m.feed_forward(), norms)] * m.layers)


def build_olmo2(m: Metadata) -> Model:
    """Return the model of these metadata."""
    norms, rope = Norms(m.rms_eps, places="after"), m.rope()
    window_rope = Rope(rope.theta, rope.dim, interleaved=False, has_factors=False)
    m.fields.note((WINDOW_THETA,))  # which is that of all layers
    return m.model(
        Layer(
            m.attention(
                window_rope if windowed else rope,
                window=m.window if windowed else None,
                head_norms="joint",
            ),
            m.feed_forward(),
            norms,
        )
        for windowed in m.windowed(full_every=4)
    )


def build_olmoe(m: Metadata) -> Model:
    """Return the model of these metadata."""
    norms, rope = Norms(m.rms_eps), m.rope()
    experts = Experts(m.experts, m.expert_features, m.activation(), m.routing())
    return m.model(
        Layer(m.attention(rope, window=window, head_norms="joint"), experts if has_experts else m.feed_forward(), norms)
        for window, has_experts in zip(m.windows(), m.has_experts, strict=True)
    )


FAMILIES = (
    Family("olmo", build_olmo, (Folder("olmo", "OlmoForCausalLM", state_olmo),)),
    Family(
        "olmo2",
        build_olmo2,
        (
            Folder("olmo2", "Olmo2ForCausalLM", state_olmo2, _TENSORS),
            Folder("olmo3", "Olmo3ForCausalLM", state_olmo3, _TENSORS),
        ),
    ),
    Family("olmoe", build_olmoe, (Folder("olmoe", "OlmoeForCausalLM", state_olmoe),)),
)
