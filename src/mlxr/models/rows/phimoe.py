"""Folders of Phi-3.5-MoE, whose experts are chosen by sparsemixer."""

from __future__ import annotations

from mlxr.models.folders.config import FolderConfig
from mlxr.models.folders.family import FolderFamily
from mlxr.models.folders.mixers import state_expert_width, state_experts
from mlxr.models.folders.rotations import state_rotation, state_windows

_JITTER, _USUAL_JITTER = "router_jitter_noise", 0.01
_USED = 2  # experts of a token


def state(c: FolderConfig) -> None:
    """State a model; files state what its layer norms add to the variance as if these were RMS norms."""
    c.state_model(biases="block")
    experts = state_experts(c, count_keys=("num_local_experts",), features_key="intermediate_size")
    if c.out.integer("expert_used_count") != _USED:
        c.fields.refuse("num_experts_per_tok", f"{_USED}, for which alone this routing is known")
    c.out.put(_JITTER, c.fields.number(_JITTER, 0.0, 1.0, default=_USUAL_JITTER), c.fields, _JITTER)
    state_expert_width(c, experts)
    state_rotation(c, theta=1e6, has_mscales=True)
    state_windows(c, default=0)


FOLDERS = (FolderFamily("phimoe", "PhimoeForCausalLM", "phimoe", state, older_class="PhiMoEForCausalLM"),)
