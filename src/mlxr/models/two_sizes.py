"""What files say of layers of two sizes (Gemma 4): out of `config.json` and out of GGUF's metadata, and back into the
latter.

Layers with and without windows have heads of their own sizes, later layers may read the keys and values of earlier
ones, and all may have embeddings of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mlxr.core.errors import ModelError
from mlxr.kernels.tensor import TensorSource
from mlxr.models import limits
from mlxr.models.fields import Fields
from mlxr.models.rope_factors import ROPE_FACTORS
from mlxr.models.window_config import PATTERN

if TYPE_CHECKING:
    from mlxr.models.config import ModelConfig

_REFUSED = ((("use_bidirectional_attention",), ("vision",), "only causal attention is supported"),)
_INPUT_FEATURES, _DEFAULT_INPUT_FEATURES = "hidden_size_per_layer_input", 256


def read_hf_full_heads(fields: Fields, head_dim: int, kv_heads: int) -> tuple[int, int]:
    """Head size and key heads of layers without a window: stated for all of them, or for each by its number."""
    full = fields
    names = "global_head_dim", "num_global_key_value_heads"
    layers = fields.mapping("per_layer_config")
    if layers is not None:
        names = "head_dim", "num_key_value_heads"
        stated = {repr(fields.get("per_layer_config")[number]): number for number in layers.names()}  # type: ignore[index]
        if len(stated) != 1:
            fields.refuse("per_layer_config", "the same of all layers without a window")
        full = layers.mapping(next(iter(stated.values()))) or fields
    full_dim = full.integer(names[0], 2, limits.MAX_HEAD_DIM, default=512 if layers is None else head_dim)
    if layers is None and not fields.flag("attention_k_eq_v", False):
        return full_dim, kv_heads
    return full_dim, full.integer(names[1], 1, limits.MAX_HEADS, default=kv_heads)


def read_hf_sizes(fields: Fields, layers: int) -> dict[str, Any]:
    """Which values are keys, which layers read the keys and values of others, and whether all have embeddings."""
    for names, harmless, why in _REFUSED:
        fields.refuse_unless(names, harmless, why)
    shared = fields.integer("num_kv_shared_layers", 0, layers, default=0)
    is_wide = shared and fields.flag("use_double_wide_mlp", False)
    unstated = 0 if fields.has(_INPUT_FEATURES) else _DEFAULT_INPUT_FEATURES  # null says: none
    return {
        "input_features": fields.integer(_INPUT_FEATURES, 0, limits.MAX_WIDTH, default=unstated) or None,
        "keys_as_values": fields.flag("attention_k_eq_v", False),
        "shared_layers": shared,
        "shared_ffn": 2 * fields.integer("intermediate_size", 1, limits.MAX_WIDTH // 2) if is_wide else None,
    }


def read_gguf_sizes(fields: Fields, windowed: tuple[bool, ...], tensors: Mapping[str, TensorSource]) -> dict[str, Any]:
    """How layers with windows differ from the others, those that share keys and values from those before, and whether
    all have embeddings of their own."""
    if ROPE_FACTORS not in tensors:
        raise ModelError(f"tensor {ROPE_FACTORS} is missing, which says how much of a head turns; convert it anew")
    layers = len(windowed)
    shared = fields.integer("attention.shared_kv_layers", 0, layers, default=0)
    counts = fields.integers("attention.head_count_kv", layers, 1, limits.MAX_HEADS)
    widths = fields.integers("feed_forward_length", layers, 1, limits.MAX_WIDTH)
    kv_heads = {flag: {n for n, one in zip(counts, windowed, strict=True) if one == flag} for flag in (False, True)}
    if max(map(len, kv_heads.values())) > 1:
        fields.refuse("attention.head_count_kv", "as many for all layers with a window, and for all without")
    own, others = set(widths[: layers - shared]), set(widths[layers - shared :])
    if max(len(own), len(others)) > 1:
        fields.refuse("feed_forward_length", "as many for all layers with keys of their own, and for all others")
    window_dim = fields.integer("attention.key_length_swa", 2, limits.MAX_HEAD_DIM)
    for name in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if fields.integer(name, 2, limits.MAX_HEAD_DIM, default=window_dim) != window_dim:
            fields.refuse(name, f"the key length {window_dim}")
    full = next((index for index, flag in enumerate(windowed) if not flag), None)
    has_values = full is None or f"blk.{full}.attn_v.weight" in tensors
    joined = None if full is None else tensors.get(f"blk.{full}.attn_qkv.weight")
    if joined is not None:  # of queries and keys alone where values are keys
        queries = fields.integer("attention.head_count", 1, limits.MAX_HEADS)
        columns = fields.integer("attention.key_length", 2, limits.MAX_HEAD_DIM)
        has_values = joined.shape[0] != (queries + min(kv_heads[False])) * columns
    window_kv_heads = kv_heads[True] or kv_heads[False]
    return {
        "kv_heads": min(kv_heads[False] or window_kv_heads),
        "ffn": min(own or others),
        "window_head_dim": window_dim,
        "window_kv_heads": min(window_kv_heads),
        "keys_as_values": not has_values,
        "shared_layers": shared,
        "input_features": fields.integer("embedding_length_per_layer_input", 0, limits.MAX_WIDTH, default=0) or None,
        "shared_ffn": None if own == others or not others else min(others),
    }


def sizes_metadata(config: ModelConfig) -> dict[str, object]:
    """How the layers of Gemma 4 differ."""
    window_dim = config.window_head_dim or config.head_dim
    kv_heads = config.window_kv_heads or config.kv_heads
    shared = config.shared_layers
    return {
        "attention.head_count_kv": [kv_heads if flag else config.kv_heads for flag in config.windowed],
        "attention.key_length_swa": window_dim,
        "attention.value_length_swa": window_dim,
        PATTERN: list(config.windowed),
        "attention.shared_kv_layers": shared,
        "feed_forward_length": [config.ffn] * (config.layers - shared) + [config.shared_ffn or config.ffn] * shared,
        "rope.dimension_count_swa": window_dim,
        "embedding_length_per_layer_input": config.input_features or 0,
    }
