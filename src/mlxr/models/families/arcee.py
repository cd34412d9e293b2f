"""Arcee's AFM: Llama's layers, whose feed-forward blocks have no gate but a squared ReLU."""

from __future__ import annotations

from mlxr.models.components import Layer, Norms
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import FolderConfig
from mlxr.models.folders.rotations import state_rotation
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model


def state(c: FolderConfig) -> None:
    """State the sizes of a model."""
    c.state_model(kv_heads=c.heads, activation="relu_squared", biases="block")
    c.state_width()
    state_rotation(c)


def build(m: Metadata) -> Model:
    """Return the model of these metadata."""
    norms, rope = Norms(m.rms_eps), m.rope(interleaved=True)
    return m.model(
        Layer(m.attention(rope), m.feed_forward("relu_squared", gated=False), norms) for _ in range(m.layers)
    )


FAMILIES = (Family("arcee", build, (Folder("arcee", "ArceeForCausalLM", state),)),)
