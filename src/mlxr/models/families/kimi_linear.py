"""Kimi Linear: three of four layers have a delta rule with a decay of each key channel, the others latent attention
that rotates nothing; then experts beside a block that all tokens go through, but for the first layers.

Source: llama.cpp, src/models/kimi-linear.cpp and conversion/kimi_linear.py; transformers, models/kimi_linear.
"""

from __future__ import annotations

from mlxr.models import limits
from mlxr.models.components import ChannelDelta, Experts, Layer, Norms
from mlxr.models.family import Family, Folder
from mlxr.models.fields import Fields
from mlxr.models.folders.config import EXPERTS, Flags, FolderConfig, TensorLayout
from mlxr.models.folders.mixers import (
    read_recurrent_layers,
    state_expert_width,
    state_experts,
    state_latent_attention,
)
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model

DELTA_NAMES = {  # names in folders that have such delta rules
    "self_attn.A_log": "ssm_a",
    "self_attn.dt_bias": "ssm_dt.bias",
    "self_attn.b_proj": "ssm_beta",
    "self_attn.o_norm": "ssm_norm",
    **{f"self_attn.{part}_conv1d": f"ssm_conv1d_{part}" for part in "qkv"},
    **{f"self_attn.{part}_{rank}_proj": f"ssm_{part}_{rank}" for part in "fg" for rank in "ab"},
}
_NAMES = DELTA_NAMES | {
    "block_sparse_moe.gate.e_score_correction_bias": "exp_probs_b.bias",
    **{f"block_sparse_moe.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
}
_KEYS = {  # by the names of the same in other families
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok",
}


def state(c: FolderConfig) -> None:
    """State the sizes of a model."""
    c.note(EXPERTS)
    c = c.rename(_KEYS)
    c.fields.refuse_unless(("mla_use_nope",), (True,), "attention that rotates is not supported there")
    c.fields.refuse_unless(("moe_router_activation_func",), ("sigmoid",), "not supported there")
    c.fields.refuse_unless(("moe_layer_freq",), (1,), "layers without experts between others are not supported")
    state_latent_attention(c, rotates=False)
    c.state_kv_layers([not flag for flag in state_delta(c)])
    experts = state_experts(c, shared_key="num_shared_experts", shared="count", scoring="sigmoid", renormalises=True)
    state_expert_width(c, experts)


def state_delta(c: FolderConfig) -> Flags:
    """State the sizes of the delta rule, and return which layers have it."""
    linear = c.fields.mapping("linear_attn_config")
    fields, names = c.fields, ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
    if linear is not None:
        fields, names = linear, ("num_heads", "head_dim", "short_conv_kernel_size")
    is_listed = linear is None or c.fields.get("layer_types") is not None
    flags = read_recurrent_layers(c, "linear_attention") if is_listed or linear is None else _read_layers(c, linear)
    if fields.integer(names[0], 1, limits.MAX_HEADS) != c.heads:
        fields.refuse(names[0], f"{c.heads}, as many heads as attention has")
    c.out.put("kda.head_dim", fields.integer(names[1], 1, limits.MAX_HEAD_DIM), fields, names[1])
    c.out.put("ssm.conv_kernel", fields.integer(names[2], 2, limits.MAX_TAPS), fields, names[2])
    return flags


def _read_layers(c: FolderConfig, linear: Fields) -> Flags:
    """Return which layers have the delta rule: those whose numbers, from 1, are not in the list of those that
    attend."""
    attend = linear.get("full_attn_layers")
    if not isinstance(attend, list) or not attend or any(type(number) is not int for number in attend):
        linear.refuse("full_attn_layers", "a list of numbers of layers")
    return tuple(index + 1 not in attend for index in range(c.layers))


def build(m: Metadata) -> Model:
    """Return the model of these metadata: layers without keys have the delta rule."""
    norms, attention = Norms(m.rms_eps), m.latent_attention(rotates=False)
    delta = read_delta(m)
    experts = Experts(
        m.experts,
        m.expert_features,
        m.activation(),
        m.routing("sigmoid", renormalises=True, floor=1e-20),
        choice_bias=True,
        shared_features=m.integer("expert_shared_count", 0, default=0) * m.expert_features,
    )
    return m.model(
        Layer(attention if keys else delta, experts if has_experts else m.feed_forward(), norms)
        for keys, has_experts in zip(m.kv_counts, m.has_experts, strict=True)
    )


def read_delta(m: Metadata, bound: float = 0.0, *, has_flat_rates: bool = False) -> ChannelDelta:
    """Return the delta rule of the file."""
    head_dim = m.integer("kda.head_dim", 1, limits.MAX_HEAD_DIM)
    return ChannelDelta(m.heads, head_dim, m.integer("ssm.conv_kernel", 2, limits.MAX_TAPS), bound, has_flat_rates)


FAMILIES = (
    Family("kimi-linear", build, (Folder("kimi_linear", "KimiLinearForCausalLM", state, TensorLayout(_NAMES)),)),
)
