"""gpt-oss: experts with biases and a clamped activation, windows in every other layer, and a sink for each head."""

from __future__ import annotations

from mlxr.models.components import Experts, Layer, Norms
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import FolderConfig, TensorLayout
from mlxr.models.folders.mixers import state_expert_width, state_experts
from mlxr.models.folders.rotations import state_rotation, state_windows
from mlxr.models.metadata import WINDOW_THETA, Metadata
from mlxr.models.model import Model

_TENSORS = TensorLayout({"post_attention_layernorm": "post_attention_norm"}, alternates=True)


def state(c: FolderConfig) -> None:
    """State the sizes of a model."""
    c.state_model(biases="block")
    keys = ("num_local_experts", "num_experts")
    state_expert_width(c, state_experts(c, count_keys=keys, features_key="intermediate_size"))
    state_rotation(c, truncates_yarn=False)
    state_windows(c, default=128, full_every=2)


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


FAMILIES = (Family("gpt-oss", build, (Folder("gpt_oss", "GptOssForCausalLM", state, _TENSORS),)),)
