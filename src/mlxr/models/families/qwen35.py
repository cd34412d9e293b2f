"""Qwen3.5 and Qwen3-Next: gated delta nets in three of four layers, gated attention in the others; with experts
beside a block that all tokens go through, or without.

GGUF files have the value heads of Qwen3.5's gated delta nets in another order than folders: the first ones of all key
heads, then the second ones.
"""

from __future__ import annotations

from mlxr.models import limits
from mlxr.models.components import Experts, GatedDelta, Layer, Norms
from mlxr.models.families.qwen_tower import TOWER
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import Biases, FolderConfig, TensorLayout
from mlxr.models.folders.mixers import read_divisor, read_recurrent_layers, state_expert_width, state_experts
from mlxr.models.folders.rotations import state_rotation, state_sections
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model

NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_qkvz": "ssm_in",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
_TENSORS = TensorLayout(NAMES, norms_from_one=True)
_EVERY = "full_attention_interval"  # the last of so many layers attends
_USUAL_EVERY = 4


def _state_common(c: FolderConfig, biases: Biases = None) -> None:
    c.state_model(biases=biases)
    state_rotation(c, part=0.25)
    state_sections(c)
    _state_delta(c)


def _state_delta(c: FolderConfig) -> None:
    fields, out = c.fields, c.out
    heads = fields.integer("linear_num_value_heads", 1, limits.MAX_HEADS, default=32)
    value_dim = fields.integer("linear_value_head_dim", 1, limits.MAX_STATED, default=128)
    out.put("ssm.conv_kernel", fields.integer("linear_conv_kernel_dim", 2, limits.MAX_TAPS, default=4))
    out.put("ssm.state_size", fields.integer("linear_key_head_dim", 1, limits.MAX_STATED, default=128))
    out.put("ssm.group_count", read_divisor(fields, "linear_num_key_heads", heads, "value heads"))
    out.put("ssm.time_step_rank", heads, fields, "linear_num_value_heads")
    out.put("ssm.inner_size", heads * value_dim, fields, "linear_value_head_dim")
    if fields.get("layer_types") is None:
        out.put(_EVERY, fields.integer(_EVERY, 1, c.layers, default=min(c.layers, _USUAL_EVERY)))
        return
    recurrent = read_recurrent_layers(c, "linear_attention")
    for every in range(1, c.layers + 1):
        if recurrent == tuple((index + 1) % every != 0 for index in range(c.layers)):
            out.put(_EVERY, every)
            return
    out.put("attention.recurrent_layers", list(recurrent))


def state_dense(c: FolderConfig) -> None:
    """State a model without experts."""
    _state_common(c)
    c.state_width()


def state_mixture(c: FolderConfig) -> None:
    """State a model with experts, beside a block that all tokens go through."""
    _state_common(c)
    _state_experts(c)


def state_next(c: FolderConfig) -> None:
    """State the sizes of a Qwen3-Next."""
    _state_common(c, "block")
    _state_experts(c)


def _state_experts(c: FolderConfig) -> None:
    experts = state_experts(c, shared_key="shared_expert_intermediate_size", renormalises=True)
    state_expert_width(c, experts)


def build(m: Metadata) -> Model:
    """Return a model of Qwen3.5."""
    return _build(m, is_tiled=True)


def build_next(m: Metadata) -> Model:
    """Return a model of Qwen3-Next."""
    return _build(m, is_tiled=False)


def _build(m: Metadata, *, is_tiled: bool) -> Model:
    norms, rope = Norms(m.rms_eps, feed_forward="post_attention_norm"), m.rope(shuffles_sections=True)
    delta, experts, kv_heads = _read_delta(m, is_tiled), _read_experts(m), max(m.kv_counts)
    layers = []
    for index, is_recurrent in enumerate(_find_recurrent(m)):
        attention = m.attention(rope, kv_heads=kv_heads, head_norms="each", gated=True)
        has_experts = experts is not None and m.has_experts[index]
        layers.append(Layer(delta if is_recurrent else attention, experts if has_experts else m.feed_forward(), norms))
    return m.model(layers)


def _read_delta(m: Metadata, is_tiled: bool) -> GatedDelta:
    heads, value_dim = m.ssm_heads("value heads")
    key_heads = m.ssm_groups(heads, "value heads")
    key_dim = m.integer("ssm.state_size", 1, limits.MAX_STATED)
    taps = m.integer("ssm.conv_kernel", 2, limits.MAX_TAPS)
    return GatedDelta(key_heads, heads, key_dim, value_dim, taps, tiled=is_tiled and key_heads < heads)


def _find_recurrent(m: Metadata) -> tuple[bool, ...]:
    """Return which layers are recurrent: a flag for each, or all but one in so many."""
    stated = m.fields.flags("attention.recurrent_layers", m.layers)
    every = m.integer(_EVERY, 1, m.layers, default=min(m.layers, _USUAL_EVERY))
    return stated or m.all_but_last_of(every)


def _read_experts(m: Metadata) -> Experts | None:
    if not m.experts:
        return None
    shared = m.shared_features(old_key="feed_forward_length")
    return Experts(
        m.experts,
        m.expert_features,
        m.activation(),
        m.routing(renormalises=True),
        shared_features=shared,
        shared_gate=shared > 0,
    )


TOWERS = (TOWER,)
FAMILIES = (
    Family("qwen35", build, (Folder("qwen3_5_text", "Qwen3_5ForCausalLM", state_dense, _TENSORS),)),
    Family("qwen35moe", build, (Folder("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", state_mixture, _TENSORS),)),
    Family("qwen3next", build_next, (Folder("qwen3_next", "Qwen3NextForCausalLM", state_next, _TENSORS),)),
)
