"""SmallThinker: experts with ReLU, chosen by the stream before the layer attends. If files state a window, every fourth
layer, from the first on, has none and rotates nothing.

Source: llama.cpp, src/models/smallthinker.cpp.
"""

from __future__ import annotations

from dataclasses import replace

from mlxr.models.components import NO_ROPE, Experts, Layer, Norms
from mlxr.models.family import Family
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model


def build(m: Metadata) -> Model:
    """Return the model of these metadata."""
    rope, has_windows, rule = m.rope(), m.stated_window is not None, m.routing("sigmoid", renormalises=True)
    experts = Experts(m.experts, m.expert_features, "relu", rule, looks_back=True)
    full, windowed = m.attention(rope), m.attention(rope)
    if has_windows:
        rope = replace(rope, theta=m.window_theta(rope.theta))
        full, windowed = m.attention(NO_ROPE), m.attention(rope, window=m.window)
    norms = Norms(m.rms_eps)
    return m.model(Layer(windowed if index % 4 else full, experts, norms) for index in range(m.layers))


FAMILIES = (Family("smallthinker", build),)
