"""Phi-3 and Phi-4: Llama's layers, stretched by longrope; files join q, k and v, and gate and up."""

from __future__ import annotations

from mlxr.models.components import Layer, Norms
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import FolderConfig
from mlxr.models.folders.rotations import state_rotation, state_windows
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model


def state(c: FolderConfig) -> None:
    """State the sizes of a model."""
    c.state_model(kv_heads=c.heads)
    c.state_width()
    state_rotation(c)
    state_windows(c, default=0)


def build(m: Metadata) -> Model:
    """Return the model of these metadata."""
    norms, rope = Norms(m.rms_eps), m.rope()
    layers = (Layer(m.attention(rope, window=window), m.feed_forward(), norms) for window in m.windows())
    return m.model(layers, joins=("attn_qkv", "ffn_up"))


FAMILIES = (Family("phi3", build, (Folder("phi3", "Phi3ForCausalLM", state),)),)
