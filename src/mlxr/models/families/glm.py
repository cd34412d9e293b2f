"""GLM-4 (9B, which GGUF files call ChatGLM) and GLM-4-0414: neighbours rotate, in half of each head.

GLM-4-0414 also norms what each block adds.
"""

from __future__ import annotations

from mlxr.models.components import Layer, Norms
from mlxr.models.components.weights import NormPlaces
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import FolderConfig, TensorLayout
from mlxr.models.folders.rotations import state_rotation
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model

_AFTER = {"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"}


def state(c: FolderConfig) -> None:
    """State the sizes of a model."""
    c.state_model(biases="qkv" if c.fields.flag("attention_bias", True) else None)
    c.state_width()
    state_rotation(c, part=0.5)


def _build(m: Metadata, places: NormPlaces) -> Model:
    norms, rope = Norms(m.rms_eps, places=places), m.rope(interleaved=True)
    layers = (Layer(m.attention(rope), m.feed_forward(), norms) for _ in range(m.layers))
    return m.model(layers, joins=("ffn_up",))


def build_chatglm(m: Metadata) -> Model:
    """Return the model of these metadata: a GLM-4."""
    return _build(m, "before")


def build_glm4(m: Metadata) -> Model:
    """Return the model of these metadata: a GLM-4-0414."""
    return _build(m, "both")


FAMILIES = (
    Family("chatglm", build_chatglm, (Folder("glm", "GlmForCausalLM", state, TensorLayout(turns_neighbours=True)),)),
    Family(
        "glm4", build_glm4, (Folder("glm4", "Glm4ForCausalLM", state, TensorLayout(_AFTER, turns_neighbours=True)),)
    ),
)
