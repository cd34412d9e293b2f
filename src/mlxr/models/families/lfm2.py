"""LFM2: short convolutions instead of attention in most layers; with experts or without."""

from __future__ import annotations

from mlxr.models import limits
from mlxr.models.components import Experts, Layer, Norms, ShortConv
from mlxr.models.families.siglip import make_lfm2_tower
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import FolderConfig, TensorLayout
from mlxr.models.folders.mixers import read_recurrent_layers, state_expert_width, state_experts
from mlxr.models.folders.rotations import state_rotation
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model

_NAMES = {
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "self_attn.out_proj": "attn_output",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
    "feed_forward.gate": "ffn_gate_inp",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
}
_TENSORS = TensorLayout(_NAMES)


def _state_common(c: FolderConfig) -> None:
    c.state_model(eps_key="norm_eps", tied=True)
    c.fields.refuse_unless(("conv_bias",), (False,), "biases of convolutions are not supported")
    taps = c.fields.integer("conv_L_cache", 2, limits.MAX_TAPS, default=3)
    c.out.put("shortconv.l_cache", taps, c.fields, "conv_L_cache")
    c.state_kv_layers([not flag for flag in read_recurrent_layers(c, "conv")])
    state_rotation(c, theta=1e6)


def state_dense(c: FolderConfig) -> None:
    """State a model without experts."""
    _state_common(c)
    c.out.put("feed_forward_length", _read_width(c))


def state_mixture(c: FolderConfig) -> None:
    """State a model with experts."""
    _state_common(c)
    experts = state_experts(c, first_key="num_dense_layers", scoring="sigmoid", renormalises=True)
    state_expert_width(c, experts)


def _read_width(c: FolderConfig) -> int:
    """Return the features of a feed-forward block; folders state how many one without a gate would have."""
    stated = c.fields.integer("intermediate_size", 1, limits.MAX_WIDTH, default=12288)
    stated = c.fields.integer("block_ff_dim", 1, limits.MAX_WIDTH, default=stated)
    if not c.fields.flag("block_auto_adjust_ff_dim", True):
        return stated
    factor = c.fields.number("block_ffn_dim_multiplier", 1e-3, 1e3, default=1.0)
    multiple = c.fields.integer("block_multiple_of", 1, limits.MAX_WIDTH, default=256)
    return -(-int(factor * int(2 * stated / 3)) // multiple) * multiple


def build(m: Metadata) -> Model:
    """Return the model of these metadata."""
    norms, rope, kv_heads = Norms(m.rms_eps), m.rope(), max(m.kv_counts)
    conv = ShortConv(m.hidden, m.integer("shortconv.l_cache", 2, limits.MAX_TAPS))
    experts = None
    if m.experts:
        rule = m.routing("sigmoid", renormalises=True, floor=1e-6)
        experts = Experts(m.experts, m.expert_features, m.activation(), rule, choice_bias=True)
    return m.model(
        (
            Layer(
                m.attention(rope, kv_heads=kv_heads, window=window, head_norms="each") if count else conv,
                experts if experts is not None and has_experts else m.feed_forward(),
                norms,
            )
            for count, window, has_experts in zip(m.kv_counts, m.windows(), m.has_experts, strict=True)
        ),
        output_norm="token_embd_norm",
    )


TOWERS = (make_lfm2_tower("lfm2"),)
FAMILIES = (
    Family("lfm2", build, (Folder("lfm2", "Lfm2ForCausalLM", state_dense, _TENSORS),)),
    Family("lfm2moe", build, (Folder("lfm2_moe", "Lfm2MoeForCausalLM", state_mixture, _TENSORS),)),
)
