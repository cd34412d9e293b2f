"""Folders of Qwen2 and Qwen3, with experts and without."""

from __future__ import annotations

from mlxr.models.folders.config import FolderConfig
from mlxr.models.folders.family import FolderFamily
from mlxr.models.folders.mixers import state_expert_width, state_experts
from mlxr.models.folders.rotations import state_rotation, state_windows


def state_qwen2(c: FolderConfig) -> None:
    """State the sizes of a Qwen2."""
    c.state_model(biases="qkv")
    c.state_width()
    state_rotation(c)
    state_windows(c, switch=True)


def state_qwen3(c: FolderConfig) -> None:
    """State the sizes of a Qwen3."""
    c.state_model(biases="block")
    c.state_width()
    state_rotation(c)
    state_windows(c, switch=True)


def state_qwen2_moe(c: FolderConfig) -> None:
    """State a Qwen2 with experts, beside a block that all tokens go through."""
    c.state_model(biases="qkv")
    state_expert_width(c, state_experts(c, shared_key="shared_expert_intermediate_size"))
    state_rotation(c)
    state_windows(c, switch=True)


def state_qwen3_moe(c: FolderConfig) -> None:
    """State a Qwen3 with experts."""
    c.state_model(biases="block")
    state_expert_width(c, state_experts(c, renormalises=True))
    state_rotation(c)
    state_windows(c, switch=True)


FOLDERS = (
    FolderFamily("qwen2", "Qwen2ForCausalLM", "qwen2", state_qwen2),
    FolderFamily("qwen3", "Qwen3ForCausalLM", "qwen3", state_qwen3),
    FolderFamily("qwen2_moe", "Qwen2MoeForCausalLM", "qwen2moe", state_qwen2_moe),
    FolderFamily("qwen3_moe", "Qwen3MoeForCausalLM", "qwen3moe", state_qwen3_moe),
)
