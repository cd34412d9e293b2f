"""What rows of families of several kinds have in common."""

from __future__ import annotations

from typing import Any

from mlxr.models.mixture import MixtureRow
from mlxr.models.rope_config import RopeRow
from mlxr.models.scale_config import ScaleRow

LLAMA_ROPE = RopeRow(gguf_interleaved=True)
GRANITE_MIXTURE = MixtureRow(renormalises=True, shared="features")
GRANITE: dict[str, Any] = {
    "rope": RopeRow(gguf_interleaved=True, gguf_switch=True),
    "scales": ScaleRow(multipliers=True),
}
# Of DeepSeek's kind: sigmoids, shares that are divided by their sum, a bias for the choice alone.
SIGMOID: dict[str, Any] = {"scoring": "sigmoid", "renormalises": True, "choice_bias": True}
