"""Nomic's BERT: BERT with rotations in place of learned positions, gates, and no biases except in norms; and its
mixture, which has biases, no gates, and in every second layer experts, whose shares are not divided by their sum.

Its folders have two spellings: that of transformers, and one of their own, after GPT-2's. The sum of a token's experts
has a bias, which GGUF files from llama.cpp's converter leave out.
"""

from __future__ import annotations

from mlxr.models import limits
from mlxr.models.components import Experts, Layer, Norms
from mlxr.models.components.feed_forward import SUM_BIAS
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import LAYER_EPS, FolderConfig, TensorLayout
from mlxr.models.folders.mixers import state_experts
from mlxr.models.folders.rotations import state_rotation
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model

_NAMES = {
    "embeddings.word_embeddings.weight": "token_embd.weight",
    "embeddings.token_type_embeddings.weight": "token_types.weight",
    "embeddings.LayerNorm.weight": "token_embd_norm.weight",
    "embeddings.LayerNorm.bias": "token_embd_norm.bias",
    "emb_ln.weight": "token_embd_norm.weight",
    "emb_ln.bias": "token_embd_norm.bias",
    "post_attention_layernorm": "attn_output_norm",
    "post_mlp_layernorm": "layer_output_norm",
    "attn.Wqkv": "attn_qkv",
    "attn.out_proj": "attn_output",
    "norm1": "attn_output_norm",
    "norm2": "layer_output_norm",
    "mlp.fc11": "ffn_up",
    "mlp.fc12": "ffn_gate",
    "mlp.fc2": "ffn_down",
}
_MIXTURE_NAMES = _NAMES | {
    "mlp.fc1": "ffn_up",
    "mlp.router.layer": "ffn_gate_inp",
    "mlp.experts.mlp.w1": "ffn_up_exps.weight",
    "mlp.experts.mlp.w2": "ffn_down_exps.weight",
    "mlp.experts": "ffn_exps",
}
_OLD_KEYS = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
    "rotary_emb_fraction": "partial_rotary_factor",
}
_THETA = 1000.0


_MIXTURE = "nomic-bert-moe"


def state(c: FolderConfig) -> None:
    """State an encoder of texts."""
    if c.fields.get("num_experts"):
        _state_mixture(c)
        return
    if c.fields.get("n_embd") is not None:
        _refuse_old(c)
        c = c.rename(_OLD_KEYS)
    _state_common(c)


def _state_common(c: FolderConfig) -> None:
    c.state_model(kv_heads=c.heads, eps=(LAYER_EPS,), eps_key="layer_norm_eps")
    c.state_width()
    c.state_encoder()
    state_rotation(c, theta=_THETA)


def _state_mixture(c: FolderConfig) -> None:
    fields, out = c.fields, c.out
    out.architecture, out.layout = _MIXTURE, TensorLayout(_MIXTURE_NAMES)
    biased = ("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias")
    fields.refuse_unless(biased, (True,), "only products with biases are supported with experts")
    others = ("prenorm", "rotary_emb_interleaved", "use_rms_norm", "moe_normalize_expert_weights")
    fields.refuse_unless((*others, "expert_choice_router"), (False,), "not supported in this family")
    fields.refuse_unless(("activation_function",), ("gelu",), "only gelu is supported with experts")
    fields.refuse_unless(("rotary_emb_scale_base", "num_shared_experts"), (0,), "not supported in this family")
    c = c.rename(_OLD_KEYS | {"activation_function": "old_activation_function"})
    every = fields.integer("moe_every_n_layers", 1, limits.MAX_LAYERS, default=2)
    _state_common(c)
    out.put("moe_every_n_layers", every, fields, "moe_every_n_layers")
    flags = [index % every == 1 for index in range(c.layers)]
    state_experts(c, features_key="intermediate_size", used_key="moe_top_k", layers=flags)
    for name in ("attention.qkv_bias", "attention.output_bias", "feed_forward_bias", "expert_sum_bias"):
        out.put_own(name, True)


def _refuse_old(c: FolderConfig) -> None:
    fields = c.fields
    plain = ("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "prenorm", "rotary_emb_interleaved", "use_rms_norm")
    fields.refuse_unless(plain, (False,), "not supported in this family")
    fields.refuse_unless(("activation_function",), ("swiglu",), "only swiglu is supported in this family")
    fields.refuse_unless(("num_experts", "rotary_emb_scale_base"), (0,), "not supported in this family")


def build(m: Metadata) -> Model:
    """Return the model of these metadata."""
    norms = Norms(m.layer_eps, kind="layer", bias=True, places="stream")
    m.integer("context_length", 1, limits.MAX_CONTEXT)
    layer = Layer(m.attention(m.rope(), is_causal=m.is_causal(False)), m.feed_forward(), norms)
    return m.model([layer] * m.layers, output_norm=None, has_output=False, embeddings=m.embeddings())


def build_mixture(m: Metadata) -> Model:
    """Return the mixture of these metadata."""
    norms = Norms(m.layer_eps, kind="layer", bias=True, places="stream")
    m.integer("context_length", 1, limits.MAX_CONTEXT)
    m.integer("moe_every_n_layers", 0, limits.MAX_LAYERS, default=0)  # the layers with routers say so
    block = m.feed_forward("gelu_erf", gated=False)
    sum_bias = m.own.flag("expert_sum_bias", m.has_tensor(SUM_BIAS))
    experts = Experts(m.experts, m.expert_features, block.activation, m.routing(), gated=False, sum_bias=sum_bias)
    attention = m.attention(m.rope(), is_causal=m.is_causal(False))
    layers = (Layer(attention, experts if flag else block, norms) for flag in m.has_experts)
    return m.model(layers, output_norm=None, has_output=False, embeddings=m.embeddings())


FAMILIES = (
    Family("nomic-bert", build, (Folder("nomic_bert", "NomicBertModel", state, TensorLayout(_NAMES)),)),
    Family(_MIXTURE, build_mixture),
)
