"""Folders of Granite: with experts, with Mamba-2 in some layers, and without either."""

from __future__ import annotations

from mlxr.models.folders.config import FolderConfig
from mlxr.models.folders.family import FolderFamily
from mlxr.models.folders.mixers import (
    Mamba2Keys,
    read_recurrent_layers,
    state_expert_width,
    state_experts,
    state_mamba2,
)
from mlxr.models.folders.rotations import state_rotation
from mlxr.models.folders.statement import TensorLayout

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
_TURNS = "rope.scaling.finetuned"  # where files of Granite say whether layers rotate


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


FOLDERS = (
    FolderFamily("granite", "GraniteForCausalLM", "granite", state_dense, _TENSORS),
    FolderFamily("granitemoe", "GraniteMoeForCausalLM", "granitemoe", state_mixture, _TENSORS),
    FolderFamily("granitemoeshared", "GraniteMoeSharedForCausalLM", "granitemoe", state_mixture, _TENSORS),
    FolderFamily("granitemoehybrid", "GraniteMoeHybridForCausalLM", "granitehybrid", state_hybrid, _TENSORS),
)
