"""Folders of gpt-oss, whose stacks of experts have rows that alternate."""

from __future__ import annotations

from mlxr.models.folders.config import FolderConfig
from mlxr.models.folders.family import FolderFamily
from mlxr.models.folders.mixers import state_expert_width, state_experts
from mlxr.models.folders.rotations import state_rotation, state_windows
from mlxr.models.folders.statement import TensorLayout


def state(c: FolderConfig) -> None:
    """State the sizes of a model."""
    c.state_model(biases="block")
    keys = ("num_local_experts", "num_experts")
    state_expert_width(c, state_experts(c, count_keys=keys, features_key="intermediate_size"))
    state_rotation(c, truncates_yarn=False)
    state_windows(c, default=128, full_every=2)


FOLDERS = (FolderFamily("gpt_oss", "GptOssForCausalLM", "gpt-oss", state, TensorLayout(alternates=True)),)
