"""MiniMax M2: experts in all layers, chosen by sigmoids and a bias; queries and keys are normed as whole rows.

Source: llama.cpp, src/models/minimax-m2.cpp; transformers, models/minimax_m2.
"""

from __future__ import annotations

from mlxr.models import limits
from mlxr.models.components import Experts, Layer, Norms
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import FolderConfig
from mlxr.models.folders.mixers import state_experts
from mlxr.models.folders.rotations import state_rotation
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model


def state(c: FolderConfig) -> None:
    """State the sizes of a model; `rotary_dim` numbers of a head rotate, and its width is that of an expert."""
    c.fields.refuse_unless(("qk_norm_type",), ("per_layer",), "only norms of whole rows are supported there")
    c.fields.refuse_unless(("shared_intermediate_size",), (0,), "shared experts are not supported there")
    c.note(("use_qk_norm",))
    c.state_model()
    c.state_width()
    width = "intermediate_size"
    state_experts(c, count_keys=("num_local_experts",), features_key=width, scoring="sigmoid", renormalises=True)
    turns = c.fields.get("rotary_dim") is not None
    dim = c.fields.integer("rotary_dim", 2, limits.MAX_HEAD_DIM) if turns else None
    if dim is not None:
        c.out.put("rope.dimension_count", dim, c.fields, "rotary_dim")
        c.note(("partial_rotary_factor",))
    state_rotation(c, theta=5e6, rope_dim=dim)


def build(m: Metadata) -> Model:
    """Return the model of these metadata."""
    norms, rope, rule = Norms(m.rms_eps), m.rope(), m.routing("sigmoid", renormalises=True)
    experts = Experts(m.experts, m.expert_features, m.activation(), rule, choice_bias=True)
    return m.model(Layer(m.attention(rope, head_norms="joint"), experts, norms) for _ in range(m.layers))


FAMILIES = (Family("minimax-m2", build, (Folder("minimax_m2", "MiniMaxM2ForCausalLM", state),)),)
