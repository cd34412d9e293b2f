"""Qwen, Qwen2 and Qwen3, with experts and without.

Qwen and Qwen2 have biases of queries, keys and values, Qwen3 RMS norms of the queries and keys of each head. Qwen2 MoE
has a block that all tokens go through beside the experts, and a gate that weighs it for each token. The texts of
Qwen2-VL and Qwen2.5-VL are those of Qwen2, that of Qwen3-VL is Qwen3's; pictures turn by three axes, and those of
Qwen3-VL add rows behind the first layers ("deepstack"). Mellum 2 is a Qwen3 with experts; three layers in four have
windows, and their rotation is not stretched.
"""

from __future__ import annotations

from dataclasses import replace

from mlxr.models import limits
from mlxr.models.components import Experts, Layer, Norms, Rope
from mlxr.models.families.internvl import INTERNVL
from mlxr.models.families.qwen_tower import QWEN2, QWEN25, TOWER
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import FolderConfig
from mlxr.models.folders.mixers import read_expert_layers, state_expert_width, state_experts
from mlxr.models.folders.rotations import state_rotation, state_sections, state_window_theta, state_windows
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model

_DEEP = "n_deepstack_layers"


def state_qwen2(c: FolderConfig) -> None:
    """State the sizes of a Qwen2."""
    c.state_model(biases="qkv")
    c.state_width()
    state_rotation(c)
    state_windows(c, switch=True)


def state_qwen3(c: FolderConfig) -> None:
    """State the sizes of a Qwen3."""
    c.state_model(biases="block")
    c.state_width()
    state_rotation(c)
    state_windows(c, switch=True)


def state_qwen2_moe(c: FolderConfig) -> None:
    """State a Qwen2 with experts, beside a block that all tokens go through."""
    c.state_model(biases="qkv")
    state_expert_width(c, state_experts(c, shared_key="shared_expert_intermediate_size"))
    state_rotation(c)
    state_windows(c, switch=True)


def state_qwen3_moe(c: FolderConfig) -> None:
    """State a Qwen3 with experts."""
    c.state_model(biases="block")
    state_expert_width(c, state_experts(c, renormalises=True))
    state_rotation(c)
    state_windows(c, switch=True)


def state_qwen2_vl(c: FolderConfig) -> None:
    """State the text of a Qwen2-VL or Qwen2.5-VL."""
    c.state_model(biases="qkv")
    c.state_width()
    state_rotation(c, theta=1e6, has_sections=True)
    state_sections(c, shuffles=False)
    state_windows(c, switch=True)


def state_mellum(c: FolderConfig) -> None:
    """State a Mellum 2; a list says for each layer if it has a window."""
    c.state_model(biases="block")
    flags = state_experts(c, renormalises=True, layers=read_expert_layers(c))
    state_expert_width(c, flags)
    state_rotation(c)
    if any(state_windows(c, default=0, full_every=4, states_layers=True)):
        state_window_theta(c, c.fields.number("rope_theta", 1.0001, limits.MAX_THETA, default=10000.0))


def state_qwen3_vl(c: FolderConfig) -> None:
    """State the text of a Qwen3-VL."""
    state_qwen3(c)
    state_sections(c)
    tower = c.whole.mapping("vision_config")
    indexes = None if tower is None else tower.get("deepstack_visual_indexes")
    c.out.put(_DEEP, len(indexes) if isinstance(indexes, list) else 0)


def build_qwen2(m: Metadata) -> Model:
    """Return a dense model."""
    return _build_qwen2(m, Norms(m.rms_eps), m.rope())


def build_qwen2_vl(m: Metadata) -> Model:
    """Return a dense model that pictures can be shown to."""
    return _build_qwen2(m, Norms(m.rms_eps), m.rope(shuffles_sections=False))


def _build_qwen2(m: Metadata, norms: Norms, rope: Rope) -> Model:
    return m.model(
        Layer(m.attention(rope, window=window, qkv_bias=True), m.feed_forward(), norms) for window in m.windows()
    )


def build_qwen(m: Metadata) -> Model:
    """Return a first Qwen, whose files state the features of gate and up together (llama.cpp, src/models/qwen.cpp)."""
    norms, rope, features = Norms(m.rms_eps), m.rope(), m.integer("feed_forward_length", 2) // 2
    layer = Layer(m.attention(rope, qkv_bias=True), m.feed_forward(features=features), norms)
    return m.model([layer] * m.layers)


