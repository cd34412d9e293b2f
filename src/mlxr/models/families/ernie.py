"""ERNIE 4.5 (dense): Llama's layers, of which folders rotate neighbours, too."""

from __future__ import annotations

from mlxr.models.components import Layer, Norms
from mlxr.models.family import Family, FolderFamily
from mlxr.models.folders.config import FolderConfig, TensorLayout
from mlxr.models.folders.rotations import state_rotation
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model


def state(c: FolderConfig) -> None:
    """State the sizes of a model."""
    c.state_model(kv_heads=c.heads, biases="use" if c.fields.flag("use_bias", False) else None, tied=True)
    c.state_width()
    state_rotation(c)


def build(m: Metadata) -> Model:
    """Return the model of these metadata."""
    norms, rope = Norms(m.rms_eps), m.rope(interleaved=True)
    return m.model(Layer(m.attention(rope), m.feed_forward(), norms) for _ in range(m.layers))


FOLDERS = (FolderFamily("ernie4_5", "Ernie4_5ForCausalLM", "ernie4_5", state, TensorLayout(turns_neighbours=True)),)
FAMILIES = (Family("ernie4_5", build),)
