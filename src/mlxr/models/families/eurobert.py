"""EuroBERT, and Llamas that see whole texts (llama-embed-nemotron): Llama's layers without a mask and an output.

GGUF keeps the rotation of the first in halves and that of the others in neighbouring pairs, as of every Llama.
"""

from __future__ import annotations

from functools import partial

from mlxr.models.components import Layer, Norms
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import FolderConfig
from mlxr.models.folders.rotations import state_rotation
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model


def state(c: FolderConfig) -> None:
    """State an encoder with the sizes of a Llama."""
    c.state_model(kv_heads=c.heads, biases="block")
    c.state_width()
    state_rotation(c)
    c.state_encoder()


def build(m: Metadata, *, interleaved: bool) -> Model:
    """Return the model of these metadata."""
    attention = m.attention(m.rope(interleaved=interleaved), is_causal=m.is_causal(False))
    return m.model([Layer(attention, m.feed_forward(), Norms(m.rms_eps))] * m.layers, has_output=False)


FAMILIES = (
    Family("eurobert", partial(build, interleaved=False), (Folder("eurobert", "EuroBertModel", state),)),
    Family(
        "llama-embed",
        partial(build, interleaved=True),
        (Folder("llama_bidirec", "LlamaBidirectionalModel", state),),
    ),
)
