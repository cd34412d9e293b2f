"""Folders of Phi-3, Phi-3.5 and Phi-4."""

from __future__ import annotations

from mlxr.models.folders.config import FolderConfig
from mlxr.models.folders.family import FolderFamily
from mlxr.models.folders.rotations import state_rotation, state_windows


def state(c: FolderConfig) -> None:
    """State the sizes of a model."""
    c.state_model(kv_heads=c.heads)
    c.state_width()
    state_rotation(c)
    state_windows(c, default=0)


FOLDERS = (FolderFamily("phi3", "Phi3ForCausalLM", "phi3", state),)
