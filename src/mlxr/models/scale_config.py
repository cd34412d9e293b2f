"""What files say that numbers are multiplied by and capped at, besides weights: out of `config.json` and out of GGUF's
metadata, and back into the latter.

How a family spells it and what it leaves unsaid is its `ScaleRow`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlxr.core.errors import ModelError
from mlxr.models import limits
from mlxr.models.fields import Fields

if TYPE_CHECKING:
    from mlxr.models.config import ModelConfig

SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")  # in both kinds of files
HF_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
GGUF_MULTIPLIERS = ("embedding_scale", "residual_scale", "attention.scale")
LOGIT_SCALE = ("logit_scale",)


@dataclass(frozen=True, slots=True)
class ScaleRow:
    """What a family multiplies and caps.

    `embeddings`: by the root of the hidden size. `softcaps`: files state caps of scores and logits. `multipliers`:
    files state Granite's four; `logits`: Cohere's for logits. `attention` is what scores are multiplied by in all
    files; a model of `by_width_layers` layers scales them by hidden / heads instead of the head size.
    """

    embeddings: bool = False
    softcaps: bool = False
    multipliers: bool = False
    logits: bool = False
    attention: float | None = None
    by_width_layers: int | None = None


def default_scale(row: ScaleRow, layers: int, hidden: int, heads: int) -> float | None:
    """What scores are multiplied by where a file does not say so; None for 1 / sqrt(head_dim).

    GGUF has no key for it; llama.cpp knows the large Gemmas by their number of layers.
    """
    return float((hidden / heads) ** -0.5) if layers == row.by_width_layers else row.attention


def read_hf_scales(fields: Fields, row: ScaleRow, hidden: int, head_dim: int) -> dict[str, Any]:
    """The scales and caps of a `ModelConfig` that a `config.json` states."""

    def multiplier(name: str) -> float:
        return fields.number(name, 1e-9, limits.MAX_SCALE, default=1.0) if row.multipliers else 1.0

    if row.logits:
        logit_scale = fields.number(LOGIT_SCALE[0], 1e-9, limits.MAX_SCALE, default=0.0625)
    else:
        logit_scale = 1.0 / multiplier("logits_scaling")
    return _read_softcaps(fields, row) | {
        "attention_scale": multiplier("attention_multiplier")
        if row.multipliers
        else _read_hf_attention(fields, row, head_dim),
        "residual_scale": multiplier("residual_multiplier"),
        "logit_scale": logit_scale,
        "embedding_scale": math.sqrt(hidden) if row.embeddings else multiplier("embedding_multiplier"),
    }


def _read_hf_attention(fields: Fields, row: ScaleRow, head_dim: int) -> float | None:
    """What scores are multiplied by, where the family states by which head size."""
    if row.attention is not None or not row.embeddings:
        return row.attention
    size = fields.number("query_pre_attn_scalar", 1e-6, limits.MAX_SCALE, default=float(head_dim))
    return None if size == head_dim else size**-0.5


def _read_softcaps(fields: Fields, row: ScaleRow) -> dict[str, Any]:
    """The caps, None without one; 0 and absent say: none."""

    def softcap(name: str) -> float | None:
        return (fields.number(name, 0.0, limits.MAX_SCALE, default=0.0) or None) if row.softcaps else None

    return {"attention_softcap": softcap(SOFTCAPS[0]), "final_softcap": softcap(SOFTCAPS[1])}


def read_gguf_scales(fields: Fields, row: ScaleRow, layers: int, hidden: int, heads: int) -> dict[str, Any]:
    """The scales and caps of a `ModelConfig` that GGUF's metadata state; 0 and absent say: none."""

    def stated(name: str, reads: bool = row.multipliers) -> float | None:
        return (fields.number(name, 0.0, limits.MAX_SCALE, default=0.0) or None) if reads else None

    logit_scale = stated(LOGIT_SCALE[0], row.multipliers or row.logits) or 1.0
    return _read_softcaps(fields, row) | {
        "attention_scale": stated("attention.scale") or default_scale(row, layers, hidden, heads),
        "residual_scale": stated("residual_scale") or 1.0,
        # Granite states what logits are divided by
        "logit_scale": 1.0 / logit_scale if row.multipliers else logit_scale,
        "embedding_scale": stated("embedding_scale") or (math.sqrt(hidden) if row.embeddings else 1.0),
    }


def scale_metadata(config: ModelConfig, row: ScaleRow) -> dict[str, object]:
    """The keys of GGUF that state the scales and caps; ModelError where they cannot."""
    stated: dict[str, object] = {}
    if row.multipliers:
        stated = {
            "embedding_scale": config.embedding_scale,
            "residual_scale": config.residual_scale,
            "attention.scale": config.attention_scale,
            LOGIT_SCALE[0]: 1.0 / config.logit_scale,
        }
    elif config.attention_scale != default_scale(row, config.layers, config.hidden, config.heads):
        raise ModelError(
            f"the scale of attention {config.attention_scale} cannot be stated in a GGUF file of {config.architecture}"
        )
    if row.logits:
        stated[LOGIT_SCALE[0]] = config.logit_scale
    caps = config.attention_softcap, config.final_softcap
    return stated | {name: cap for name, cap in zip(SOFTCAPS, caps, strict=True) if cap is not None}
