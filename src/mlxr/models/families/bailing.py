"""Ling and Ring (BailingMoE) and the first DeepSeek MoE: Llama's attention, then experts beside a block that all tokens
go through; the first layers have none.

Ling 2 norms heads and chooses experts by sigmoids and a bias, of groups; the first Ling and DeepSeek choose by softmax
and rotate neighbours in GGUF files. Source: llama.cpp, src/models/bailingmoe.cpp, bailingmoe2.cpp and deepseek.cpp.
"""

from __future__ import annotations

from mlxr.models import limits
from mlxr.models.components import Experts, Layer, Norms
from mlxr.models.components.feed_forward import BARE_CHOICE_BIAS, CHOICE_BIAS
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import FolderConfig, TensorLayout
from mlxr.models.folders.mixers import read_expert_layers, state_expert_width, state_experts
from mlxr.models.folders.rotations import state_rotation
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model

_NAMES = {
    "model.word_embeddings.weight": "token_embd.weight",
    "attention.query_key_value": "attn_qkv",
    "attention.dense": "attn_output",
    "attention.query_layernorm": "attn_q_norm",
    "attention.key_layernorm": "attn_k_norm",
}
_HUNYUAN3_NAMES = {"mlp.router.gate": "ffn_gate_inp"} | {
    f"mlp.shared_mlp.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")
}
_SHARED_WIDTH = "moe_shared_expert_intermediate_size"


def state_ling2(c: FolderConfig) -> None:
    """State the sizes of a Ling 2, half of whose heads rotates."""
    c.fields.refuse_unless(("norm_head", "use_bias", "use_qkv_bias"), (False,), "not supported there")
    c.fields.refuse_unless(("score_function",), ("sigmoid",), "not supported there")
    c.fields.refuse_unless(("use_qk_norm", "moe_router_enable_expert_bias"), (True,), "needed there")
    c.state_model(kv_heads=c.heads)
    flags = state_experts(c, shared_key="num_shared_experts", shared="count", scoring="sigmoid", renormalises=True)
    width = c.out.integer("expert_feed_forward_length")
    if c.fields.integer(_SHARED_WIDTH, 1, limits.MAX_WIDTH, default=width) != width:
        c.fields.refuse(_SHARED_WIDTH, f"the features of an expert, {width}")
    state_expert_width(c, flags)
    state_rotation(c, part=0.5)


def state_deepseek(c: FolderConfig) -> None:
    """State the sizes of a DeepSeek MoE."""
    c.fields.refuse_unless(("scoring_func",), ("softmax",), "not supported there")
    c.fields.refuse_unless(("moe_layer_freq",), (1,), "layers without experts between others are not supported")
    c.state_model(kv_heads=c.heads, biases="block")
    flags = state_experts(c, count_keys=("n_routed_experts",), shared_key="n_shared_experts", shared="count")
    c.out.put("leading_dense_block_count", c.fields.integer("first_k_dense_replace", 0, c.layers, default=0))
    state_expert_width(c, flags)
    state_rotation(c)


def state_hunyuan3(c: FolderConfig) -> None:
    """State the sizes of a Hunyuan 3; by default its first layer has no experts."""
    c.state_model(kv_heads=c.heads, biases="block")
    layers = read_expert_layers(c) or [index > 0 for index in range(c.layers)]
    flags = state_experts(
        c, shared_key="num_shared_experts", shared="count", scoring="sigmoid", renormalises=True, layers=layers
    )
    shared = c.fields.integer("num_shared_experts", 1, limits.MAX_STATED, default=1)
    scale = c.fields.number("router_scaling_factor", 1e-9, limits.MAX_SCALE, default=1.0)
    c.out.put("expert_shared_feed_forward_length", shared * c.out.integer("expert_feed_forward_length"))
    c.out.put("expert_weights_scale", scale, c.fields, "router_scaling_factor")
    state_expert_width(c, flags)
    state_rotation(c)


def build(m: Metadata) -> Model:
    """Return the model of these metadata."""
    is_second = m.architecture == "bailingmoe2"
    norms, rope = Norms(m.rms_eps), m.rope(interleaved=not is_second)
    rule = m.routing("sigmoid", renormalises=True, floor=1e-20) if is_second else m.routing()
    own = m.integer("expert_shared_feed_forward_length", 1, default=m.expert_features) if is_second else 0
    experts = Experts(
        m.experts,
        m.expert_features,
        m.activation(),
        rule,
        choice_bias=is_second and (m.own.get("expert_layers") is not None or m.has_tensor(CHOICE_BIAS)),
        shared_features=m.integer("expert_shared_count", 0, default=0) * (own or m.expert_features),
    )
    attention = m.attention(rope, head_norms="each" if is_second else None)
    return m.model(Layer(attention, experts if flag else m.feed_forward(), norms) for flag in m.has_experts)


def build_hunyuan3(m: Metadata) -> Model:
    """Return a Hunyuan 3, whose layers are those of Ling 2 with one block beside the experts."""
    norms, attention = Norms(m.rms_eps), m.attention(m.rope(), head_norms="each")
    experts = Experts(
        m.experts,
        m.expert_features,
        m.activation(),
        m.routing("sigmoid", floor=1e-20),
        choice_bias=m.own.get("expert_layers") is not None
        or m.has_tensor(CHOICE_BIAS)
        or m.has_tensor(BARE_CHOICE_BIAS),
        shared_features=m.shared_features() or m.expert_features,
    )
    return m.model(Layer(attention, experts if flag else m.feed_forward(), norms) for flag in m.has_experts)


FAMILIES = (
    Family(
        "hy_v3", build_hunyuan3, (Folder("hy_v3", "HYV3ForCausalLM", state_hunyuan3, TensorLayout(_HUNYUAN3_NAMES)),)
    ),
    Family("bailingmoe", build),
    Family(
        "bailingmoe2", build, (Folder("bailing_moe", "BailingMoeV2ForCausalLM", state_ling2, TensorLayout(_NAMES)),)
    ),
    Family("deepseek", build, (Folder("deepseek", "DeepseekForCausalLM", state_deepseek),)),
)
