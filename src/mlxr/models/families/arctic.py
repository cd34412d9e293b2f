"""Arctic: a dense block behind attention, and experts that read what attention reads, by a norm of their own.

Source: llama.cpp, src/models/arctic.cpp.
"""

from __future__ import annotations

from mlxr.models.components import Experts, Layer, Norms
from mlxr.models.family import Family
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model


def build(m: Metadata) -> Model:
    """Return the model of these metadata, whose dense blocks are as wide as the stream."""
    attention = m.attention(m.rope(interleaved=True))
    experts = Experts(m.experts, m.ffn, m.activation(), m.routing(renormalises=True))
    layer = Layer(attention, m.feed_forward(features=m.hidden), Norms(m.rms_eps), beside=experts)
    return m.model([layer] * m.layers)


FAMILIES = (Family("arctic", build),)
