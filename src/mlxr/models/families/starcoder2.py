"""StarCoder 2: layer norms with biases, and feed-forward blocks without a gate."""

from __future__ import annotations

from mlxr.models.components import Layer, Norms
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import LAYER_EPS, FolderConfig
from mlxr.models.folders.rotations import state_rotation, state_windows
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model


def state(c: FolderConfig) -> None:
    """State the sizes of a model."""
    eps_key = c.find_key("norm_epsilon", "layer_norm_eps")
    c.state_model(eps=(LAYER_EPS,), eps_key=eps_key, activation="gelu_tanh", biases="use", tied=True)
    c.state_width()
    state_rotation(c)
    state_windows(c, default=0)


def build(m: Metadata) -> Model:
    """Return the model of these metadata."""
    norms, rope = Norms(m.layer_eps, kind="layer", bias=True), m.rope()
    return m.model(
        Layer(m.attention(rope, window=window), m.feed_forward("gelu_tanh", gated=False), norms)
        for window in m.windows()
    )


FAMILIES = (Family("starcoder2", build, (Folder("starcoder2", "Starcoder2ForCausalLM", state),)),)
