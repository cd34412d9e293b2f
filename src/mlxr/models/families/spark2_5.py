"""Spark 2.5: each head has a gate, feed-forward blocks have GELU, and most layers have windows, whose rotation may have
another base and another size.

Source: llama.cpp, src/models/spark2-5.cpp.
"""

from __future__ import annotations

from dataclasses import replace

from mlxr.models import limits
from mlxr.models.components import Layer, Norms
from mlxr.models.family import Family
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model


def build(m: Metadata) -> Model:
    """Return the model of these metadata."""
    norms, rope = Norms(m.rms_eps), m.rope()
    dim = m.integer("rope.dimension_count_swa", 2, limits.MAX_HEAD_DIM, default=rope.dim)
    window_rope = replace(rope, theta=m.window_theta(rope.theta), dim=dim, has_factors=False)
    layers = []
    for windowed in m.windowed(full_every=4):
        attention = m.attention(window_rope if windowed else rope, window=m.window if windowed else None)
        layers.append(Layer(replace(attention, own_gate=True, gates_heads=True), m.feed_forward("gelu_tanh"), norms))
    return m.model(layers)


FAMILIES = (Family("spark2_5", build),)
