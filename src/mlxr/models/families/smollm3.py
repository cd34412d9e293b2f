"""SmolLM3: Llama's layers; every fourth one rotates nothing."""

from __future__ import annotations

from mlxr.models.components import NO_ROPE, Layer, Norms
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import FolderConfig
from mlxr.models.folders.rotations import state_rotation, state_turning_layers
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model

_STATED = "no_rope_layers"  # 1 means that a layer rotates


def state(c: FolderConfig) -> None:
    """State the sizes of a model."""
    c.state_model(biases="block", tied=True)
    c.state_width()
    state_rotation(c)
    usual = [(index + 1) % 4 != 0 for index in range(c.layers)]
    stated = c.fields.get(_STATED)
    if stated is None:
        stated = usual
    if not isinstance(stated, list) or len(stated) != c.layers or any(flag not in (0, 1) for flag in stated):
        c.fields.refuse(_STATED, f"a list of {c.layers}, each one 0 or 1")
    state_turning_layers(c, [*map(bool, stated)], usual)


def build(m: Metadata) -> Model:
    """Return the model of these metadata."""
    norms, rope = Norms(m.rms_eps), m.rope(interleaved=True)
    rotates = m.rotates(m.all_but_last_of(4))
    return m.model(
        Layer(m.attention(rope if flag else NO_ROPE, window=window), m.feed_forward(), norms)
        for flag, window in zip(rotates, m.windows(), strict=True)
    )


FAMILIES = (Family("smollm3", build, (Folder("smollm3", "SmolLM3ForCausalLM", state),)),)