def build_qwen2_moe(m: Metadata) -> Model:
    """Return a model with experts."""
    norms, rope = Norms(m.rms_eps), m.rope()
    shared = m.shared_features(old_key="feed_forward_length")
    experts = Experts(
        m.experts,
        m.expert_features,
        m.activation(),
        m.routing(),
        shared_features=shared,
        shared_gate=shared > 0,
    )
    return m.model(
        Layer(
            m.attention(rope, window=window, qkv_bias=True),
            experts if has_experts else m.feed_forward(),
            norms,
        )
        for window, has_experts in zip(m.windows(), m.has_experts, strict=True)
    )


def build_qwen3(m: Metadata) -> Model:
    """Return a dense model."""
    return _build_qwen3(m, m.rope())


def build_qwen3_vl(m: Metadata) -> Model:
    """Return a dense model that pictures can be shown to."""
    return _build_qwen3(m, m.rope(shuffles_sections=True), picture_layers=_read_deep(m))


def _build_qwen3(m: Metadata, rope: Rope, picture_layers: int = 0) -> Model:
    norms = Norms(m.rms_eps)
    layers = [
        Layer(m.attention(rope, window=window, head_norms="each"), m.feed_forward(), norms) for window in m.windows()
    ]
    return m.model(layers, picture_layers=picture_layers)


def _read_deep(m: Metadata) -> int:
    return m.integer(_DEEP, 0, m.layers, default=0)


def build_qwen3_moe(m: Metadata) -> Model:
    """Return a model with experts."""
    return _build_qwen3_moe(m, m.rope())


def build_qwen3_vl_moe(m: Metadata) -> Model:
    """Return a model with experts that pictures can be shown to."""
    return _build_qwen3_moe(m, m.rope(shuffles_sections=True), picture_layers=_read_deep(m))


def build_mellum(m: Metadata) -> Model:
    """Return a model with experts; three of four layers have windows."""
    rope = m.rope()
    plain = replace(rope, theta=m.window_theta(rope.theta), scaling=None, has_factors=False)
    return _build_qwen3_moe(m, rope, plain, full_every=4)


def _build_qwen3_moe(
    m: Metadata, rope: Rope, window_rope: Rope | None = None, *, full_every: int | None = None, picture_layers: int = 0
) -> Model:
    norms = Norms(m.rms_eps)
    experts = Experts(m.experts, m.expert_features, m.activation(), m.routing(renormalises=True))
    layers = []
    for windowed, has_experts in zip(m.windowed(full_every), m.has_experts, strict=True):
        own_rope = window_rope if windowed and window_rope is not None else rope
        attention = m.attention(own_rope, window=m.window if windowed else None, head_norms="each")
        layers.append(Layer(attention, experts if has_experts else m.feed_forward(), norms))
    return m.model(layers, picture_layers=picture_layers)


TOWERS = TOWER, QWEN25, QWEN2, INTERNVL
_VL_CLASSES = {"qwen2_vl": "Qwen2VLForConditionalGeneration", "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration"}
_VL_FOLDERS = tuple(  # older ones have the text's keys beside the tower's
    Folder(kind + end, name, state_qwen2_vl) for kind, name in _VL_CLASSES.items() for end in ("_text", "")
)
FAMILIES = (
    Family("qwen", build_qwen),
    Family("qwen2", build_qwen2, (Folder("qwen2", "Qwen2ForCausalLM", state_qwen2),)),
    Family("qwen2vl", build_qwen2_vl, _VL_FOLDERS),
    Family("qwen2moe", build_qwen2_moe, (Folder("qwen2_moe", "Qwen2MoeForCausalLM", state_qwen2_moe),)),
    Family("qwen3", build_qwen3, (Folder("qwen3", "Qwen3ForCausalLM", state_qwen3),)),
    Family("qwen3moe", build_qwen3_moe, (Folder("qwen3_moe", "Qwen3MoeForCausalLM", state_qwen3_moe),)),
    Family("qwen3vl", build_qwen3_vl, (Folder("qwen3_vl_text", "Qwen3VLForConditionalGeneration", state_qwen3_vl),)),
    Family("qwen3vlmoe", build_qwen3_vl_moe),
    Family("mellum", build_mellum, (Folder("mellum", "MellumForCausalLM", state_mellum),)),
)
