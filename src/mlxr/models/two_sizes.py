"""What GGUF's metadata say of layers of two sizes (Gemma 4).

Layers with and without windows have heads of their own sizes, later layers may read the keys and values of earlier
ones, and all may have embeddings of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxr.core.errors import ModelError
from mlxr.kernels.tensor import TensorSource
from mlxr.models import limits
from mlxr.models.fields import Fields
from mlxr.models.rope_factors import ROPE_FACTORS


def read_gguf_sizes(
    fields: Fields, own_keys: Fields, windowed: tuple[bool, ...], tensors: Mapping[str, TensorSource]
) -> dict[str, Any]:
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
        "keys_as_values": own_keys.flag("attention.keys_as_values", not has_values),
        "shared_layers": shared,
        "input_features": fields.integer("embedding_length_per_layer_input", 0, limits.MAX_WIDTH, default=0) or None,
        "shared_ffn": None if own == others or not others else min(others),
    }
