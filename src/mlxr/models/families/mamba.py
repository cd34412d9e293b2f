"""Mamba and Mamba-2 (Codestral Mamba and others): all layers are only the recurrence, whose state has one size for any
text; and Jamba, some of whose layers attend instead, without a rotation, and some of which have experts.

Source: llama.cpp, src/models/mamba.cpp and jamba.cpp; transformers, models/mamba, falcon_mamba and jamba.
"""

from __future__ import annotations

from mlxr.models import limits
from mlxr.models.components import NO_ROPE, Experts, Layer, Norms
from mlxr.models.families.nemotron_h import NAMES
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import EXPERTS, RMS_EPS, Flags, FolderConfig, TensorLayout
from mlxr.models.folders.mixers import Mamba2Keys, MambaKeys, state_experts, state_mamba, state_mamba2
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model

_KEYS2 = Mamba2Keys(
    "num_heads",
    "head_dim",
    "n_groups",
    "state_size",
    "conv_kernel",
    expand=None,
    needed=(("use_bias", False), ("use_conv_bias", True), ("hidden_act", "silu")),
)
_KEYS = MambaKeys(
    "conv_kernel", "state_size", "time_step_rank", "expand", "intermediate_size", "use_conv_bias", "use_bias"
)
_JAMBA = {
    "mamba.in_proj": "ssm_in",
    "mamba.conv1d": "ssm_conv1d",
    "mamba.x_proj": "ssm_x",
    "mamba.dt_proj": "ssm_dt",
    "mamba.out_proj": "ssm_out",
    **{f"mamba.{part}_layernorm": f"ssm_{part}_norm" for part in ("dt", "b", "c")},
    "pre_ff_layernorm": "ffn_norm",
    **{f"feed_forward.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    "feed_forward.router": "ffn_gate_inp",
    "mamba.A_log": "ssm_a",
    "mamba.D": "ssm_d",
}
_CONTEXT = 1 << 20  # files state it; the model itself has no bound


def state_mamba1(c: FolderConfig) -> None:
    """State the sizes of a Mamba."""
    _state_layers(c, tied=True)
    state_mamba(c, _KEYS)


def state_falcon(c: FolderConfig) -> None:
    """State the sizes of a Falcon Mamba, which norms B, C and the steps."""
    state_mamba1(c)
    eps = "mixer_rms_eps"
    c.out.put("ssm.dt_b_c_rms", True)
    c.out.put_own("ssm.norm_eps", c.fields.number(eps, 1e-30, 0.5, default=1e-6), c.fields, eps)


def state(c: FolderConfig) -> None:
    """State the sizes of a Mamba-2."""
    _state_layers(c, tied=False)
    state_mamba2(c, _KEYS2)


def _state_layers(c: FolderConfig, *, tied: bool) -> None:
    out, fields, eps_key = c.out, c.fields, c.find_key("rms_norm_eps", "layer_norm_epsilon")
    out.put("embedding_length", c.hidden, fields, "hidden_size")
    out.put("context_length", fields.integer("max_position_embeddings", 1, limits.MAX_CONTEXT, default=_CONTEXT))
    out.put("block_count", c.layers, fields, "num_hidden_layers")
    out.put("vocab_size", fields.integer("vocab_size", 1, limits.MAX_VOCABULARY), fields, "vocab_size")
    out.put("attention.head_count", 0)
    out.put("feed_forward_length", 0)
    out.put(RMS_EPS, fields.number(eps_key, 1e-30, 0.5), fields, eps_key)
    c.state_output(tied=tied)


def state_jamba(c: FolderConfig) -> None:
    """State the sizes of a Jamba: one in so many layers attends, and one in so many has experts."""
    attends, mixtures = _read_period(c, "attn", 8, 4), _read_period(c, "expert", 2, 1)
    if not any(attends):
        c.fields.refuse("attn_layer_offset", f"below the {c.layers} layers")
    c.state_model(kv_heads=c.heads)
    c.state_kv_layers(attends)
    state_mamba(c, MambaKeys())
    count_key = c.find_key("num_local_experts", "num_experts")
    c.note(EXPERTS)
    if any(mixtures) and c.fields.integer(count_key, 1, limits.MAX_EXPERTS, default=16) > 1:
        state_experts(c, count_keys=(count_key,), features_key="intermediate_size", layers=mixtures)
    c.state_width()


def _read_period(c: FolderConfig, part: str, period: int, offset: int) -> Flags:
    period = c.fields.integer(f"{part}_layer_period", 1, limits.MAX_LAYERS, default=period)
    offset = c.fields.integer(f"{part}_layer_offset", 0, period - 1, default=min(offset, period - 1))
    return tuple(index % period == offset for index in range(c.layers))


def build_mamba(m: Metadata) -> Model:
    """Return the model of these metadata."""
    m.fields.note(("attention.head_count", "feed_forward_length"))
    return m.model([Layer(m.mamba(), None, Norms(m.rms_eps))] * m.layers)


def build(m: Metadata) -> Model:
    """Return a model of Mamba-2."""
    m.fields.note(("attention.head_count", "feed_forward_length"))
    return m.model([Layer(m.mamba2(), None, Norms(m.rms_eps))] * m.layers)


def build_jamba(m: Metadata) -> Model:
    """Return the model of these metadata: layers with heads of keys attend."""
    norms, mamba = Norms(m.rms_eps), m.mamba(is_normed=True)
    attention = m.attention(NO_ROPE, kv_heads=max(m.kv_counts))
    m.fields.note(("expert_count", "expert_used_count"))  # files say 1 if no layer has experts
    mixes = any(m.has_experts)
    experts = Experts(m.experts, m.expert_features, m.activation(), m.routing()) if mixes else None
    return m.model(
        Layer(attention if keys else mamba, experts if experts is not None and flag else m.feed_forward(), norms)
        for keys, flag in zip(m.kv_counts, m.has_experts, strict=True)
    )


_NAMES = NAMES | {
    "mixer.x_proj": "ssm_x",
    "mixer.dt_proj": "ssm_dt",
    "mixer.A_log": "ssm_a",
    "mixer.D": "ssm_d",
    "backbone.embeddings.weight": "token_embd.weight",
    "backbone.norm_f.weight": "output_norm.weight",
}
FAMILIES = (
    Family(
        "mamba",
        build_mamba,
        (
            Folder("mamba", "MambaForCausalLM", state_mamba1, TensorLayout(_NAMES)),
            Folder("falcon_mamba", "FalconMambaForCausalLM", state_falcon, TensorLayout(_NAMES)),
        ),
    ),
    Family("mamba2", build, (Folder("mamba2", "Mamba2ForCausalLM", state, TensorLayout(NAMES)),)),
    Family("jamba", build_jamba, (Folder("jamba", "JambaForCausalLM", state_jamba, TensorLayout(_JAMBA)),)),
)
