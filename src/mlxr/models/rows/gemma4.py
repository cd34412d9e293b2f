"""Folders of Gemma 4: heads of layers with and without a window have sizes of their own, later layers may read the keys
and values of earlier ones, and all may have embeddings of their own."""

from __future__ import annotations

from mlxr.models import limits
from mlxr.models.folders.config import EXPERTS, Flags, FolderConfig
from mlxr.models.folders.family import FolderFamily
from mlxr.models.folders.mixers import state_expert_width, state_experts
from mlxr.models.folders.rotations import state_rotation, state_window_theta, state_windows
from mlxr.models.folders.statement import TensorLayout
from mlxr.models.rope_factors import ROPE_FACTORS
from mlxr.models.rows.gemma import NORM_NAMES

_ROTATION = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
_INPUTS, _DEFAULT_INPUTS = "hidden_size_per_layer_input", 256


def state(c: FolderConfig) -> None:
    """State the sizes of a model."""
    c.state_model(activation="gelu_tanh", tied=True)
    c.fields.refuse_unless(("use_bidirectional_attention",), ("vision",), "only causal attention is supported")
    c.note(EXPERTS)
    if c.fields.flag("enable_moe_block", False):
        state_expert_width(c, state_experts(c, used_key="top_k_experts", renormalises=True))
    else:
        c.state_width()
    head_dim, kv_heads = _state_heads(c)
    state_rotation(c, unstated=_ROTATION, head_dim=head_dim)
    c.out.vectors.setdefault(ROPE_FACTORS, [1.0] * (c.out.integer("rope.dimension_count") // 2))
    windowed = state_windows(c, default=512, full_every=6, last_full=True, states_layers=True)
    state_window_theta(c, 10000.0)
    _state_layers(c, windowed, kv_heads)
    c.state_softcaps()


def _state_heads(c: FolderConfig) -> tuple[int, int]:
    """State the size of heads, and return that of layers without a window and their heads of keys: stated for all of
    them, or for each by its number."""
    fields, full, names = c.fields, c.fields, ("global_head_dim", "num_global_key_value_heads")
    layers = fields.mapping("per_layer_config")
    if layers is not None:
        names = "head_dim", "num_key_value_heads"
        stated = {repr(fields.get("per_layer_config")[number]): number for number in layers.names()}  # type: ignore[index]
        if len(stated) != 1:
            fields.refuse("per_layer_config", "the same of all layers without a window")
        full = layers.mapping(next(iter(stated.values()))) or fields
    head_dim = full.integer(names[0], 2, limits.MAX_HEAD_DIM, default=512 if layers is None else c.head_dim)
    for name in ("attention.key_length", "attention.value_length"):
        c.out.put(name, head_dim, full, names[0])
    for name in ("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"):
        c.out.put(name, c.head_dim, fields, c.head_key)
    kv_heads = c.out.integer("attention.head_count_kv")
    if layers is not None or fields.flag("attention_k_eq_v", False):
        kv_heads = full.integer(names[1], 1, limits.MAX_HEADS, default=kv_heads)
        c.out.put("attention.head_count_kv", c.out.integer("attention.head_count_kv"), full, names[1])
    return head_dim, kv_heads


def _state_layers(c: FolderConfig, windowed: Flags, full_kv_heads: int) -> None:
    """State how the layers differ."""
    fields, out = c.fields, c.out
    shared = fields.integer("num_kv_shared_layers", 0, c.layers, default=0)
    out.put("attention.shared_kv_layers", shared, fields, "num_kv_shared_layers")
    kv_heads, width = out.integer("attention.head_count_kv"), out.integer("feed_forward_length")
    is_wide = shared and fields.flag("use_double_wide_mlp", False)
    shared_width = 2 * fields.integer("intermediate_size", 1, limits.MAX_WIDTH // 2) if is_wide else width
    out.values["attention.head_count_kv"] = [kv_heads if flag else full_kv_heads for flag in windowed]
    out.values["feed_forward_length"] = [width] * (c.layers - shared) + [shared_width] * shared
    unstated = 0 if fields.has(_INPUTS) else _DEFAULT_INPUTS  # null says: none
    features = fields.integer(_INPUTS, 0, limits.MAX_WIDTH, default=unstated)
    out.put("embedding_length_per_layer_input", features, fields, _INPUTS)
    out.put_own("attention.keys_as_values", fields.flag("attention_k_eq_v", False))


FOLDERS = (FolderFamily("gemma4_text", "Gemma4ForCausalLM", "gemma4", state, TensorLayout(NORM_NAMES)),)
