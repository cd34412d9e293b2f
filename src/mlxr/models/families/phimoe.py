"""Phi-3.5-MoE: layer norms with biases, and experts that sparsemixer chooses.

Files state what its layer norms add to the variance as if these were RMS norms. Those that state no jitter mean a
softmax of the logits of the chosen experts.
"""

from __future__ import annotations

from mlxr.models.components import Experts, Layer, Norms
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import FolderConfig
from mlxr.models.folders.mixers import state_expert_width, state_experts
from mlxr.models.folders.rotations import state_rotation, state_windows
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model

_JITTER, _USUAL_JITTER = "router_jitter_noise", 0.01  # the key of GGUF and of folders
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


def build(m: Metadata) -> Model:
    """Return the model of these metadata."""
    norms, rope = Norms(m.rms_eps, kind="layer", bias=True), m.rope()
    if m.fields.get(_JITTER) is None:
        rule = m.routing("softmax_chosen")
    else:
        rule = m.routing("sparsemixer", jitter=m.number(_JITTER, 0.0, 1.0))
    experts = Experts(m.experts, m.expert_features, m.activation(), rule)
    return m.model(
        Layer(m.attention(rope, window=window), experts if has_experts else m.feed_forward(), norms)
        for window, has_experts in zip(m.windows(), m.has_experts, strict=True)
    )


FAMILIES = (Family("phimoe", build, (Folder("phimoe", "PhimoeForCausalLM", state, older_class="PhiMoEForCausalLM"),)),)
