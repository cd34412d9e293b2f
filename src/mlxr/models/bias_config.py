"""Which products have biases, by the names of a GGUF file's tensors unless its metadata say so."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

from mlxr.models.fields import Fields


@dataclass(frozen=True, slots=True)
class BiasRow:
    """Which products of a family have biases, and how its `config.json` says so.

    `qkv`: always q, k and v; `qkv_key` there says whether they do. With `by_block`, `attention_bias` gives them to q,
    k, v and o, and `mlp_bias` to gate, up and down; with `by_use`, `use_bias` to all, true if it is not stated.
    """

    qkv: bool = False
    qkv_key: str = "use_qkv_bias"
    by_block: bool = False
    by_use: bool = False


def find_gguf_biases(own: Fields, tensors: Container[str], row: BiasRow, layers: int) -> dict[str, Any]:
    """Return which products of a `ModelConfig` have biases."""

    def has_any(part: str) -> bool:  # not all layers attend
        return any(f"blk.{index}.{part}.bias" in tensors for index in range(layers))

    return {
        "qkv_bias": own.flag("attention.qkv_bias", row.qkv or has_any("attn_q")),
        "output_bias": own.flag("attention.output_bias", has_any("attn_output")),
        "ffn_bias": own.flag("feed_forward_bias", has_any("ffn_down")),
        "logit_bias": own.flag("output_bias", "output.bias" in tensors),
    }
