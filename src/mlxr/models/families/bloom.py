"""BLOOM, MPT, Jais and Refact: scores become less with the distance of a key (ALiBi), and nothing rotates.

BLOOM's and MPT's feed-forward blocks have no gate, Refact's norms are RMS norms, and Jais divides scores by the size of
a head. Source: llama.cpp, src/models/bloom.cpp, mpt.cpp, jais.cpp and refact.cpp.
"""

from __future__ import annotations

from mlxr.models import limits
from mlxr.models.components import NO_ROPE, Layer, Norms
from mlxr.models.components.encoder import POSITIONS
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import LAYER_EPS, FolderConfig, TensorLayout, state_clamp
from mlxr.models.metadata import MAX_ALIBI, Metadata
from mlxr.models.model import Model

_BLOOM = {
    "word_embeddings.weight": "token_embd.weight",
    "word_embeddings_layernorm.weight": "token_embd_norm.weight",
    "word_embeddings_layernorm.bias": "token_embd_norm.bias",
    "ln_f.weight": "output_norm.weight",
    "ln_f.bias": "output_norm.bias",
}
_BLOOM_TENSORS = TensorLayout(
    _BLOOM
    | {f"transformer.{name}": own for name, own in _BLOOM.items()}
    | {
        "self_attention.query_key_value": "attn_qkv",
        "self_attention.dense": "attn_output",
        "mlp.dense_h_to_4h": "ffn_up",
        "mlp.dense_4h_to_h": "ffn_down",
    },
    joins_heads=True,
)
_MPT_TENSORS = TensorLayout(
    {
        "transformer.wte.weight": "token_embd.weight",
        "transformer.wpe.weight": POSITIONS,
        "transformer.norm_f.weight": "output_norm.weight",
        "norm_1": "attn_norm",
        "norm_2": "ffn_norm",
        "attn.Wqkv": "attn_qkv",
        "attn.out_proj": "attn_output",
        "ffn.up_proj": "ffn_up",
        "ffn.down_proj": "ffn_down",
    }
)
_BLOOM_KEYS = {
    "n_embed": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "seq_length": "max_position_embeddings",
}
_MPT_KEYS = {
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "max_seq_len": "max_position_embeddings",
}


def _state(c: FolderConfig, *, bias: bool) -> None:
    c.state_model(
        kv_heads=c.heads,
        eps=(LAYER_EPS,),
        eps_key="layer_norm_epsilon",
        activation="gelu_tanh",
        biases="use" if bias else None,
        tied=True,
    )


def state_bloom(c: FolderConfig) -> None:
    """State the sizes of a BLOOM."""
    c.fields.refuse_unless(("apply_residual_connection_post_layernorm",), (False,), "not supported")
    c = c.rename(_BLOOM_KEYS, {"max_position_embeddings": 2048})
    _state(c, bias=True)
    c.state_width(default=4 * c.hidden)


def state_mpt(c: FolderConfig) -> None:
    """State the sizes of an MPT, whose activation is not the approximate one that GGUF files mean."""
    attention = c.fields.mapping("attn_config")
    c.fields.refuse_unless(("no_bias",), (True,), "biases are not supported there")
    c.fields.refuse_unless(("logit_scale",), (1,), "not supported")
    if attention is not None:
        attention.refuse_unless(("prefix_lm", "qk_ln", "softmax_scale"), (False,), "not supported")
        attention.refuse_unless(("attn_type",), ("multihead_attention",), "not supported")
    c = c.rename(_MPT_KEYS, {"layer_norm_epsilon": 1e-5, "hidden_act": "gelu"})
    _state(c, bias=False)
    largest, is_alibi = 8.0, attention is None or attention.flag("alibi", True)
    if attention is not None:
        largest = attention.number("alibi_bias_max", 1e-6, limits.MAX_SCALE, default=largest)
        state_clamp(c, attention)
    c.out.put(MAX_ALIBI, largest if is_alibi else 0.0)
    ratio = c.fields.integer("expansion_ratio", 1, limits.MAX_WIDTH // c.hidden, default=4)
    c.out.put("feed_forward_length", ratio * c.hidden, c.fields, "expansion_ratio")


def build_bloom(m: Metadata) -> Model:
    """Return the model of these metadata, whose embeddings are normed."""
    norms = Norms(m.layer_eps, kind="layer", bias=True)
    layer = Layer(m.attention(NO_ROPE, biases=m.slopes()), m.feed_forward("gelu_tanh", gated=False), norms)
    return m.model([layer] * m.layers, embeddings=m.embeddings())


def build_mpt(m: Metadata) -> Model:
    """Return the model of these metadata, which may have learned positions and clamp queries, keys and values."""
    norms, slopes = Norms(m.layer_eps, kind="layer", bias=m.has_tensor("attn_norm.bias")), m.slopes(default=0.0)
    attention = m.attention(NO_ROPE, biases=slopes, clamp=m.clamp())
    layer = Layer(attention, m.feed_forward("gelu_tanh", gated=False), norms)
    learned = m.embeddings(positions=m.context, normed=False) if slopes is None else None
    return m.model([layer] * m.layers, embeddings=learned)


def build_jais(m: Metadata) -> Model:
    """Return the model of these metadata."""
    norms = Norms(m.layer_eps, kind="layer", bias=True)
    layer = Layer(m.attention(NO_ROPE, scale=1 / m.head_dim, biases=m.slopes()), m.feed_forward(), norms)
    return m.model([layer] * m.layers)


def build_refact(m: Metadata) -> Model:
    """Return the model of these metadata, which has one head of keys."""
    layer = Layer(m.attention(NO_ROPE, biases=m.slopes()), m.feed_forward(), Norms(m.rms_eps))
    return m.model([layer] * m.layers)


FAMILIES = (
    Family("bloom", build_bloom, (Folder("bloom", "BloomForCausalLM", state_bloom, _BLOOM_TENSORS),)),
    Family("mpt", build_mpt, (Folder("mpt", "MptForCausalLM", state_mpt, _MPT_TENSORS, "MPTForCausalLM"),)),
    Family("jais", build_jais),
    Family("refact", build_refact),
)
