"""Folders of OLMo 2, OLMo 3 and OLMoE."""

from __future__ import annotations

from mlxr.models.folders.config import FolderConfig
from mlxr.models.folders.family import FolderFamily
from mlxr.models.folders.mixers import state_expert_width, state_experts
from mlxr.models.folders.rotations import state_rotation, state_windows
from mlxr.models.folders.statement import TensorLayout

_TENSORS = TensorLayout(
    {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
)


def state_olmo2(c: FolderConfig) -> None:
    """State the sizes of an OLMo 2."""
    c.state_model(biases="block")
    c.state_width()
    state_rotation(c)


def state_olmo3(c: FolderConfig) -> None:
    """State an OLMo 3: OLMo 2 with windows, of which GGUF has no other name."""
    state_olmo2(c)
    state_windows(c, full_every=4)


def state_olmoe(c: FolderConfig) -> None:
    """State the sizes of an OLMoE."""
    c.state_model(kv_heads=c.heads, biases="block")
    state_expert_width(c, state_experts(c, features_key="intermediate_size"))
    state_rotation(c)


FOLDERS = (
    FolderFamily("olmo2", "Olmo2ForCausalLM", "olmo2", state_olmo2, _TENSORS),
    FolderFamily("olmo3", "Olmo3ForCausalLM", "olmo2", state_olmo3, _TENSORS),
    FolderFamily("olmoe", "OlmoeForCausalLM", "olmoe", state_olmoe),
)
