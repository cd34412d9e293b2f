"""What files say of biases: out of `config.json`, and out of the names of a GGUF file's tensors."""

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


def read_hf_biases(fields: Fields, row: BiasRow) -> dict[str, Any]:
    """Which products of a `ModelConfig` have biases by its `config.json`."""
    if row.by_use:
        attention = feed_forward = fields.flag("use_bias", True)
    else:
        attention = row.by_block and fields.flag("attention_bias", False)
        feed_forward = row.by_block and fields.flag("mlp_bias", False)
    qkv = row.qkv or attention or fields.flag(row.qkv_key, False)
    logits = fields.flag("lm_head_bias", False)
    return {"qkv_bias": qkv, "output_bias": attention, "ffn_bias": feed_forward, "logit_bias": logits}


def find_gguf_biases(tensors: Container[str], row: BiasRow, layers: int) -> dict[str, Any]:
    """Which products of a `ModelConfig` have biases by the tensors of a GGUF file."""

    def has_any(part: str) -> bool:  # not all layers attend
        return any(f"blk.{index}.{part}.bias" in tensors for index in range(layers))

    return {
        "qkv_bias": row.qkv or has_any("attn_q"),
        "output_bias": has_any("attn_output"),
        "ffn_bias": has_any("ffn_down"),
        "logit_bias": "output.bias" in tensors,
    }
