"""Families without a gate but with squared ReLU: Nemotron and Minitron, with layer norms that have biases and are
stored minus one, and half of whose heads rotates; Jais 2, with biases everywhere; and Arcee's AFM, otherwise like
Llama."""

from __future__ import annotations

from mlxr.models.components import Layer, Norms, Rope
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import LAYER_EPS, FolderConfig, TensorLayout
from mlxr.models.folders.rotations import state_rotation
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model


def state(c: FolderConfig) -> None:
    """State the sizes of a model."""
    c.state_model(kv_heads=c.heads, eps=(LAYER_EPS,), eps_key="norm_eps", activation="relu_squared", biases="block")
    c.state_width()
    state_rotation(c, part=0.5)


def state_jais2(c: FolderConfig) -> None:
    """State the sizes of a Jais 2."""
    c = c.rename({}, {"attention_bias": True, "mlp_bias": True})
    c.state_model(
        kv_heads=c.heads, eps=(LAYER_EPS,), eps_key="layer_norm_eps", activation="relu_squared", biases="block"
    )
    c.state_width()
    state_rotation(c)


def state_arcee(c: FolderConfig) -> None:
    """State the sizes of an AFM."""
    c.state_model(kv_heads=c.heads, activation="relu_squared", biases="block")
    c.state_width()
    state_rotation(c)


def build(m: Metadata) -> Model:
    """Return the model of these metadata."""
    return _build(m, Norms(m.layer_eps, kind="layer", bias=True), m.rope())


def build_arcee(m: Metadata) -> Model:
    """Return the model of these metadata, which rotates neighbours."""
    return _build(m, Norms(m.rms_eps), m.rope(interleaved=True))


def _build(m: Metadata, norms: Norms, rope: Rope) -> Model:
    return m.model(
        Layer(m.attention(rope), m.feed_forward("relu_squared", gated=False), norms) for _ in range(m.layers)
    )


FAMILIES = (
    Family("nemotron", build, (Folder("nemotron", "NemotronForCausalLM", state, TensorLayout(norms_from_one=True)),)),
    Family("jais2", build, (Folder("jais2", "Jais2ForCausalLM", state_jais2),)),
    Family("arcee", build_arcee, (Folder("arcee", "ArceeForCausalLM", state_arcee),)),
)
