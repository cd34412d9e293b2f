"""Jina's BERT, version 3: XLM-RoBERTa with rotations. Its adapters for tasks are files of their own in GGUF."""

from __future__ import annotations

from mlxr.models import limits
from mlxr.models.components import Layer, Norms
from mlxr.models.families.bert import NAMES, NO_POOLER
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import LAYER_EPS, FolderConfig, TensorLayout
from mlxr.models.folders.rotations import state_rotation
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model

_V3 = {
    **{name: own for name, own in NAMES.items() if name.startswith("embeddings.")},
    "post_attention_layernorm": "attn_output_norm",
    "post_mlp_layernorm": "layer_output_norm",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
}
_V3_THETA = 20000.0


def _state(c: FolderConfig, *, feed_forward_bias: bool) -> None:
    c.state_model(kv_heads=c.heads, eps=(LAYER_EPS,), eps_key="layer_norm_eps", activation="gelu_erf")
    c.state_width()
    c.state_encoder()
    c.out.put_own("attention.qkv_bias", True)
    c.out.put_own("attention.output_bias", True)
    c.out.put_own("feed_forward_bias", feed_forward_bias)


def state_v3(c: FolderConfig) -> None:
    """State an encoder of version 3."""
    _state(c, feed_forward_bias=True)
    state_rotation(c, theta=_V3_THETA)


def build_v3(m: Metadata) -> Model:
    """Return the model of version 3."""
    norms = Norms(m.layer_eps, kind="layer", bias=True, places="stream")
    m.integer("context_length", 1, limits.MAX_CONTEXT)
    layer = Layer(m.attention(m.rope(), is_causal=m.is_causal(False)), m.feed_forward("gelu_erf", gated=False), norms)
    return m.model([layer] * m.layers, output_norm=None, has_output=False, embeddings=m.embeddings())


FAMILIES = (
    Family(
        "jina-bert-v3",
        build_v3,
        (Folder("jina_embeddings_v3", "JinaEmbeddingsV3Model", state_v3, TensorLayout(_V3 | NO_POOLER)),),
    ),
)
