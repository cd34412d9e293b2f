"""dots.llm1: GLM 4.5's experts, and each head of queries and keys is normed."""

from __future__ import annotations

from mlxr.models.components import Experts, Layer, Norms
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import FolderConfig
from mlxr.models.folders.mixers import state_expert_width, state_experts
from mlxr.models.folders.rotations import state_rotation, state_windows
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model


def state(c: FolderConfig) -> None:
    """State the sizes of a model, which has windows only in layers that it lists."""
    c.state_model(kv_heads=c.heads, biases="block")
    experts = state_experts(
        c,
        count_keys=("n_routed_experts", "num_local_experts"),
        shared_key="n_shared_experts",
        shared="count",
        scoring="sigmoid",
        renormalises=False,
    )
    state_expert_width(c, experts)
    state_rotation(c)
    if c.fields.get("layer_types") is not None:
        state_windows(c)


def build(m: Metadata) -> Model:
    """Return the model of these metadata."""
    norms, rope = Norms(m.rms_eps), m.rope()
    experts = Experts(
        m.experts,
        m.expert_features,
        m.activation(),
        m.routing("sigmoid", floor=1e-20),
        choice_bias=True,
        shared_features=m.integer("expert_shared_count", 0, default=0) * m.expert_features,
    )
    return m.model(
        Layer(m.attention(rope, window=window, head_norms="each"), experts if flag else m.feed_forward(), norms)
        for window, flag in zip(m.windows(), m.has_experts, strict=True)
    )


FAMILIES = (Family("dots1", build, (Folder("dots1", "Dots1ForCausalLM", state),)),)
