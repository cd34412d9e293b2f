"""GPT-NeoX (Pythia), GPT-J and Falcon: two blocks side by side, layer norms with biases, and no gate.

Each block of GPT-NeoX, of Falcon 40B and 180B has a norm of its own, those of GPT-J, Falcon 7B and 11B share
one. Neighbouring numbers of a head rotate in GPT-J, whose feed-forward blocks and output have biases.
Source: llama.cpp, src/models/gptneox.cpp and falcon.cpp; transformers, models/gptj.
"""

from __future__ import annotations

from mlxr.models import limits
from mlxr.models.components import Layer, Norms
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import LAYER_EPS, FolderConfig, TensorLayout
from mlxr.models.folders.rotations import state_rotation
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model

_MLP = {"mlp.dense_h_to_4h": "ffn_up", "mlp.dense_4h_to_h": "ffn_down"}
_NEOX_TENSORS = TensorLayout(
    {
        "gpt_neox.embed_in.weight": "token_embd.weight",
        "gpt_neox.final_layer_norm.weight": "output_norm.weight",
        "gpt_neox.final_layer_norm.bias": "output_norm.bias",
        "embed_out.weight": "output.weight",
        "attention.query_key_value": "attn_qkv",
        "attention.dense": "attn_output",
        **dict.fromkeys((f"attention.{name}" for name in ("rotary_emb.inv_freq", "bias", "masked_bias")), ""),
        **_MLP,
    },
    joins_heads=True,
)
_FALCON_TENSORS = TensorLayout(
    {
        "transformer.word_embeddings.weight": "token_embd.weight",
        "transformer.ln_f.weight": "output_norm.weight",
        "transformer.ln_f.bias": "output_norm.bias",
        "self_attention.query_key_value": "attn_qkv",
        "self_attention.dense": "attn_output",
        "ln_attn": "attn_norm_2",
        "ln_mlp": "attn_norm",
        **_MLP,
    },
    joins_heads=True,
)
_PARALLEL, _OWN_NORM, _ROTATED = "use_parallel_residual", "attn_norm_2.weight", "rotary_pct"
_NEOX_KEYS = {_ROTATED: "partial_rotary_factor", "rotary_emb_base": "rope_theta"}
_FALCON_KEYS = {"ffn_hidden_size": "intermediate_size", "activation": "hidden_act"}


def state_neox(c: FolderConfig) -> None:
    """State the sizes of a GPT-NeoX."""
    c.note((_PARALLEL, *_NEOX_KEYS))
    c = c.rename(_NEOX_KEYS, {"attention_bias": True, "mlp_bias": True})
    c.state_model(kv_heads=c.heads, eps=(LAYER_EPS,), eps_key="layer_norm_eps", activation="gelu_tanh", biases="block")
    c.state_width()
    c.out.put(_PARALLEL, c.fields.flag(_PARALLEL, True), c.fields, _PARALLEL)
    state_rotation(c, part=0.25)


def state_falcon(c: FolderConfig) -> None:
    """State the sizes of a Falcon; its older layers have one head of keys, or as many as of queries."""
    is_new = c.fields.flag("new_decoder_architecture", False)
    c.fields.refuse_unless(("alibi",), (False,), "scores that become less with the distance are not supported there")
    c.fields.refuse_unless(("bias",), (False,), "biases are not supported there")
    if not is_new:
        c.fields.refuse_unless(("parallel_attn",), (True,), "blocks one after another are not supported there")
    has_one = not is_new and c.fields.flag("multi_query", True)
    norms = c.fields.integer("num_ln_in_parallel_attn", 1, 2, default=2) if is_new else 1
    usual = {"max_position_embeddings": 2048, "hidden_act": "gelu"} | ({"num_key_value_heads": 1} if has_one else {})
    c = c.rename(_FALCON_KEYS | ({} if has_one else {"num_kv_heads": "num_key_value_heads"}), usual)
    c.state_model(kv_heads=c.heads, eps=(LAYER_EPS,), eps_key="layer_norm_epsilon", activation="gelu_tanh", tied=True)
    c.state_width(default=4 * c.hidden)
    c.out.put_own("parallel_norms", norms == 2)
    state_rotation(c)


def build_neox(m: Metadata) -> Model:
    """Return the model of these metadata, whose blocks may also follow one another."""
    norms, rope, parallel = Norms(m.layer_eps, kind="layer", bias=True), m.rope(), m.fields.flag(_PARALLEL, True)
    block = m.feed_forward("gelu_tanh", gated=False)
    layer = Layer(m.attention(rope), block, norms, is_parallel=parallel, has_own_norms=parallel)
    return m.model([layer] * m.layers)


def build_falcon(m: Metadata) -> Model:
    """Return the model of these metadata; attention's own norm is the second of two."""
    m.fields.note(("tensor_data_layout",))  # how rows were ordered anew
    has_own = m.own.flag("parallel_norms", m.has_tensor(_OWN_NORM))
    mixer, feed_forward = ("attn_norm_2", "attn_norm") if has_own else ("attn_norm", "ffn_norm")
    norms = Norms(m.layer_eps, kind="layer", bias=True, mixer=mixer, feed_forward=feed_forward)
    block = m.feed_forward("gelu_tanh", gated=False)
    layer = Layer(m.attention(m.rope()), block, norms, is_parallel=True, has_own_norms=has_own)
    return m.model([layer] * m.layers)


_GPTJ_TENSORS = TensorLayout(
    {
        "transformer.wte.weight": "token_embd.weight",
        "transformer.ln_f.weight": "output_norm.weight",
        "transformer.ln_f.bias": "output_norm.bias",
        "ln_1": "attn_norm",
        "attn.q_proj": "attn_q",
        "attn.k_proj": "attn_k",
        "attn.v_proj": "attn_v",
        "attn.out_proj": "attn_output",
        "mlp.fc_in": "ffn_up",
        "mlp.fc_out": "ffn_down",
    },
    turns_neighbours=True,
)
_GPTJ_KEYS = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "activation_function": "hidden_act",
}


def state_gptj(c: FolderConfig) -> None:
    """State the sizes of a model, whose heads rotate as many numbers as `rotary_dim` says."""
    rope_dim = c.fields.integer("rotary_dim", 2, limits.MAX_HEAD_DIM, default=64)
    c = c.rename(_GPTJ_KEYS, {"mlp_bias": True, "lm_head_bias": True})
    c.state_model(
        kv_heads=c.heads, eps=(LAYER_EPS,), eps_key="layer_norm_epsilon", activation="gelu_tanh", biases="block"
    )
    c.state_width(default=4 * c.hidden)
    c.out.put("rope.dimension_count", rope_dim)
    state_rotation(c, rope_dim=rope_dim)


def build_gptj(m: Metadata) -> Model:
    """Return the model of these metadata."""
    attention, norms = m.attention(m.rope(interleaved=True)), Norms(m.layer_eps, kind="layer", bias=True)
    layer = Layer(attention, m.feed_forward("gelu_tanh", gated=False), norms, is_parallel=True)
    return m.model([layer] * m.layers)


FAMILIES = (
    Family("gptj", build_gptj, (Folder("gptj", "GPTJForCausalLM", state_gptj, _GPTJ_TENSORS),)),
    Family("gptneox", build_neox, (Folder("gpt_neox", "GPTNeoXForCausalLM", state_neox, _NEOX_TENSORS),)),
    Family(
        "falcon",
        build_falcon,
        (Folder("falcon", "FalconForCausalLM", state_falcon, _FALCON_TENSORS),),
    ),
)
