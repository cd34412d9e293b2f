"""Folders of GLM 4.5, whose experts are chosen by sigmoids."""

from __future__ import annotations

from mlxr.models.folders.config import FolderConfig
from mlxr.models.folders.family import FolderFamily
from mlxr.models.folders.mixers import state_expert_width, state_experts
from mlxr.models.folders.rotations import state_rotation


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


FOLDERS = (FolderFamily("glm4_moe", "Glm4MoeForCausalLM", "glm4moe", state),)
