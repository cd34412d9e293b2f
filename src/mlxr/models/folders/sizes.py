"""What a `config.json` says of layers of two sizes (Gemma 4), as GGUF's metadata.

Layers with and without windows have heads of their own sizes, later layers may read the keys and values of earlier
ones, and all may have embeddings of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlxr.models import limits
from mlxr.models.fields import Fields
from mlxr.models.folders.statement import Statement
from mlxr.models.window_config import PATTERN

_INPUT_FEATURES, _DEFAULT_INPUT_FEATURES = "hidden_size_per_layer_input", 256


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of the layers: their size, the number of key heads, and which keys of the folder say so."""

    head_dim: int
    kv_heads: int
    fields: Fields
    dim_key: str
    kv_key: str


def read_full_heads(fields: Fields, windowed: Heads) -> Heads:
    """Return the heads of layers without a window: stated for all of them, or for each by its number."""
    full = fields
    names = "global_head_dim", "num_global_key_value_heads"
    layers = fields.mapping("per_layer_config")
    if layers is not None:
        names = "head_dim", "num_key_value_heads"
        stated = {repr(fields.get("per_layer_config")[number]): number for number in layers.names()}  # type: ignore[index]
        if len(stated) != 1:
            fields.refuse("per_layer_config", "the same of all layers without a window")
        full = layers.mapping(next(iter(stated.values()))) or fields
    default = 512 if layers is None else windowed.head_dim
    full_dim = full.integer(names[0], 2, limits.MAX_HEAD_DIM, default=default)
    if layers is None and not fields.flag("attention_k_eq_v", False):
        return Heads(full_dim, windowed.kv_heads, full, names[0], windowed.kv_key)
    kv_heads = full.integer(names[1], 1, limits.MAX_HEADS, default=windowed.kv_heads)
    return Heads(full_dim, kv_heads, full, *names)


def state_sizes(
    out: Statement, fields: Fields, windowed: tuple[bool, ...], heads: Heads, window_heads: Heads, ffn: int
) -> None:
    """State how the layers differ."""
    fields.refuse_unless(("use_bidirectional_attention",), ("vision",), "only causal attention is supported")
    layers = len(windowed)
    shared = fields.integer("num_kv_shared_layers", 0, layers, default=0)
    is_wide = shared and fields.flag("use_double_wide_mlp", False)
    shared_ffn = 2 * fields.integer("intermediate_size", 1, limits.MAX_WIDTH // 2) if is_wide else ffn
    unstated = 0 if fields.has(_INPUT_FEATURES) else _DEFAULT_INPUT_FEATURES  # null says: none
    counts = [window_heads.kv_heads if flag else heads.kv_heads for flag in windowed]
    out.put("attention.head_count_kv", counts, heads.fields, heads.kv_key)
    for name in ("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"):
        out.put(name, window_heads.head_dim, window_heads.fields, window_heads.dim_key)
    out.put(PATTERN, list(windowed))
    out.put("attention.shared_kv_layers", shared, fields, "num_kv_shared_layers")
    out.put("feed_forward_length", [ffn] * (layers - shared) + [shared_ffn] * shared, fields, "intermediate_size")
    features = fields.integer(_INPUT_FEATURES, 0, limits.MAX_WIDTH, default=unstated)
    out.put("embedding_length_per_layer_input", features, fields, _INPUT_FEATURES)
    out.put_own("attention.keys_as_values", fields.flag("attention_k_eq_v", False))
