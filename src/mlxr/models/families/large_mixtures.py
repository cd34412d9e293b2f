"""Arctic and DBRX, mixtures of more than a hundred billion weights.

Arctic has a dense block behind attention, and experts that read attention's input, by a norm of their own. DBRX has
experts in all layers, norms without biases, and queries, keys and values that are clamped. Source: llama.cpp,
src/models/arctic.cpp and dbrx.cpp; transformers, models/dbrx.
"""

from __future__ import annotations

from mlxr.models import limits
from mlxr.models.components import Experts, Layer, Norms
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import LAYER_EPS, FolderConfig, TensorLayout, state_clamp
from mlxr.models.folders.mixers import state_experts
from mlxr.models.folders.rotations import state_rotation
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model

_OUTPUT_NORM = "attn_output_norm"
_DBRX = TensorLayout(
    {
        "transformer.wte.weight": "token_embd.weight",
        "transformer.norm_f.weight": "output_norm.weight",
        "norm_attn_norm.norm_1": "attn_norm",
        "norm_attn_norm.norm_2": _OUTPUT_NORM,
        "norm_attn_norm.attn.Wqkv": "attn_qkv",
        "norm_attn_norm.attn.out_proj": "attn_output",
        "ffn.router.layer": "ffn_gate_inp",
        "ffn.experts.mlp.w1": "ffn_gate_exps.weight",
        "ffn.experts.mlp.v1": "ffn_up_exps.weight",
        "ffn.experts.mlp.w2": "ffn_down_exps.weight",
    }
)
_KEYS = {
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "max_seq_len": "max_position_embeddings",
}
_ATTENTION_KEYS = {"kv_n_heads": "num_key_value_heads", "rope_theta": "rope_theta"}
_EXPERT_KEYS = {
    "moe_num_experts": "num_experts",
    "moe_top_k": "num_experts_per_tok",
    "ffn_hidden_size": "moe_intermediate_size",
}


def state_dbrx(c: FolderConfig) -> None:
    """State the sizes of a model; two objects in the folder have those of attention and of experts."""
    attention, experts = (c.fields.mapping(name) for name in ("attn_config", "ffn_config"))
    if attention is None or experts is None:
        c.fields.refuse("attn_config", "an object, and ffn_config beside it")
    experts.refuse_unless(("moe_normalize_expert_weights",), (1,), "only shares that are divided by their sum are")
    activation = experts.mapping("ffn_act_fn")
    nested: dict[str, object] = {"layer_norm_eps": 1e-5, "norm_topk_prob": True}
    nested["hidden_act"] = "silu" if activation is None else activation.text("name")
    for part, keys in ((attention, _ATTENTION_KEYS), (experts, _EXPERT_KEYS)):
        nested |= {own: part.get(name) for name, own in keys.items() if part.get(name) is not None}
    c = c.rename(_KEYS, nested)
    c.state_model(kv_heads=1, eps=(LAYER_EPS,), eps_key="layer_norm_eps")
    state_experts(c, renormalises=True)
    c.out.put("feed_forward_length", c.fields.integer("moe_intermediate_size", 1, limits.MAX_WIDTH))
    state_clamp(c, attention)
    state_rotation(c)


def build_dbrx(m: Metadata) -> Model:
    """Return the model of these metadata."""
    norms = Norms(m.layer_eps, kind="layer", feed_forward=_OUTPUT_NORM)
    experts = Experts(m.experts, m.expert_features, m.activation(), m.routing(renormalises=True))
    return m.model([Layer(m.attention(m.rope(), clamp=m.clamp()), experts, norms)] * m.layers)


def build_arctic(m: Metadata) -> Model:
    """Return the model of these metadata, whose dense blocks are as wide as the stream."""
    attention = m.attention(m.rope(interleaved=True))
    experts = Experts(m.experts, m.ffn, m.activation(), m.routing(renormalises=True))
    layer = Layer(attention, m.feed_forward(features=m.hidden), Norms(m.rms_eps), beside=experts)
    return m.model([layer] * m.layers)


FAMILIES = (
    Family("arctic", build_arctic),
    Family("dbrx", build_dbrx, (Folder("dbrx", "DbrxForCausalLM", state_dbrx, _DBRX),)),
)
