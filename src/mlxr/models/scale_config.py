"""What GGUF's metadata say that numbers are multiplied by and capped at, besides weights.

How a family spells it and what it leaves unsaid is its `ScaleRow`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from mlxr.models import limits
from mlxr.models.fields import Fields

SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")  # in folders, too
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


def _read_softcaps(fields: Fields, row: ScaleRow) -> dict[str, Any]:
    """The caps, None without one; 0 and absent say: none."""

    def softcap(name: str) -> float | None:
        return (fields.number(name, 0.0, limits.MAX_SCALE, default=0.0) or None) if row.softcaps else None

    return {"attention_softcap": softcap(SOFTCAPS[0]), "final_softcap": softcap(SOFTCAPS[1])}


def read_gguf_scales(
    fields: Fields, own: Fields, row: ScaleRow, layers: int, hidden: int, heads: int
) -> dict[str, Any]:
    """The scales and caps of a `ModelConfig` that GGUF's metadata state; 0 and absent say: none."""

    def stated(name: str, reads: bool = row.multipliers) -> float | None:
        return (fields.number(name, 0.0, limits.MAX_SCALE, default=0.0) or None) if reads else None

    own_scale = own.number("attention.scale", 0.0, limits.MAX_SCALE, default=0.0)
    logit_scale = stated(LOGIT_SCALE[0], row.multipliers or row.logits) or 1.0
    return _read_softcaps(fields, row) | {
        "attention_scale": stated("attention.scale") or own_scale or default_scale(row, layers, hidden, heads),
        "residual_scale": stated("residual_scale") or 1.0,
        # Granite states what logits are divided by
        "logit_scale": 1.0 / logit_scale if row.multipliers else logit_scale,
        "embedding_scale": stated("embedding_scale") or (math.sqrt(hidden) if row.embeddings else 1.0),
    }
