"""Low-rank adapters of a model: which of its weights they update, in the order of rows that the model has.

An adapter names weights as its file does. `make_adapter` finds them among those of a model, cuts what the model keeps
apart, and orders rows as the model's file has them. Knows no files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from mlxr.core.errors import ModelError
from mlxr.kernels.linear import LinearWeight
from mlxr.kernels.lora import AdapterRows, LoraPart, list_rows, make_part
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.tensor import FloatArray
from mlxr.models.architectures import by_name
from mlxr.models.config import ModelConfig
from mlxr.models.names import canonical_name, from_gguf_name, gguf_row_order
from mlxr.models.specs import GatedDelta
from mlxr.models.weights import list_joined_rows


class Pair(Protocol):
    """An update of one weight as its file has it: scale * b a, with `a` (rank, in) and `b` (out, rank)."""

    @property
    def name(self) -> str:
        """What the file calls the weight, of GGUF with .weight."""
        ...

    @property
    def a(self) -> FloatArray:
        """The matrix that inputs go through first."""
        ...

    @property
    def b(self) -> FloatArray:
        """The matrix that makes outputs."""
        ...

    @property
    def scale(self) -> float:
        """What the product is multiplied by."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """Updates of one model's weights. `digest` (32 bytes) names all that they say."""

    name: str
    digest: bytes
    parts: Mapping[LinearWeight, Sequence[LoraPart]]

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices."""
        return sum(part.nbytes for parts in self.parts.values() for part in parts)


def make_adapter(
    name: str,
    pairs: Iterable[Pair],
    weights: Iterable[LinearWeight],
    config: ModelConfig,
    *,
    is_gguf: bool,
    base_is_gguf: bool,
) -> Adapter:
    """An adapter for the `weights` of a model; `is_gguf` and `base_is_gguf` say who ordered the rows of either.

    Raises ModelError for a pair that updates none of the weights, or has other shapes than it.
    """
    places = _find_places(weights)
    parts: dict[LinearWeight, list[LoraPart]] = {}
    found: dict[str, LoraPart] = {}
    for pair in pairs:
        own = from_gguf_name(pair.name, config) if is_gguf else _name_peft(pair.name, config)
        if (config.multipliers is not None and not base_is_gguf) or (
            isinstance(config.recurrence, GatedDelta) and is_gguf != base_is_gguf
        ):
            raise ModelError(f"adapter {name}: its files and those of a {config.architecture} model are laid out apart")
        b = _order_rows(pair.b, own, config, is_gguf=is_gguf, base_is_gguf=base_is_gguf)
        for part, rows in _cut(name, own, b, config):
            if part not in places:
                raise ModelError(f"adapter {name}: {pair.name} is no weight of this model that adapters can update")
            weight, first, count = places[part]
            if rows.shape[0] != count or pair.a.shape[1] != weight.in_features:
                raise ModelError(
                    f"adapter {name}: {pair.name} is for a weight of shape {(rows.shape[0], pair.a.shape[1])}, and "
                    f"{part} has {(count, weight.in_features)}; is it made for another model?"
                )
            if part in found:
                raise ModelError(f"adapter {name}: {part} is updated twice")
            found[part] = make_part(first, pair.a, rows, pair.scale)
            parts.setdefault(weight, []).append(found[part])
    digest = hashlib.blake2b(digest_size=32)
    for part, update in sorted(found.items(), key=lambda item: item[0]):
        digest.update(repr((part, update.scale, update.a.shape, update.b.shape)).encode())
        digest.update(update.a.tobytes() + update.b.tobytes())
    return Adapter(name, digest.digest(), parts)


def group_rows(batch: RaggedBatch) -> tuple[AdapterRows, ...]:
    """The rows of a batch by their adapters, in the order in which these come."""
    rows: dict[Adapter, list[tuple[int, int]]] = {}
    starts = batch.query_starts.tolist()
    for index, adapter in enumerate(batch.adapters):
        if isinstance(adapter, Adapter):
            rows.setdefault(adapter, []).append((starts[index], starts[index + 1]))
    return tuple(AdapterRows(list_rows(own), adapter.parts) for adapter, own in rows.items())


def _find_places(weights: Iterable[LinearWeight]) -> dict[str, tuple[LinearWeight, int, int]]:
    """The weight that holds each tensor, the first of its outputs there, and their number."""
    places = {}
    for weight in weights:
        first = 0
        for name, count in zip(weight.names, weight.splits, strict=False):
            places[name] = weight, first, count
            first += count
    return places


def _name_peft(module: str, config: ModelConfig) -> str:
    name = canonical_name(f"{module}.weight", by_name(config.architecture))
    if name is None:
        raise ModelError(f"module {module[:120]} is not of a text model")
    return from_gguf_name(name, config)


def _order_rows(b: FloatArray, name: str, config: ModelConfig, *, is_gguf: bool, base_is_gguf: bool) -> FloatArray:
    """The rows of b as the model has them: files of architecture llama keep those of q and k in another order."""
    row = by_name(config.architecture)
    if is_gguf == base_is_gguf or not row.gguf_interleaved or row.hf_interleaved:
        return b
    order = gguf_row_order(name, replace(config, rope_interleaved=False))
    if order is None or len(order) != len(b):
        return b
    if not base_is_gguf:
        order = sorted(range(len(order)), key=order.__getitem__)
    ordered: FloatArray = b[order]
    return ordered


def _cut(adapter: str, name: str, b: FloatArray, config: ModelConfig) -> Iterator[tuple[str, FloatArray]]:
    """The rows of b by the weights that the model keeps apart, where a file joins these."""
    joined = list_joined_rows(config, name)
    if not joined:
        yield name, b
        return
    if sum(rows for _, rows in joined) != len(b):
        raise ModelError(f"adapter {adapter}: {name} has {len(b)} rows, expected {sum(rows for _, rows in joined)}")
    start = 0
    for part, rows in joined:
        yield part, b[start : start + rows]
        start += rows
