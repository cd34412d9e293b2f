"""The rotation tables of a model's layers: as long as the longest context so far, one for layers that turn alike.

GGUF files hold the factors of each pair that rotates as tensors, as their metadata has no keys for these. Rotated
weights in PrismML's files are another matter: `read_rotated_weights` reads which weights they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from mlxr.core.errors import ModelError
from mlxr.kernels.elementwise import MAX_BLOCK
from mlxr.kernels.rope import RopeTable, build_table, gather_table
from mlxr.kernels.tensor import IntArray, TensorSource, read_vector
from mlxr.models.components import Layer
from mlxr.models.components.weights import RotatedWeights
from mlxr.models.fields import Fields, says_nothing

ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
_TABLE = "token_embd.weight"
STANDS_STILL = 1e30  # the factor of a pair that does not turn


def read_rope_factors(tensors: Mapping[str, TensorSource], name: str) -> list[float]:
    """Return the divisors of the rotary frequencies in a tensor; ModelError unless all are finite and positive."""
    tensor = tensors.get(name)
    if tensor is None or len(tensor.shape) != 1:
        found = "missing" if tensor is None else f"of shape {tensor.shape}"
        raise ModelError(f"tensor {name} is {found}, expected a vector of a factor for each pair that rotates")
    factors: list[float] = read_vector(tensor).tolist()
    for index, factor in enumerate(factors):
        if not 0.0 < factor < math.inf:
            raise ModelError(f"tensor {name} holds {factor} at {index}; it must be finite and above 0")
    return factors


PRISM = "prism.hadamard."
_STATED = {"transform": "normalized-sylvester-walsh-hadamard", "axis": "input-last-dimension"}
_SIGNS = ("sign_widths", "sign_values")
_KNOWN = (
    *("version", "block_size", "sign_mode", "weight_names", "inverse_weight_names", "gdn_v_grouped", "tied_output"),
    *(*_STATED, *_SIGNS),
)
_MAX_NAMES, _MAX_WIDTHS = 1 << 16, 64


def read_rotated_weights(values: Mapping[str, object], *, is_tied: bool) -> RotatedWeights | None:
    """Return the weights that are rotated by the keys `prism.hadamard.*`, None without such keys.

    The contract is that of PrismML's llama.cpp (its pull requests 120 and 121): signs for each width, then the
    normalised Walsh-Hadamard transform of blocks, before the product of each named weight; the inverse after a lookup
    in the table of embeddings. From version 2 on a table is also the output. Raises ModelError, naming the key, for
    what is not understood, and for values that contradict each other.
    """
    if not any(name.startswith(PRISM) and not says_nothing(value) for name, value in values.items()):
        return None
    fields = Fields(values, PRISM)
    for name in fields.names():
        if name not in _KNOWN:
            fields.refuse(name, f"none, as mlxr knows rotations by {', '.join(_KNOWN)} alone")
    version, shares = fields.integer("version", 1, 2), fields.flag("tied_output", False)
    for name, known in _STATED.items():
        if fields.text(name) != known:
            fields.refuse(name, known)
    mode = fields.text("sign_mode")
    if mode not in ("identity", "explicit"):
        fields.refuse("sign_mode", "identity or explicit")
    block = fields.integer("block_size", 1, MAX_BLOCK)
    if block & (block - 1):
        fields.refuse("block_size", f"a power of two up to {MAX_BLOCK}")
    names, tables = _list_names(fields, "weight_names"), _list_names(fields, "inverse_weight_names")
    if not names:
        fields.refuse("weight_names", "names of tensors")
    if tables not in ([], [_TABLE]) or _TABLE in names:
        fields.refuse("inverse_weight_names", f"{_TABLE} alone, or nothing")
    if (version == 2) != shares or (shares and not (is_tied and tables)) or (is_tied and tables and not shares):
        fields.refuse("tied_output", "true in version 2, of a rotated table that is the output, too, else false")
    return RotatedWeights(
        block,
        frozenset(names),
        _read_signs(fields, block) if mode == "explicit" else (),
        has_table=bool(tables),
        groups_heads=fields.flag("gdn_v_grouped", False),
    )


def _list_names(fields: Fields, name: str) -> list[str]:
    value = fields.get(name)
    names = [] if value is None else list(value) if isinstance(value, list | tuple) else [None]
    if len(names) > _MAX_NAMES or len(set(names)) < len(names) or not all(isinstance(one, str) for one in names):
        fields.refuse(name, f"up to {_MAX_NAMES} different names of tensors")
    return [str(one) for one in names]


def _read_signs(fields: Fields, block: int) -> tuple[tuple[int, ...], ...]:
    """Return the signs of each width, which the file has one after another."""
    widths, values = (_list_numbers(fields, name) for name in _SIGNS)
    if not 0 < len(widths) <= _MAX_WIDTHS or len(set(widths)) < len(widths):
        fields.refuse("sign_widths", f"up to {_MAX_WIDTHS} different widths")
    if any(width < 1 or width % block for width in widths):
        fields.refuse("sign_widths", f"multiples of the block size {block}")
    if len(values) != sum(widths) or not {1, -1}.issuperset(values):
        fields.refuse("sign_values", f"{sum(widths)} numbers that are 1 or -1, as the widths say")
    ends = [*accumulate(widths)]
    return tuple(tuple(values[end - width : end]) for end, width in zip(ends, widths, strict=True))


def _list_numbers(fields: Fields, name: str) -> list[int]:
    value = fields.get(name)
    items: list[Any] = list(value) if isinstance(value, Iterable) and not isinstance(value, str | bytes) else [None]
    numbers = [int(item) for item in items if hasattr(item, "__index__") and not isinstance(item, bool)]
    if len(numbers) < len(items):
        fields.refuse(name, "whole numbers")
    return numbers


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
        """Return tables with a row for each token, by its places on three axes, `axes` (3, T), which `cover` covers."""
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
