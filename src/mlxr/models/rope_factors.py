"""The tensors of GGUF files that hold a factor for each pair that rotates, as their metadata has no keys for these."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mlxr.core.errors import ModelError
from mlxr.kernels.rope import inverse_frequencies, llama3_factors
from mlxr.kernels.tensor import TensorSource, read_vector

if TYPE_CHECKING:
    from mlxr.models.config import ModelConfig

ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
_STANDS_STILL = 1e30  # the factor of a pair that does not turn


def read_rope_factors(tensors: Mapping[str, TensorSource], name: str) -> list[float]:
    """The divisors of the rotary frequencies that a tensor holds; ModelError unless all are finite and positive."""
    tensor = tensors.get(name)
    if tensor is None or len(tensor.shape) != 1:
        found = "missing" if tensor is None else f"of shape {tensor.shape}"
        raise ModelError(f"tensor {name} is {found}, expected a vector of a factor for each pair that rotates")
    factors: list[float] = read_vector(tensor).tolist()
    for index, factor in enumerate(factors):
        if not 0.0 < factor < math.inf:
            raise ModelError(f"tensor {name} holds {factor} at {index}; it must be finite and above 0")
    return factors


def list_rope_factors(config: ModelConfig, always: bool) -> dict[str, Sequence[float]]:
    """The f32 tensors (rope_dim / 2), by name, that state llama3 and proportional scaling and longrope.

    With `always` files of the family state a factor for each pair even where nothing is scaled.
    """
    scaling = config.rope_scaling
    if always:
        return {ROPE_FACTORS: _list_proportional(config)}
    if scaling is None or scaling.kind not in ("llama3", "longrope"):
        return {}
    if scaling.kind == "longrope":
        return {LONG_FACTORS: scaling.long_factors, SHORT_FACTORS: scaling.short_factors}
    return {ROPE_FACTORS: llama3_factors(inverse_frequencies(config.rope_dim, config.rope_theta), scaling).tolist()}


def _list_proportional(config: ModelConfig) -> list[float]:
    scaling, pairs = config.rope_scaling, config.rope_dim // 2
    if scaling is None:
        return [1.0] * pairs
    if scaling.kind != "proportional":
        raise ModelError(f"rope scaling {scaling.kind} cannot be stated in a GGUF file of {config.architecture}")
    turning = int(scaling.rotated * pairs)
    return [scaling.factor] * turning + [_STANDS_STILL] * (pairs - turning)
