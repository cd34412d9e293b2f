"""Folders of StarCoder 2."""

from __future__ import annotations

from mlxr.models.folders.config import LAYER_EPS, FolderConfig
from mlxr.models.folders.family import FolderFamily
from mlxr.models.folders.rotations import state_rotation, state_windows


def state(c: FolderConfig) -> None:
    """State the sizes of a model."""
    eps_key = c.find_key("norm_epsilon", "layer_norm_eps")
    c.state_model(eps=(LAYER_EPS,), eps_key=eps_key, activation="gelu_tanh", biases="use", tied=True)
    c.state_width()
    state_rotation(c)
    state_windows(c, default=0)


FOLDERS = (FolderFamily("starcoder2", "Starcoder2ForCausalLM", "starcoder2", state),)
