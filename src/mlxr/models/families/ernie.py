"""ERNIE 4.5: Llama's layers; neighbours rotate in folders, too.

With experts, layers from a certain one on have them, chosen by softmax and a bias, beside a block that all tokens go
through.
"""

from __future__ import annotations

from mlxr.models import limits
from mlxr.models.components import Experts, Layer, Norms
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import FolderConfig, TensorLayout
from mlxr.models.folders.mixers import state_experts
from mlxr.models.folders.rotations import state_rotation
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model


def state(c: FolderConfig) -> None:
    """State the sizes of a model."""
    c.state_model(kv_heads=c.heads, biases="use" if c.fields.flag("use_bias", False) else None, tied=True)
    c.state_width()
    state_rotation(c)


def state_mixture(c: FolderConfig) -> None:
    """State the sizes of a model with experts, which one in so many layers of a range has."""
    state(c)
    step = c.fields.integer("moe_layer_interval", 1, limits.MAX_LAYERS, default=1)
    first = c.fields.integer("moe_layer_start_index", 0, c.layers - 1, default=1)
    last = c.fields.integer("moe_layer_end_index", -1, limits.MAX_LAYERS, default=-1)
    layers = [
        first <= index <= (c.layers if last < 0 else last) and (index + 1) % step == 0 for index in range(c.layers)
    ]
    state_experts(c, count_keys=("moe_num_experts",), used_key="moe_k", renormalises=True, layers=layers)
    shared = c.fields.integer("moe_num_shared_experts", 0, limits.MAX_STATED, default=2)
    features = shared * c.out.integer("expert_feed_forward_length")
    c.out.put("expert_shared_feed_forward_length", features, c.fields, "moe_num_shared_experts")
    c.out.put("interleave_moe_layer_step", step, c.fields, "moe_layer_interval")
    c.out.put("leading_dense_block_count", first, c.fields, "moe_layer_start_index")


def build(m: Metadata) -> Model:
    """Return the model of these metadata."""
    norms, rope = Norms(m.rms_eps), m.rope(interleaved=True)
    return m.model(Layer(m.attention(rope), m.feed_forward(), norms) for _ in range(m.layers))


def build_mixture(m: Metadata) -> Model:
    """Return the model of these metadata, which has experts in layers with a router."""
    norms, rope, rule = Norms(m.rms_eps), m.rope(interleaved=True), m.routing(renormalises=True)
    m.fields.note(("interleave_moe_layer_step",))
    experts = Experts(
        m.experts, m.expert_features, m.activation(), rule, choice_bias=True, shared_features=m.shared_features()
    )
    return m.model(Layer(m.attention(rope), experts if flag else m.feed_forward(), norms) for flag in m.has_experts)


_TENSORS = TensorLayout(turns_neighbours=True)
FAMILIES = (
    Family("ernie4_5", build, (Folder("ernie4_5", "Ernie4_5ForCausalLM", state, _TENSORS),)),
    Family(
        "ernie4_5-moe", build_mixture, (Folder("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", state_mixture, _TENSORS),)
    ),
)
