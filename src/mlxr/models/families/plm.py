"""PLM: latent attention, whose queries are made directly, and feed-forward blocks with squared ReLU and no gate.

Source: llama.cpp, src/models/plm.cpp.
"""

from __future__ import annotations

from mlxr.models.components import Layer, Norms
from mlxr.models.family import Family
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model


def build(m: Metadata) -> Model:
    """Return the model of these metadata."""
    attention, block = m.latent_attention(interleaved=True), m.feed_forward("relu_squared", gated=False)
    return m.model([Layer(attention, block, Norms(m.rms_eps))] * m.layers)


FAMILIES = (Family("plm", build),)
