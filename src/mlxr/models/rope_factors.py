"""The tensors of GGUF files that hold a factor for each pair that rotates, as their metadata has no keys for these."""

from __future__ import annotations

import math
from collections.abc import Mapping

from mlxr.core.errors import ModelError
from mlxr.kernels.tensor import TensorSource, read_vector

ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
STANDS_STILL = 1e30  # the factor of a pair that does not turn


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
