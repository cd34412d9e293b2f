"""Nomic's BERT: BERT with rotations in place of learned positions, gates, and no biases but those of norms.

Its folders have two spellings: that of transformers, and one of their own, after GPT-2's.
"""

from __future__ import annotations

from mlxr.models import limits
from mlxr.models.components import Layer, Norms
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import LAYER_EPS, FolderConfig, TensorLayout
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


def state(c: FolderConfig) -> None:
    """State an encoder of texts."""
    if c.fields.get("n_embd") is not None:
        _refuse_old(c)
        c = c.rename(_OLD_KEYS)
    c.state_model(kv_heads=c.heads, eps=(LAYER_EPS,), eps_key="layer_norm_eps")
    c.state_width()
    c.state_encoder()
    state_rotation(c, theta=_THETA)


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


FAMILIES = (Family("nomic-bert", build, (Folder("nomic_bert", "NomicBertModel", state, TensorLayout(_NAMES)),)),)
