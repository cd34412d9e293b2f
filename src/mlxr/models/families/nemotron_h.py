"""Nemotron-H and Nemotron 3: each layer is one block, a mixer (Mamba-2, or attention that rotates nothing) or a
feed-forward block without a gate, or experts. Those of Nemotron 3 Super read fewer columns than the stream has."""

from __future__ import annotations

from typing import Literal

from mlxr.models import limits
from mlxr.models.components import NO_ROPE, Experts, Layer, Norms
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import LAYER_EPS, RMS_EPS, FolderConfig, TensorLayout
from mlxr.models.folders.mixers import ATTENDS, Mamba2Keys, state_experts, state_mamba2
from mlxr.models.folders.rotations import state_rotation
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model

BlockKind = Literal["recurrent", "attention", "dense", "experts"]

NAMES = {
    "norm": "attn_norm",
    "mixer.q_proj": "attn_q",
    "mixer.k_proj": "attn_k",
    "mixer.v_proj": "attn_v",
    "mixer.o_proj": "attn_output",
    "mixer.in_proj": "ssm_in",
    "mixer.conv1d": "ssm_conv1d",
    "mixer.norm": "ssm_norm",
    "mixer.out_proj": "ssm_out",
    "mixer.up_proj": "ffn_up",
    "mixer.down_proj": "ffn_down",
    "mixer.gate": "ffn_gate_inp",
    "mixer.fc1_latent_proj": "ffn_latent_down",
    "mixer.fc2_latent_proj": "ffn_latent_up",
    "mixer.shared_experts.up_proj": "ffn_up_shexp",
    "mixer.shared_experts.down_proj": "ffn_down_shexp",
}
_KEYS = Mamba2Keys(
    "mamba_num_heads",
    "mamba_head_dim",
    "n_groups",
    "ssm_state_size",
    "conv_kernel",
    expand=None,
    needed=(("use_bias", False), ("mamba_proj_bias", False), ("use_conv_bias", True), ("mamba_hidden_act", "silu")),
)
_WITH_EXPERTS = "nemotron_h_moe"
_PATTERN, _LATENT = "hybrid_override_pattern", "moe_latent_size"
_LETTERS: dict[str, BlockKind] = {"M": "recurrent", "*": "attention", "-": "dense", "E": "experts"}
_WORDS: dict[str, BlockKind] = {
    "linear_attention": "recurrent",
    "mamba": "recurrent",
    **dict.fromkeys(ATTENDS, "attention"),
    "mlp": "dense",
    "moe": "experts",
}


def state(c: FolderConfig) -> None:
    """State a model. In files, blocks without features are the layers with mixers."""
    blocks = _read_blocks(c)
    c.layers = len(blocks)
    c.state_model(eps=(RMS_EPS, LAYER_EPS), eps_key="layer_norm_epsilon", activation="relu_squared", biases="block")
    state_rotation(c)
    if "recurrent" in blocks:
        state_mamba2(c, _KEYS)
    c.state_kv_layers([block == "attention" for block in blocks])
    if "experts" in blocks:
        c.out.architecture = _WITH_EXPERTS
        state_experts(
            c,
            count_keys=("n_routed_experts",),
            shared_key="moe_shared_expert_intermediate_size",
            scoring="sigmoid",
            renormalises=True,
            layers=[block == "experts" for block in blocks],
        )
        latent = c.fields.integer(_LATENT, 0, limits.MAX_WIDTH, default=0)
        if latent:
            c.out.put(_LATENT, latent, c.fields, _LATENT)
    c.note(("n_routed_experts", _LATENT))
    if "dense" in blocks or "experts" not in blocks:
        width = c.fields.integer("intermediate_size", 1, limits.MAX_WIDTH)
    else:
        width = c.out.integer("expert_feed_forward_length")
    c.out.put("feed_forward_length", [width if block in ("dense", "experts") else 0 for block in blocks])


def _read_blocks(c: FolderConfig) -> tuple[BlockKind, ...]:
    """Return the kind of the only block of each layer, which a folder gives as a letter or a word."""
    name = c.find_key("layers_block_type", "layer_types", _PATTERN)
    stated, known = c.fields.get(name), _LETTERS if name == _PATTERN else _WORDS
    wants = f"one of {', '.join(known)} for each layer, and a layer that attends"
    if not isinstance(stated, str if name == _PATTERN else list) or not 1 <= len(stated) <= limits.MAX_LAYERS:
        c.fields.refuse(name, wants)
    kinds = [known.get(str(item)) for item in stated]
    found = tuple(kind for kind in kinds if kind is not None)
    if len(found) != len(kinds) or "attention" not in found:
        c.fields.refuse(name, wants)
    return found


def build(m: Metadata) -> Model:
    """Return the model of these metadata: a layer with features is a feed-forward block, else one with keys attends."""
    norms, mamba, rope = Norms(m.rms_eps, feed_forward="attn_norm"), m.mamba2(), m.rope()
    widths, kv_heads = m.integers("feed_forward_length", 0, limits.MAX_WIDTH), max(m.kv_counts)
    if len({*widths} - {0}) != 1:
        m.fields.refuse("feed_forward_length", "one number for all layers that are no mixers, and 0 for these")
    rotates, experts = m.rotates((False,) * m.layers), _read_experts(m)
    layers = []
    for index, width in enumerate(widths):
        if not width:
            attention = m.attention(rope if rotates[index] else NO_ROPE, kv_heads=kv_heads)
            layers.append(Layer(attention if m.kv_counts[index] else mamba, None, norms))
        elif experts is not None and m.has_experts[index]:
            layers.append(Layer(None, experts, norms))
        else:
            block = m.feed_forward("relu_squared", gated=False, features=width)
            layers.append(Layer(None, block, norms))
    return m.model(layers)


def _read_experts(m: Metadata) -> Experts | None:
    if not m.experts:
        return None
    return Experts(
        m.experts,
        m.expert_features,
        m.activation("relu_squared"),
        m.routing("sigmoid", renormalises=True, floor=1e-20),
        gated=False,
        choice_bias=True,
        shared_features=m.shared_features(),
        latent=m.integer(_LATENT, 0, default=0),
    )


_FOLDERS = (Folder("nemotron_h", "NemotronHForCausalLM", state, TensorLayout(NAMES)),)
FAMILIES = (
    Family("nemotron_h", build, _FOLDERS),
    Family("nemotron_h_moe", build, _FOLDERS),
)
