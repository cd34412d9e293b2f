"""PLaMo 1 and 3: the first has both blocks side by side after one norm; the third norms heads, and blocks before and
after, and keeps gate and up as one tensor; seven layers in eight have windows.

Source: llama.cpp, src/models/plamo.cpp and plamo3.cpp.
"""

from __future__ import annotations

from mlxr.models.components import Layer, Norms, Rope
from mlxr.models.components.feed_forward import GATE_AND_UP
from mlxr.models.family import Family
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model

_BARE = ("post_attention_norm", "post_ffw_norm")


def build(m: Metadata) -> Model:
    """Return the model of these metadata."""
    layer = Layer(m.attention(m.rope()), m.feed_forward(), Norms(m.rms_eps), is_parallel=True)
    return m.model([layer] * m.layers)


def build_plamo3(m: Metadata) -> Model:
    """Return the model of these metadata; the rotation of layers with windows is not stretched."""
    norms, rope = Norms(m.rms_eps, places="both"), m.rope()
    window_rope = Rope(m.window_theta(10000.0), rope.dim, interleaved=False, has_factors=False)
    layers = [
        Layer(
            m.attention(window_rope if windowed else rope, window=m.window if windowed else None, head_norms="each"),
            m.feed_forward(),
            norms,
        )
        for windowed in m.windowed(full_every=8)
    ]
    return m.model(layers, joins=(GATE_AND_UP,))


FAMILIES = (Family("plamo", build), Family("plamo3", build_plamo3, bare_names=_BARE))
