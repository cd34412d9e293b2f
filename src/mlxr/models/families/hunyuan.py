"""Hunyuan and Maincoder: Llama's layers, in which queries and keys are normed by head after they are rotated.

Hunyuan with experts (A13B) has them in all layers, beside a block that all tokens go through.
"""

from __future__ import annotations

from mlxr.models.components import Experts, Layer, Norms
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import FolderConfig, TensorLayout
from mlxr.models.folders.mixers import state_experts
from mlxr.models.folders.rotations import state_rotation
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model

_NORMS = {"self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm"}
_SHARED = {f"mlp.shared_mlp.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")}


def _state_common(c: FolderConfig) -> None:
    c.state_model(kv_heads=c.heads, biases="block")
    c.state_width()
    state_rotation(c, has_alpha=True)
    c.note(("use_qk_norm",))  # heads are normed whatever it says


def state(c: FolderConfig) -> None:
    """State the sizes of a model; its rotation is called dynamic, but is stretched once, by `alpha`."""
    _state_common(c)
    c.fields.refuse_unless(("num_experts",), (0, 1), "mixture of experts is not supported there")


def state_mixture(c: FolderConfig) -> None:
    """State the sizes of a model with experts, which are as wide as the block beside them."""
    _state_common(c)
    width = "intermediate_size"
    state_experts(c, features_key=width, used_key="moe_topk", shared_key=width, renormalises=True)


def build(m: Metadata) -> Model:
    """Return the model of these metadata; Maincoder rotates neighbours."""
    norms, rope = Norms(m.rms_eps), m.rope(interleaved=m.architecture == "maincoder")
    return m.model(
        Layer(m.attention(rope, window=window, head_norms="turned"), m.feed_forward(), norms) for window in m.windows()
    )


def build_mixture(m: Metadata) -> Model:
    """Return the model of these metadata, which has experts."""
    norms, rope, rule = Norms(m.rms_eps), m.rope(), m.routing(renormalises=True)
    experts = Experts(m.experts, m.expert_features, m.activation(), rule, shared_features=m.shared_features())
    return m.model(Layer(m.attention(rope, head_norms="turned"), experts, norms) for _ in range(m.layers))


FAMILIES = (
    Family("maincoder", build),
    Family(
        "hunyuan-dense", build, (Folder("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", state, TensorLayout(_NORMS)),)
    ),
    Family(
        "hunyuan-moe",
        build_mixture,
        (
            Folder(
                "hunyuan_v1_moe",
                "HunYuanMoEV1ForCausalLM",
                state_mixture,
                TensorLayout({**_NORMS, **_SHARED, "mlp.gate.wg": "ffn_gate_inp"}),
            ),
        ),
    ),
)
