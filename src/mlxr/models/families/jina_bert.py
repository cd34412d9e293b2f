"""Jina's BERTs: version 2, whose scores fall with the distance of tokens and whose feed-forward blocks have a gate, and
version 3, which is XLM-RoBERTa with rotations.

Version 3's adapters for tasks are files of their own in GGUF. The further norms of version 2 for code are not
supported.
"""

from __future__ import annotations

from dataclasses import replace

from mlxr.models import limits
from mlxr.models.components import NO_ROPE, Layer, Norms
from mlxr.models.components.attention import Slopes
from mlxr.models.components.feed_forward import GATE_AND_UP
from mlxr.models.families.bert import BERT_CLASSIFIER, NAMES, NO_POOLER
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import LAYER_EPS, FolderConfig, TensorLayout
from mlxr.models.folders.rotations import state_rotation
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model

_V2 = NAMES | {"mlp.gated_layers": "ffn_up", "mlp.wo": "ffn_down", "mlp.layernorm": "layer_output_norm"}
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


def state_v2(c: FolderConfig) -> None:
    """State an encoder of version 2."""
    c.fields.refuse_unless(("position_embedding_type",), ("alibi",), "only alibi is supported in this family")
    c.fields.refuse_unless(("feed_forward_type",), ("geglu",), "only geglu is supported in this family")
    _state(c, feed_forward_bias=False)


def state_v2_classifier(c: FolderConfig) -> None:
    """State one of version 2 that ranks pairs, or classifies."""
    state_v2(c)
    c.state_classifier("both", bias=True)


def state_v3(c: FolderConfig) -> None:
    """State an encoder of version 3."""
    _state(c, feed_forward_bias=True)
    state_rotation(c, theta=_V3_THETA)


def build_v2(m: Metadata) -> Model:
    """Return the model of version 2; files have gate and up as one, or each by itself."""
    norms, slopes = Norms(m.layer_eps, kind="layer", bias=True, places="stream"), Slopes(m.context)
    block = replace(m.feed_forward("gelu_erf"), bias=False, down_bias=True)
    layer = Layer(m.attention(NO_ROPE, is_causal=m.is_causal(False), biases=slopes), block, norms)
    joins = () if m.has_tensor("ffn_gate.weight") else (GATE_AND_UP,)
    embeddings = m.embeddings()
    return m.model(
        [layer] * m.layers, output_norm=None, has_output=False, embeddings=embeddings, joins=joins, rank_pooling="cls"
    )


def build_v3(m: Metadata) -> Model:
    """Return the model of version 3."""
    norms = Norms(m.layer_eps, kind="layer", bias=True, places="stream")
    m.integer("context_length", 1, limits.MAX_CONTEXT)
    layer = Layer(m.attention(m.rope(), is_causal=m.is_causal(False)), m.feed_forward("gelu_erf", gated=False), norms)
    return m.model([layer] * m.layers, output_norm=None, has_output=False, embeddings=m.embeddings())


FAMILIES = (
    Family(
        "jina-bert-v2",
        build_v2,
        (
            Folder("bert", "JinaBertModel", state_v2, TensorLayout(_V2 | NO_POOLER), "JinaBertForMaskedLM"),
            Folder(
                "bert", "JinaBertForSequenceClassification", state_v2_classifier, TensorLayout(_V2 | BERT_CLASSIFIER)
            ),
        ),
    ),
    Family(
        "jina-bert-v3",
        build_v3,
        (Folder("jina_embeddings_v3", "JinaEmbeddingsV3Model", state_v3, TensorLayout(_V3 | NO_POOLER)),),
    ),
)
