"""Gemma, and Gemma 2 and 3, which have norms before and after each block.

Gemma 2 has windows in every other layer, and scores and logits that are capped. Gemma 3 norms queries and keys; five of
six layers have windows and a rotation of their own, which is not stretched. Folders store norms less one.
"""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

from mlxr.models.components import Layer, Norms, Rope
from mlxr.models.families.siglip import make_gemma3_tower
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import FolderConfig, TensorLayout
from mlxr.models.folders.rotations import state_rotation, state_window_theta, state_windows
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model

NORM_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "pre_feedforward_layernorm": "ffn_norm",
}
# Layers of the models of 27B, whose scores are scaled by hidden / heads, not by the head size: GGUF has no key for it.
_LAYERS_OF_GEMMA2, _LAYERS_OF_GEMMA3 = 46, 62
_TENSORS = TensorLayout(NORM_NAMES, norms_from_one=True)
_LEFT_OUT = {  # defaults for the text of models that see (transformers, configuration_gemma3.py)
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}


def state_gemma1(c: FolderConfig) -> None:
    """State the sizes of a Gemma."""
    c.state_model(activation="gelu_tanh", biases="block", tied=True)
    c.state_width()
    state_rotation(c)


def state_gemma2(c: FolderConfig) -> None:
    """State the sizes of a Gemma 2."""
    state_gemma1(c)
    state_windows(c, full_every=2)
    c.state_score_size(by_width_layers=_LAYERS_OF_GEMMA2)
    c.state_softcaps()


def state_gemma3(c: FolderConfig) -> None:
    """State the sizes of a Gemma 3."""
    state_gemma1(c)
    state_windows(c, full_every=6)
    state_window_theta(c, 10000.0)
    c.state_score_size(by_width_layers=_LAYERS_OF_GEMMA3)


def build_gemma1(m: Metadata) -> Model:
    """Return the model of these metadata."""
    norms, rope = Norms(m.rms_eps), m.rope()
    layers = (Layer(m.attention(rope), m.feed_forward("gelu_tanh"), norms) for _ in range(m.layers))
    return m.model(layers, embedding_scale=sqrt(m.hidden))


def build_gemma2(m: Metadata) -> Model:
    """Return the model of these metadata."""
    norms, rope = Norms(m.rms_eps, places="both"), m.rope()
    scale = float((m.hidden / m.heads) ** -0.5) if m.layers == _LAYERS_OF_GEMMA2 else None
    softcap = m.scale("attn_logit_softcapping")
    return m.model(
        (
            Layer(m.attention(rope, window=window, scale=scale, softcap=softcap), m.feed_forward("gelu_tanh"), norms)
            for window in m.windows(full_every=2)
        ),
        embedding_scale=sqrt(m.hidden),
        final_softcap=m.scale("final_logit_softcapping"),
    )


def build_gemma3(m: Metadata) -> Model:
    """Return the model of these metadata."""
    return _build_gemma3(m, is_causal=True)


def _build_gemma3(m: Metadata, *, is_causal: bool) -> Model:
    norms, rope = Norms(m.rms_eps, places="both"), m.rope()
    window_rope = Rope(m.window_theta(10000.0), rope.dim, interleaved=False, has_factors=False)
    scale = float((m.hidden / m.heads) ** -0.5) if m.layers == _LAYERS_OF_GEMMA3 else None
    layers = []
    for windowed in m.windowed(full_every=6):
        attention = m.attention(
            window_rope if windowed else rope,
            window=(m.window if is_causal else m.symmetric_window) if windowed else None,
            head_norms="each",
            scale=scale,
            is_causal=is_causal,
            whole_pictures=is_causal,
        )
        layers.append(Layer(attention, m.feed_forward("gelu_tanh"), norms))
    return m.model(layers, embedding_scale=sqrt(m.hidden))


def state_embedding(c: FolderConfig) -> None:
    """State an EmbeddingGemma: a Gemma 3 that sees whole texts."""
    if not c.fields.flag("use_bidirectional_attention", False):
        c.fields.refuse("use_bidirectional_attention", "true, as a model without an output sees whole texts")
    state_gemma3(c)
    c.state_encoder()


def build_embedding(m: Metadata) -> Model:
    """Return the model of these metadata."""
    return replace(_build_gemma3(m, is_causal=m.is_causal(False)), has_output=False, is_tied=False)


_GEMMA3 = Folder("gemma3_text", "Gemma3ForCausalLM", state_gemma3, _TENSORS, left_out=_LEFT_OUT)
TOWERS = (make_gemma3_tower("gemma3"),)
FAMILIES = (
    Family(
        "gemma", build_gemma1, (Folder("gemma", "GemmaForCausalLM", state_gemma1, TensorLayout(norms_from_one=True)),)
    ),
    Family("gemma2", build_gemma2, (Folder("gemma2", "Gemma2ForCausalLM", state_gemma2, _TENSORS),)),
    Family("gemma3", build_gemma3, (_GEMMA3,)),
    Family("gemma-embedding", build_embedding, (Folder("gemma3_text", "Gemma3TextModel", state_embedding, _TENSORS),)),
)
