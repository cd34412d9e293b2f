"""GLM-4 (9B, which GGUF files call ChatGLM) and GLM-4-0414: neighbours rotate, in half of each head.

GLM-4-0414 also norms what each block adds. So do GLM-4.1V, GLM-4.6V Flash and GLM-OCR, where pictures turn by three
axes, and in GGUF files halves of a head rotate.

GLM 4.5 has experts chosen by sigmoids, beside a block that all tokens go through; its first layers have none.
"""

from __future__ import annotations

from mlxr.kernels.rope_and_write_kv import HeadNormKind
from mlxr.models.components import Experts, Layer, Norms
from mlxr.models.components.weights import NormPlaces
from mlxr.models.families.glm_tower import GLM
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import FolderConfig, TensorLayout
from mlxr.models.folders.mixers import state_expert_width, state_experts
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


def state_moe(c: FolderConfig) -> None:
    """State the sizes of a GLM 4.5."""
    c.state_model(qkv_key="attention_bias")
    c.state_head_norms("use_qk_norm")
    experts = state_experts(
        c,
        count_keys=("n_routed_experts", "num_local_experts"),
        shared_key="n_shared_experts",
        shared="count",
        scoring="sigmoid",
        renormalises=True,
    )
    state_expert_width(c, experts)
    state_rotation(c, part=0.5)


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


def build_moe(m: Metadata) -> Model:
    """Return the model of these metadata: a GLM 4.5."""
    norms, rope = Norms(m.rms_eps, feed_forward="post_attention_norm"), m.rope()
    head_norms: HeadNormKind | None = "each" if m.has_head_norms() else None
    experts = Experts(
        m.experts,
        m.expert_features,
        m.activation(),
        m.routing("sigmoid", renormalises=True, floor=1e-20),
        choice_bias=True,
        shared_features=m.integer("expert_shared_count", 0, default=0) * m.expert_features,
    )
    return m.model(
        Layer(
            m.attention(rope, window=window, head_norms=head_norms),
            experts if has_experts else m.feed_forward(),
            norms,
        )
        for window, has_experts in zip(m.windows(), m.has_experts, strict=True)
    )


TOWERS = (GLM,)
_TENSORS = TensorLayout(_AFTER, turns_neighbours=True)
_MOE_TENSORS = TensorLayout({"post_attention_layernorm": "post_attention_norm"})
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
    Family("glm4moe", build_moe, (Folder("glm4_moe", "Glm4MoeForCausalLM", state_moe, _MOE_TENSORS),)),
)
