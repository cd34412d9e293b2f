"""GPT-2 and StarCoder: layer norms with biases, learned positions in place of rotations, and no gate.

StarCoder (GPT-BigCode) has one head of keys. Folders of GPT-2 keep its products with rows and columns exchanged.
"""

from __future__ import annotations

from mlxr.models import limits
from mlxr.models.components import NO_ROPE, Layer, Norms
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import LAYER_EPS, FolderConfig, TensorLayout
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model

_ENDS = {
    "wte.weight": "token_embd.weight",
    "wpe.weight": "position_embd.weight",
    "ln_f.weight": "output_norm.weight",
    "ln_f.bias": "output_norm.bias",
}
_NAMES = {
    **_ENDS,
    **{f"transformer.{name}": own for name, own in _ENDS.items()},
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
}
_KEYS = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "activation_function": "hidden_act",
}


def state(c: FolderConfig) -> None:
    """State the sizes of a model."""
    c.fields.refuse_unless(("scale_attn_weights",), (True,), "scores that are not scaled are not supported")
    c.fields.refuse_unless(("add_cross_attention", "scale_attn_by_inverse_layer_idx"), (False,), "not supported")
    has_one = c.fields.flag("multi_query", c.fields.text("model_type") == "gpt_bigcode")
    c = c.rename(_KEYS)
    c.state_model(
        kv_heads=1 if has_one else c.heads,
        eps=(LAYER_EPS,),
        eps_key="layer_norm_epsilon",
        activation="gelu_tanh",
        biases="use",
        tied=True,
    )
    c.state_width(default=4 * c.hidden)


def build(m: Metadata) -> Model:
    """Return the model of these metadata, which sees no more than it has positions for."""
    norms, context = Norms(m.layer_eps, kind="layer", bias=True), m.integer("context_length", 1, limits.MAX_CONTEXT)
    kv_heads = 1 if m.architecture == "starcoder" else m.heads
    attention = m.attention(NO_ROPE, kv_heads=m.integer("attention.head_count_kv", 1, limits.MAX_HEADS, kv_heads))
    layer = Layer(attention, m.feed_forward("gelu_tanh", gated=False), norms)
    return m.model([layer] * m.layers, embeddings=m.embeddings(positions=context, normed=False))


FAMILIES = (
    Family("gpt2", build, (Folder("gpt2", "GPT2LMHeadModel", state, TensorLayout(_NAMES, exchanges=True)),)),
    Family("starcoder", build, (Folder("gpt_bigcode", "GPTBigCodeForCausalLM", state, TensorLayout(_NAMES)),)),
)
