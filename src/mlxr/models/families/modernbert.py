"""ModernBERT: an encoder with rotations and symmetric windows; one of three layers sees the whole text.

The first layer's input is the normed embedding, and has no norm of its own. Files join queries, keys and values, and
the two halves of the feed-forward block's input, of which the first goes through the activation.
"""

from __future__ import annotations

from dataclasses import replace

from mlxr.models import limits
from mlxr.models.components import Layer, Norms, Rope
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import LAYER_EPS, FolderConfig, TensorLayout
from mlxr.models.folders.rotations import state_rotation, state_window_theta
from mlxr.models.metadata import WINDOW_PATTERN, Metadata
from mlxr.models.model import Model

_FULL_EVERY, _FULL_THETA, _WINDOW_THETA = 3, 160000.0, 10000.0
_WINDOWED = "sliding_attention"
_NAMES = {
    f"{prefix}{name}.weight": f"{plain}.weight"
    for prefix in ("", "model.")
    for name, plain in (
        ("embeddings.tok_embeddings", "token_embd"),
        ("embeddings.norm", "token_embd_norm"),
        ("final_norm", "output_norm"),
    )
} | {
    "attn_norm": "attn_norm",
    "attn.Wqkv": "attn_qkv",
    "attn.Wo": "attn_output",
    "mlp_norm": "ffn_norm",
    "mlp.Wi": "ffn_up",
    "mlp.Wo": "ffn_down",
}
_RANKING = {
    "head.dense.weight": "cls.weight",
    "head.dense.bias": "cls.bias",
    "head.norm.weight": "cls.norm.weight",
    "classifier.weight": "cls.output.weight",
    "classifier.bias": "cls.output.bias",
}
_MASKING = dict.fromkeys(("head.dense.weight", "head.norm.weight", "decoder.weight", "decoder.bias"), "")


def state(c: FolderConfig) -> None:
    """State an encoder of texts."""
    fields, out = c.fields, c.out
    for key in ("norm_bias", "attention_bias", "mlp_bias"):
        fields.refuse_unless((key,), (False,), "biases are not supported in this family")
    c.state_model(kv_heads=c.heads, eps=(LAYER_EPS,), eps_key="norm_eps", activation="gelu_erf")
    c.state_width()
    c.state_encoder()
    window = fields.integer("local_attention", 1, limits.MAX_CONTEXT)
    out.put("attention.sliding_window", window, fields, "local_attention")
    every = fields.integer("global_attn_every_n_layers", 1, limits.MAX_LAYERS, default=_FULL_EVERY)
    kinds, usual = fields.get("layer_types"), [index % every != 0 for index in range(c.layers)]
    flags = [kind == _WINDOWED for kind in kinds] if isinstance(kinds, list) else usual
    if flags == usual:
        out.put(WINDOW_PATTERN, every, fields, "global_attn_every_n_layers")
    else:
        out.put_own("attention.sliding_window_layers", flags, fields, "layer_types")
    state_window_theta(c, fields.number("local_rope_theta", 1.0001, limits.MAX_THETA, default=_WINDOW_THETA))
    state_rotation(c, theta=fields.number("global_rope_theta", 1.0001, limits.MAX_THETA, default=_FULL_THETA))


def state_classifier(c: FolderConfig) -> None:
    """State an encoder that ranks pairs, or classifies."""
    state(c)
    c.fields.refuse_unless(("classifier_activation",), ("gelu",), "only gelu is supported")
    pooling = c.fields.text("classifier_pooling", default="cls")
    has_bias = c.fields.flag("classifier_bias", False)
    c.state_classifier("both", bias=has_bias, output_bias=True, normed=True, pooling=pooling)


def build(m: Metadata) -> Model:
    """Return the model of these metadata."""
    norms, rope = Norms(m.layer_eps, kind="layer"), m.rope()
    window_rope = Rope(m.window_theta(_WINDOW_THETA), rope.dim, interleaved=False, has_factors=False)
    every = m.integer(WINDOW_PATTERN, 1, limits.MAX_LAYERS, default=_FULL_EVERY)
    usual = tuple(index % every != 0 for index in range(m.layers))
    layers = []
    for index, windowed in enumerate(m.own.flags("attention.sliding_window_layers", m.layers) or usual):
        attention = m.attention(
            window_rope if windowed else rope,
            window=m.symmetric_window if windowed else None,
            is_causal=m.is_causal(False),
        )
        own = norms if index else replace(norms, mixer=None)
        layers.append(Layer(attention, m.feed_forward("gelu_erf"), own))
    embeddings = m.embeddings()
    return m.model(layers, has_output=False, embeddings=embeddings, joins=("attn_qkv", "ffn_up"), rank_pooling="mean")


FAMILIES = (
    Family(
        "modern-bert",
        build,
        (
            Folder("modernbert", "ModernBertModel", state, TensorLayout(_NAMES)),
            Folder("modernbert", "ModernBertForMaskedLM", state, TensorLayout(_NAMES | _MASKING)),
            Folder(
                "modernbert", "ModernBertForSequenceClassification", state_classifier, TensorLayout(_NAMES | _RANKING)
            ),
        ),
    ),
)
