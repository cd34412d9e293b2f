"""EXAONE 4: heads of queries and keys are normed, and each block's result instead of its input.

The model of 32B has windows in three of four layers, and these alone rotate; that of 1.2B has none, and all rotate.
"""

from __future__ import annotations

from mlxr.models.components import NO_ROPE, Layer, Norms
from mlxr.models.family import Family, FolderFamily
from mlxr.models.folders.config import FolderConfig, TensorLayout
from mlxr.models.folders.rotations import state_rotation, state_turning_layers, state_windows
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model

_TENSORS = TensorLayout(
    {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
)


def state(c: FolderConfig) -> None:
    """State the sizes of a model. Where a window is stated, layers without it rotate nothing."""
    c.state_model()
    c.state_width()
    state_rotation(c)
    windowed, everywhere = state_windows(c, full_every=4), (True,) * c.layers
    is_hybrid = c.fields.get("sliding_window") is not None or not c.fields.has("sliding_window")
    state_turning_layers(c, windowed if is_hybrid else everywhere, windowed if any(windowed) else everywhere)


def build(m: Metadata) -> Model:
    """Return the model of these metadata."""
    norms, rope, windowed = Norms(m.rms_eps, places="after"), m.rope(), m.windowed(full_every=4)
    rotates = m.rotates(windowed if any(windowed) else (True,) * m.layers)
    return m.model(
        Layer(
            m.attention(rope if turns else NO_ROPE, window=m.window if has_window else None, head_norms="each"),
            m.feed_forward(),
            norms,
        )
        for has_window, turns in zip(windowed, rotates, strict=True)
    )


FOLDERS = (FolderFamily("exaone4", "Exaone4ForCausalLM", "exaone4", state, _TENSORS),)
FAMILIES = (Family("exaone4", build),)
