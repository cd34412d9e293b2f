"""GPT-J: both blocks from one layer norm, side by side; neighbouring numbers of a head rotate, and products of
feed-forward blocks have biases, as has the output."""

from __future__ import annotations

from mlxr.models import limits
from mlxr.models.components import Layer, Norms
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import LAYER_EPS, FolderConfig, TensorLayout
from mlxr.models.folders.rotations import state_rotation
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model

_TENSORS = TensorLayout(
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
_KEYS = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "activation_function": "hidden_act",
}


def state(c: FolderConfig) -> None:
    """State the sizes of a model, whose heads rotate as many numbers as `rotary_dim` says."""
    rope_dim = c.fields.integer("rotary_dim", 2, limits.MAX_HEAD_DIM, default=64)
    c = c.rename(_KEYS, {"mlp_bias": True, "lm_head_bias": True})
    c.state_model(
        kv_heads=c.heads, eps=(LAYER_EPS,), eps_key="layer_norm_epsilon", activation="gelu_tanh", biases="block"
    )
    c.state_width(default=4 * c.hidden)
    c.out.put("rope.dimension_count", rope_dim)
    state_rotation(c, rope_dim=rope_dim)


def build(m: Metadata) -> Model:
    """Return the model of these metadata."""
    attention, norms = m.attention(m.rope(interleaved=True)), Norms(m.layer_eps, kind="layer", bias=True)
    layer = Layer(attention, m.feed_forward("gelu_tanh", gated=False), norms, is_parallel=True)
    return m.model([layer] * m.layers)


FAMILIES = (Family("gptj", build, (Folder("gptj", "GPTJForCausalLM", state, _TENSORS),)),)
