"""GLM-4 (9B, which GGUF files call ChatGLM) and GLM-4-0414: neighbours rotate, in half of each head.

GLM-4-0414 also norms what each block adds. So do GLM-4.1V, GLM-4.6V Flash and GLM-OCR, where pictures turn by three
axes, and in GGUF files halves of a head rotate.
"""

from __future__ import annotations

from mlxr.models.components import Layer, Norms
from mlxr.models.components.weights import NormPlaces
from mlxr.models.families.glm_tower import GLM
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import FolderConfig, TensorLayout
from mlxr.models.folders.rotations import state_rotation, state_sections
from mlxr.models.metadata import SECTIONS, Metadata
from mlxr.models.model import Model

_AFTER = {"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"}


def state(c: FolderConfig) -> None:
    """State the sizes of a model."""
    c.state_model(biases="qkv" if c.fields.flag("attention_bias", True) else None)
    c.state_width()
    state_rotation(c, part=0.5)


def state_seeing(c: FolderConfig) -> None:
    """State the text of a GLM-4.1V or a GLM-OCR."""
    c.state_model(biases=None if "ocr" in c.fields.text("model_type", default="") else "qkv")
    c.state_width()
    state_rotation(c, part=1.0, has_sections=True)
    state_sections(c, shuffles=False)


def _build(m: Metadata, places: NormPlaces) -> Model:
    has_sections = m.fields.get(SECTIONS) is not None
    rope = m.rope(shuffles_sections=False) if has_sections else m.rope(interleaved=True)
    norms = Norms(m.rms_eps, places=places)
    layers = (Layer(m.attention(rope), m.feed_forward(), norms) for _ in range(m.layers))
    return m.model(layers, joins=("ffn_up",))


def build_chatglm(m: Metadata) -> Model:
    """Return the model of these metadata: a GLM-4."""
    return _build(m, "before")


def build_glm4(m: Metadata) -> Model:
    """Return the model of these metadata: a GLM-4-0414."""
    return _build(m, "both")


TOWERS = (GLM,)
_TENSORS = TensorLayout(_AFTER, turns_neighbours=True)
FAMILIES = (
    Family("chatglm", build_chatglm, (Folder("glm", "GlmForCausalLM", state, TensorLayout(turns_neighbours=True)),)),
    Family(
        "glm4",
        build_glm4,
        (
            Folder("glm4", "Glm4ForCausalLM", state, _TENSORS),
            Folder("glm4v_text", "Glm4vForConditionalGeneration", state_seeing, _TENSORS),
            Folder("glm_ocr_text", "GlmOcrForConditionalGeneration", state_seeing, _TENSORS),
        ),
    ),
)
