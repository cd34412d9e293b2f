"""Low-rank adapters of a model: which of its weights they update, ready to run, and the rows of a batch that have one.

`make_adapter` finds the weights that an adapter names among those of a model. Knows no files.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mlxr.core.errors import DeviceError
from mlxr.kernels.context import Context
from mlxr.kernels.linear import LinearWeight
from mlxr.kernels.lora import AdapterRows, AdapterWeights, LoraPart, TablePart, list_rows, prepare
from mlxr.kernels.ragged import RaggedBatch
from mlxr.models.model import Model
from mlxr.models.updates import OUTPUT as OUTPUT
from mlxr.models.updates import TABLE, Pair, is_expert, list_updates


@dataclass(frozen=True, slots=True, eq=False)
class AdapterPart:
    """Updates that count `factor` times."""

    updates: AdapterWeights
    factor: float = 1.0


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Adapter:
    """Updates of one model's weights, of which the `parts` are added in their order.

    `digest` (32 bytes) names all that they say. `sources` are the adapters whose matrices a copy or a sum has, which it
    keeps alive.
    """

    name: str
    digest: bytes
    parts: tuple[AdapterPart, ...]
    sources: tuple[Adapter, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices, as they are held."""
        return sum(part.updates.nbytes for part in self.parts)


def add_adapters(shares: Sequence[tuple[Adapter, float]]) -> Adapter | None:
    """Return the sum of adapters of one model in their order, each so many times; None without any."""
    if not shares:
        return None
    if len(shares) == 1 and shares[0][1] == 1.0:
        return shares[0][0]
    digest = hashlib.blake2b(digest_size=32)
    for adapter, factor in shares:
        digest.update(adapter.digest + struct.pack("<d", factor))
    parts = [AdapterPart(part.updates, part.factor * factor) for adapter, factor in shares for part in adapter.parts]
    name = " + ".join(adapter.name for adapter, _ in shares)
    return Adapter(name, digest.digest(), tuple(parts), tuple(adapter for adapter, _ in shares))


def make_adapter(
    name: str,
    pairs: Iterable[Pair],
    ctx: Context,
    weights: Iterable[LinearWeight],
    model: Model,
    *,
    is_gguf: bool,
) -> Adapter:
    """Return an adapter for the `weights` of a model; `is_gguf`: its file orders rows as GGUF files do.

    Raises ModelError for a pair that updates none of the weights, or has other shapes than it, DeviceError for updates
    of experts on a GPU.
    """
    places = _find_places(weights)
    parts: dict[LinearWeight, list[LoraPart]] = {}
    table = None
    found: dict[str, LoraPart | TablePart] = {}
    for update in list_updates(name, pairs, model, is_gguf=is_gguf):
        if update.name == TABLE:
            update.check_shape(model.vocab_size, model.hidden)
            table = found[TABLE] = TablePart(update.b, update.a, update.scale)
            continue
        if update.name not in places:
            raise update.refuse(f"{update.pair} is no weight of this model that adapters can update")
        if ctx.gpu is not None and is_expert(update.name):
            raise DeviceError(
                f"adapter {name}: {update.pair} is a weight of experts, which adapters update on device 'cpu' alone"
            )
        weight, first, count = places[update.name]
        update.check_shape(count, weight.in_features)
        part = found[update.name] = LoraPart(first, update.a, update.b, update.scale)
        parts.setdefault(weight, []).append(part)
    return Adapter(name, _digest(found), (AdapterPart(prepare(ctx, parts, table)),))


def _digest(found: Mapping[str, LoraPart | TablePart]) -> bytes:
    """Return a name of all that is updated, and by what."""
    digest = hashlib.blake2b(digest_size=32)
    for name, update in sorted(found.items(), key=lambda item: item[0]):
        matrices = (update.a, update.b) if isinstance(update, LoraPart) else (update.rows, update.b)
        digest.update(repr((name, update.scale, *(matrix.shape for matrix in matrices))).encode())
        for matrix in matrices:
            digest.update(matrix.tobytes())
    return digest.digest()


def group_batch(batch: RaggedBatch) -> tuple[AdapterRows, ...]:
    """Return the rows of a batch by their adapters, in the order in which these come."""
    return group_rows(batch.adapters, batch.query_starts.tolist()) if batch.adapters else ()


def group_rows(adapters: Sequence[object], starts: Sequence[int]) -> tuple[AdapterRows, ...]:
    """Of rows [starts[i], starts[i + 1]), which have adapter i or None, those of each part.

    All first parts come before all second ones, so that those of a row are in their order.
    """
    rows: dict[tuple[int, AdapterWeights, float], list[tuple[int, int]]] = {}
    for index, adapter in enumerate(adapters):
        if isinstance(adapter, Adapter):
            for place, part in enumerate(adapter.parts):
                key = (place, part.updates, part.factor)
                rows.setdefault(key, []).append((starts[index], starts[index + 1]))
    ordered = sorted(rows.items(), key=lambda item: item[0][0])
    return tuple(AdapterRows(list_rows(own), updates, factor) for (_, updates, factor), own in ordered)


def _find_places(weights: Iterable[LinearWeight]) -> dict[str, tuple[LinearWeight, int, int]]:
    """Return the weight that holds each tensor, the first of its outputs there, and their number."""
    places = {}
    for weight in weights:
        first = 0
        for name, count in zip(weight.names, weight.splits, strict=False):
            places[name] = weight, first, count
            first += count
    return places
