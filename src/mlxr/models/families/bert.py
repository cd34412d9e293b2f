"""BERT, RoBERTa and XLM-RoBERTa: encoders with learned positions, whose layers norm the stream after each block.

A folder of RoBERTa's has rows of positions that no text uses: as many as its padding token's number plus one. The
classifier is BERT's pooler and one product after it, or RoBERTa's two products.
"""

from __future__ import annotations

from mlxr.models import limits
from mlxr.models.components import NO_ROPE, Layer, Norms
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import LAYER_EPS, FolderConfig, TensorLayout
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model

NAMES = {
    "embeddings.word_embeddings.weight": "token_embd.weight",
    "embeddings.position_embeddings.weight": "position_embd.weight",
    "embeddings.token_type_embeddings.weight": "token_types.weight",
    "embeddings.LayerNorm.weight": "token_embd_norm.weight",
    "embeddings.LayerNorm.bias": "token_embd_norm.bias",
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
NO_POOLER = {"pooler.dense.weight": "", "pooler.dense.bias": ""}  # no vector is made with it
_CLASSIFIED = {f"classifier.{end}": f"cls.output.{end}" for end in ("weight", "bias")}
_POOLED = {f"pooler.dense.{end}": f"cls.{end}" for end in ("weight", "bias")}
BERT_CLASSIFIER = _POOLED | _CLASSIFIED
_DENSE = {f"classifier.dense.{end}": f"cls.{end}" for end in ("weight", "bias")}
_PROJECTED = {f"classifier.out_proj.{end}": f"cls.output.{end}" for end in ("weight", "bias")}


def state(c: FolderConfig) -> None:
    """State an encoder with learned positions from 0 on."""
    _state(c, 0)


def state_roberta(c: FolderConfig) -> None:
    """State an encoder whose first positions stand for padding."""
    _state(c, c.fields.integer("pad_token_id", 0, limits.MAX_CONTEXT - 1, default=1) + 1)


def _state(c: FolderConfig, padding: int) -> None:
    c.fields.refuse_unless(("position_embedding_type",), ("absolute",), "only absolute positions are supported")
    c.fields.refuse_unless(("is_decoder",), (False,), "only encoders are supported in this family")
    c.state_model(kv_heads=c.heads, eps=(LAYER_EPS,), eps_key="layer_norm_eps", activation="gelu_erf")
    c.state_width()
    c.state_encoder(padding=padding)
    c.out.put_own("attention.qkv_bias", True)
    c.out.put_own("attention.output_bias", True)
    c.out.put_own("feed_forward_bias", True)


def state_classifier(c: FolderConfig) -> None:
    """State a BERT that ranks pairs, or classifies."""
    state(c)
    c.state_classifier("both", bias=True)


def state_roberta_classifier(c: FolderConfig) -> None:
    """State a RoBERTa that ranks pairs, or classifies."""
    state_roberta(c)
    c.state_classifier("both", bias=True)


def build(m: Metadata) -> Model:
    """Return the model of these metadata."""
    norms = Norms(m.layer_eps, kind="layer", bias=True, places="stream")
    layer = Layer(m.attention(NO_ROPE, is_causal=m.is_causal(False)), m.feed_forward("gelu_erf", gated=False), norms)
    embeddings = m.embeddings(positions=m.context)
    return m.model([layer] * m.layers, output_norm=None, has_output=False, embeddings=embeddings, rank_pooling="cls")


_ENCODER = TensorLayout(NAMES | NO_POOLER)
_RANKER = TensorLayout(NAMES | BERT_CLASSIFIER)
_ROBERTA_RANKER = TensorLayout(NAMES | NO_POOLER | _DENSE | _PROJECTED)
FAMILIES = (
    Family(
        "bert",
        build,
        (
            Folder("bert", "BertModel", state, _ENCODER, "BertForMaskedLM"),
            Folder("bert", "BertForSequenceClassification", state_classifier, _RANKER),
            Folder("xlm-roberta", "XLMRobertaModel", state_roberta, _ENCODER, "XLMRobertaForMaskedLM"),
            Folder("xlm-roberta", "XLMRobertaForSequenceClassification", state_roberta_classifier, _ROBERTA_RANKER),
            Folder("roberta", "RobertaModel", state_roberta, _ENCODER, "RobertaForMaskedLM"),
            Folder("roberta", "RobertaForSequenceClassification", state_roberta_classifier, _ROBERTA_RANKER),
        ),
    ),
)
