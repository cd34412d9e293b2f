"""GLM 4.5: experts chosen by sigmoids, beside a block that all tokens go through; the first layers have none."""

from __future__ import annotations

from mlxr.kernels.rope_and_write_kv import HeadNormKind
from mlxr.models.components import Experts, Layer, Norms
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import FolderConfig, TensorLayout
from mlxr.models.folders.mixers import state_expert_width, state_experts
from mlxr.models.folders.rotations import state_rotation
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model

_TENSORS = TensorLayout({"post_attention_layernorm": "post_attention_norm"})


def state(c: FolderConfig) -> None:
    """State the sizes of a model."""
    c.state_model(qkv_key="attention_bias")
    c.state_head_norms("use_qk_norm")
    experts = state_experts(
        c,
        count_keys=("n_routed_experts", "num_local_experts"),
        shared_key="n_shared_experts",
        shared="count",
        scoring="sigmoid",
        renormalises=True,
    )
    state_expert_width(c, experts)
    state_rotation(c, part=0.5)


def build(m: Metadata) -> Model:
    """Return the model of these metadata."""
    norms, rope = Norms(m.rms_eps, feed_forward="post_attention_norm"), m.rope()
    head_norms: HeadNormKind | None = "each" if m.has_head_norms() else None
    experts = Experts(
        m.experts,
        m.expert_features,
        m.activation(),
        m.routing("sigmoid", renormalises=True, floor=1e-20),
        choice_bias=True,
        shared_features=m.integer("expert_shared_count", 0, default=0) * m.expert_features,
    )
    return m.model(
        Layer(
            m.attention(rope, window=window, head_norms=head_norms),
            experts if has_experts else m.feed_forward(),
            norms,
        )
        for window, has_experts in zip(m.windows(), m.has_experts, strict=True)
    )


FAMILIES = (Family("glm4moe", build, (Folder("glm4_moe", "Glm4MoeForCausalLM", state, _TENSORS),)),)
