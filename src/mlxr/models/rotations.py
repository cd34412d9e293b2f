"""The rotation tables of a model's layers: as long as the longest context so far, one for layers that turn alike.

GGUF files hold the factors of each pair that rotates as tensors, as their metadata has no keys for these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from mlxr.core.errors import ModelError
from mlxr.kernels.rope import RopeTable, build_table, gather_table
from mlxr.kernels.tensor import IntArray, TensorSource, read_vector
from mlxr.models.components import Layer

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


FIRST_POSITIONS = 2048  # a table starts this long and doubles


class Rotations:
    """Tables for the layers of `specs` in contexts of up to `context_length` tokens.

    `factors` are the divisors of the frequencies that a model has as a tensor, if it has one.
    """

    def __init__(self, specs: Sequence[Layer], context_length: int, factors: Sequence[float] | None = None) -> None:
        self._ropes = tuple(dict.fromkeys(spec.rope for spec in specs))
        self._context_length, self._factors = context_length, factors
        self._tables = self._build(min(FIRST_POSITIONS, context_length))

    def find(self, spec: Layer) -> int:
        """Return the number of a layer's table."""
        return self._ropes.index(spec.rope)

    def cover(self, longest_context: int) -> tuple[RopeTable, ...]:
        """Return the tables, grown when a context has outgrown them; rows that were there keep their values.

        Raises ModelError for a context that is longer than the model's.
        """
        positions = self._tables[0].positions
        if longest_context > positions:
            if longest_context > self._context_length:
                raise ModelError(f"a context of {longest_context} tokens is beyond the model's {self._context_length}")
            while positions < longest_context:
                positions *= 2
            self._tables = self._build(min(positions, self._context_length))
        return self._tables

    def gather(self, axes: IntArray) -> tuple[RopeTable, ...]:
        """Return tables of a row for each token that stands on three axes at `axes` (3, T), which `cover` covers."""
        pairs = zip(self._tables, self._ropes, strict=True)
        return tuple(gather_table(table, axes, rope.pair_axes) for table, rope in pairs)

    def _build(self, positions: int) -> tuple[RopeTable, ...]:
        return tuple(
            build_table(
                positions,
                rope.dim,
                rope.theta,
                interleaved=rope.interleaved,
                scaling=rope.scaling,
                frequency_factors=self._factors if rope.has_factors and rope.dim else None,
                context=self._context_length,
                temperature=rope.temperature,
            )
            for rope in self._ropes
        )
