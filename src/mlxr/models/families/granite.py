"""Granite: embeddings, scores, the blocks' results, and logits are multiplied by numbers of the file.

Granite SWA has a sink for each head, and windows in three layers of four. Granite 4 has layers with Mamba-2 instead of
attention; its attention may rotate nothing. Some models have experts beside a block that all tokens go through.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlxr.models.components import NO_ROPE, Attention, Experts, Layer, Mamba2, Norms, Rope
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import FolderConfig, TensorLayout
from mlxr.models.folders.mixers import (
    Mamba2Keys,
    read_recurrent_layers,
    state_expert_width,
    state_experts,
    state_mamba2,
)
from mlxr.models.folders.rotations import FULL, WINDOWED, state_rotation, state_windows
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model

_NAMES = {
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "block_sparse_moe.router": "ffn_gate_inp",
    "block_sparse_moe.input_linear": "ffn_gate_up_exps",
    "block_sparse_moe.output_linear": "ffn_down_exps",
    "shared_mlp.input_linear": "ffn_gate_up_shexp",
    "shared_mlp.output_linear": "ffn_down_shexp",
    "mamba.in_proj": "ssm_in",
    "mamba.conv1d": "ssm_conv1d",
    "mamba.norm": "ssm_norm",
    "mamba.out_proj": "ssm_out",
}
_TENSORS = TensorLayout(_NAMES)
_POSITIONS, _SHARED_WIDTH = "position_embedding_type", "shared_intermediate_size"
_TURNING = "attention.rope_pattern"  # a flag for each layer of those with windows
_TURNS = "rope.scaling.finetuned"  # a flag in files of Granite: layers rotate


def _state_common(c: FolderConfig) -> None:
    c.state_model(biases="block")
    c.state_multipliers()
    c.out.put(_TURNS, True)
    state_rotation(c)


def _state_experts(c: FolderConfig, *, is_optional: bool) -> bool:
    experts = state_experts(
        c,
        count_keys=("num_local_experts",),
        features_key="intermediate_size",
        shared_key=_SHARED_WIDTH,
        renormalises=True,
        is_optional=is_optional,
    )
    if experts:
        state_expert_width(c, experts)
    return bool(experts)


def state_dense(c: FolderConfig) -> None:
    """State a model without experts."""
    _state_common(c)
    c.state_width()


def state_mixture(c: FolderConfig) -> None:
    """State a model with experts."""
    _state_common(c)
    _state_experts(c, is_optional=False)


def state_windowed(c: FolderConfig) -> None:
    """State a Granite SWA; by default the first of every four layers sees everything."""
    _state_common(c)
    c.state_width()
    kinds = [WINDOWED if index % 4 else FULL for index in range(c.layers)]
    state_windows(c.rename({}, {"layer_types": kinds}), default=128, states_layers=True)
    thetas = c.fields.get("layer_rope_theta")
    if thetas is not None:
        theta = c.out.values["rope.freq_base"]
        if not isinstance(thetas, list) or len(thetas) != c.layers or any(one not in (0, theta) for one in thetas):
            c.fields.refuse("layer_rope_theta", f"a list of {c.layers}, each one 0 or {theta}")
        c.out.put(_TURNING, [bool(one) for one in thetas])


def state_hybrid(c: FolderConfig) -> None:
    """State a Granite 4; one whose layers all attend is a Granite without Mamba-2."""
    _state_common(c)
    has_experts = _state_experts(c, is_optional=True)
    if not has_experts:
        c.state_width(_SHARED_WIDTH)
    recurrent = read_recurrent_layers(c, "linear_attention", "mamba")
    if all(recurrent):
        c.fields.refuse("layer_types", "a layer that attends")
    if any(recurrent):
        state_mamba2(c, Mamba2Keys())
        c.state_kv_layers([not flag for flag in recurrent])
    else:
        c.out.architecture = "granitemoe" if has_experts else "granite"
    positions = c.fields.text(_POSITIONS, default="nope")
    if positions not in ("nope", "rope"):
        c.fields.refuse(_POSITIONS, "rope or nope")
    c.out.put(_TURNS, positions == "rope", c.fields, _POSITIONS)


def build(m: Metadata, *, embedding: float = 1.0, residual: float = 1.0, logits: float = 1.0) -> Model:
    """Return a model all of whose layers attend, with these multipliers if the file states none."""
    rope, mixers = _find_rope(m), []
    for window in m.windows():
        mixers.append(_attend(m, rope, window, m.kv_heads))
    return _make_model(m, mixers, embedding, residual, logits)


def build_windowed(m: Metadata) -> Model:
    """Return a model with sinks and windows."""
    rope, turns = _find_rope(m), m.fields.flags(_TURNING, m.layers) or (True,) * m.layers
    mixers = [
        m.attention(rope if turn else NO_ROPE, window=window, scale=m.scale("attention.scale"), sinks=True)
        for turn, window in zip(turns, m.windows(full_every=4), strict=True)
    ]
    return _make_model(m, mixers)


def build_hybrid(m: Metadata) -> Model:
    """Return a model some of whose layers have Mamba-2."""
    rope, mamba, kv_heads = _find_rope(m), m.mamba2(), max(m.kv_counts)
    mixers = [
        _attend(m, rope, window, kv_heads) if count else mamba
        for count, window in zip(m.kv_counts, m.windows(), strict=True)
    ]
    return _make_model(m, mixers)


def _find_rope(m: Metadata) -> Rope:
    rope = m.rope(interleaved=True)
    return rope if m.fields.flag(_TURNS, True) else NO_ROPE


def _attend(m: Metadata, rope: Rope, window: int | None, kv_heads: int) -> Attention:
    return m.attention(rope, kv_heads=kv_heads, window=window, scale=m.scale("attention.scale"))


def _make_model(
    m: Metadata,
    mixers: Sequence[Attention | Mamba2],
    embedding: float = 1.0,
    residual: float = 1.0,
    logits: float = 1.0,
) -> Model:
    norms, residual_scale = Norms(m.rms_eps), m.scale("residual_scale") or residual
    experts = None
    if m.experts:
        rule = m.routing(renormalises=True)
        experts = Experts(m.experts, m.expert_features, m.activation(), rule, shared_features=m.shared_features())
    return m.model(
        (
            Layer(
                mixer,
                experts if experts is not None and has_experts else m.feed_forward(),
                norms,
                residual_scale=residual_scale,
            )
            for mixer, has_experts in zip(mixers, m.has_experts, strict=True)
        ),
        embedding_scale=m.scale("embedding_scale") or embedding,
        logit_scale=1.0 / (m.scale("logit_scale") or logits),  # files state the divisor of logits
    )


FAMILIES = (
    Family(
        "granite_swa",
        build_windowed,
        (Folder("granite_swa", "GraniteSWAForCausalLM", state_windowed),),
    ),
    Family("granite", build, (Folder("granite", "GraniteForCausalLM", state_dense, _TENSORS),)),
    Family(
        "granitemoe",
        build,
        (
            Folder("granitemoe", "GraniteMoeForCausalLM", state_mixture, _TENSORS),
            Folder("granitemoeshared", "GraniteMoeSharedForCausalLM", state_mixture, _TENSORS),
        ),
    ),
    Family(
        "granitehybrid",
        build_hybrid,
        (Folder("granitemoehybrid", "GraniteMoeHybridForCausalLM", state_hybrid, _TENSORS),),
    ),
)
