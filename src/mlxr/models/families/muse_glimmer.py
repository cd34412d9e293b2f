"""Muse-Glimmer: a norm without a weight behind the embeddings, a gate of attention's result, blocks normed before and
after.

Three layers in four have windows and rotate, the others do neither. Logits are scaled, then capped. The factor of
queries that folders state is the weight of the queries' norm in GGUF files. Source: llama.cpp,
src/models/muse-glimmer.cpp; transformers, models/muse_glimmer.
"""

from __future__ import annotations

from dataclasses import replace

from mlxr.models.components import NO_ROPE, Embeddings, Layer, Norms
from mlxr.models.family import Family
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model

_AFTER_EPS = 1e-8  # of the norms of what blocks add, which no key states


def build(m: Metadata) -> Model:
    """Return the model of these metadata."""
    norms, rope = Norms(m.rms_eps, places="both", after_eps=_AFTER_EPS), m.rope(interleaved=True)
    turns = replace(rope, theta=m.window_theta(rope.theta))
    layers = []
    for windowed in m.windowed(full_every=4):
        attention = m.attention(
            turns if windowed else NO_ROPE, window=m.window if windowed else None, head_norms="each"
        )
        layers.append(Layer(replace(attention, own_gate=True), m.feed_forward(), norms))
    return m.model(
        layers,
        embeddings=Embeddings(has_weight=False),
        logit_scale=m.scale("logit_scale") or 1.0,
        final_softcap=m.scale("final_logit_softcapping"),
    )


FAMILIES = (Family("muse-glimmer", build),)
