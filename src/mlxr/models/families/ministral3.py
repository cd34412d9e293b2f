"""Ministral 3: Llama's layers, with queries that grow with their position."""

from __future__ import annotations

from mlxr.models.components import Layer, Norms
from mlxr.models.families.pixtral import PIXTRAL
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import FolderConfig
from mlxr.models.folders.rotations import state_rotation, state_windows
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model


def state(c: FolderConfig) -> None:
    """State the sizes of a model."""
    c.state_model()
    c.state_width()
    state_rotation(c)
    state_windows(c, default=0)


def build(m: Metadata) -> Model:
    """Return the model of these metadata."""
    norms, rope = Norms(m.rms_eps), m.rope(interleaved=True)
    return m.model(Layer(m.attention(rope, window=window), m.feed_forward(), norms) for window in m.windows())


TOWERS = (PIXTRAL,)
FAMILIES = (Family("mistral3", build, (Folder("ministral3", "Ministral3ForCausalLM", state),)),)
