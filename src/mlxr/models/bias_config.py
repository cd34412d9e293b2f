"""Which products have biases, by the names of a GGUF file's tensors unless its metadata say so."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

from mlxr.models.fields import Fields


@dataclass(frozen=True, slots=True)
class BiasRow:
    """Which products of a family have biases, whatever the file."""

    qkv: bool = False  # those of q, k and v


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
