"""Encoders of T5: RMS norms, scores that are not scaled but get a bias from a table by the distance, and no other
biases.

UMT5 has a table in each layer (arXiv:2304.09151), T5 only in the first, and all layers use it. GGUF has `enc.` before
the names of their tensors, and no key for the farthest distance that the table tells apart.
"""

from __future__ import annotations

from dataclasses import replace

from mlxr.models import limits
from mlxr.models.components import NO_ROPE, Layer, Norms
from mlxr.models.components.attention import Buckets
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import RMS_EPS, FolderConfig, TensorLayout
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model

_NAMES = {
    "shared.weight": "token_embd.weight",
    "encoder.embed_tokens.weight": "token_embd.weight",
    "encoder.final_layer_norm.weight": "enc.output_norm.weight",
    "layer.0.layer_norm": "attn_norm",
    "layer.0.SelfAttention.q": "attn_q",
    "layer.0.SelfAttention.k": "attn_k",
    "layer.0.SelfAttention.v": "attn_v",
    "layer.0.SelfAttention.o": "attn_output",
    "layer.0.SelfAttention.relative_attention_bias": "attn_rel_b",
    "layer.1.layer_norm": "ffn_norm",
    "layer.1.DenseReluDense.wi": "ffn_up",
    "layer.1.DenseReluDense.wi_0": "ffn_gate",
    "layer.1.DenseReluDense.wi_1": "ffn_up",
    "layer.1.DenseReluDense.wo": "ffn_down",
}
_KEYS = {
    "d_model": "hidden_size",
    "d_kv": "head_dim",
    "d_ff": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_layers": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
}
_BUCKETS, _FARTHEST = "attention.relative_buckets_count", 128
_GATED = {"relu": False, "gated-gelu": True}
_EACH = "attention.relative_buckets_of_each_layer"


def state_umt5(c: FolderConfig) -> None:
    """State an encoder whose layers have a table each."""
    state(c)
    c.out.put_own(_EACH, True)


def state(c: FolderConfig) -> None:
    """State an encoder: with ReLU, or in later versions with a gate."""
    c.note(("is_encoder_decoder", "dense_act_fn", "is_gated_act"))  # feed_forward_proj says the same
    c = c.rename(_KEYS, {"max_position_embeddings": 512, "feed_forward_proj": "relu"})
    c.state_model(kv_heads=c.heads, eps=(RMS_EPS, "attention.layer_norm_epsilon"), eps_key="layer_norm_epsilon")
    c.state_width()
    c.state_encoder()
    kind = c.fields.text("feed_forward_proj")
    if kind not in _GATED:
        c.fields.refuse("feed_forward_proj", " or ".join(_GATED))
    c.out.put_own("feed_forward_gated", _GATED[kind], c.fields, "feed_forward_proj")
    buckets = c.fields.integer("relative_attention_num_buckets", 4, 1024, default=32)
    c.out.put(_BUCKETS, buckets, c.fields, "relative_attention_num_buckets")
    c.fields.refuse_unless(("relative_attention_max_distance",), (_FARTHEST,), f"only {_FARTHEST} is supported")


def build(m: Metadata) -> Model:
    """Return the model of these metadata."""
    gated = m.own.flag("feed_forward_gated", "enc.blk.0.ffn_gate.weight" in m.tensors)
    block = m.feed_forward("gelu_tanh" if gated else "relu", gated=gated)
    buckets = Buckets(m.integer(_BUCKETS, 4, 1024, default=32), _FARTHEST, owner=0)
    of_each = m.own.flag(_EACH, "enc.blk.1.attn_rel_b.weight" in m.tensors)
    m.integer("context_length", 1, limits.MAX_CONTEXT)
    causal = m.is_causal(False)
    layers = (
        Layer(
            m.attention(NO_ROPE, scale=1.0, is_causal=causal, biases=table, owns_biases=index == table.owner),
            block,
            Norms(m.rms_eps),
        )
        for index in range(m.layers)
        for table in (replace(buckets, owner=index) if of_each else buckets,)
    )
    return m.model(layers, output_norm="enc.output_norm", has_output=False)


FAMILIES = (
    Family(
        "t5encoder",
        build,
        (
            Folder("t5", "T5EncoderModel", state, TensorLayout(_NAMES)),
            Folder("umt5", "UMT5EncoderModel", state_umt5, TensorLayout(_NAMES)),
        ),
        prefix="enc.",
    ),
)
