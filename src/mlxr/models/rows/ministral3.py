"""Folders of Ministral 3."""

from __future__ import annotations

from mlxr.models.folders.config import FolderConfig
from mlxr.models.folders.family import FolderFamily
from mlxr.models.folders.rotations import state_rotation, state_windows


def state(c: FolderConfig) -> None:
    """State the sizes of a model."""
    c.state_model()
    c.state_width()
    state_rotation(c)
    state_windows(c, default=0)


FOLDERS = (FolderFamily("ministral3", "Ministral3ForCausalLM", "mistral3", state),)
