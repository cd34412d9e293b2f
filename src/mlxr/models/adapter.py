"""Low-rank adapters of a model: which of its weights they update, in the order of rows that the model has.

An adapter names weights as its file does. `make_adapter` finds them among those of a model, cuts what the model keeps
apart, and orders rows as the model's file has them. Knows no files.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from mlxr.core.errors import ModelError
from mlxr.kernels.context import Context
from mlxr.kernels.linear import LinearWeight
from mlxr.kernels.lora import AdapterRows, AdapterWeights, LoraPart, TablePart, list_rows, prepare
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.sources import Decoded
from mlxr.kernels.tensor import FloatArray
from mlxr.models.architectures import by_name
from mlxr.models.config import ModelConfig
from mlxr.models.names import canonical_name, from_gguf_name, gguf_column_order, gguf_row_order
from mlxr.models.weights import split_rows

TABLE, OUTPUT = "token_embd.weight", "output.weight"
_EXPERT = re.compile(r"blk\.\d+\.ffn_\w+(_exps|\.\d+)\.weight")


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
    updates: AdapterWeights

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices, as they are held."""
        return self.updates.nbytes


def make_adapter(
    name: str,
    pairs: Iterable[Pair],
    ctx: Context,
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
    table = None
    found: dict[str, LoraPart | TablePart] = {}
    for pair in pairs:
        own = from_gguf_name(pair.name, config) if is_gguf else _name_peft(pair.name, config)
        if own == TABLE:
            _check_shape(name, pair, TABLE, (config.vocab_size, config.hidden), pair.b)
            table = found[TABLE] = TablePart(pair.b, pair.a, pair.scale)
            continue
        if config.multipliers is not None and not base_is_gguf:
            raise ModelError(f"adapter {name}: folders of {config.architecture} models multiply what adapters add")
        if _EXPERT.fullmatch(own):
            raise ModelError(f"adapter {name}: {pair.name} is a weight of experts, which adapters cannot update yet")
        order = _Order(config, is_gguf=is_gguf, base_is_gguf=base_is_gguf)
        for part, b in split_rows(config, own, Decoded(own, pair.b)).items():
            if part not in places:
                raise ModelError(f"adapter {name}: {pair.name} is no weight of this model that adapters can update")
            weight, first, count = places[part]
            rows = order.order_rows(b.to_float32(), part)
            _check_shape(name, pair, part, (count, weight.in_features), rows)
            if part in found:
                raise ModelError(f"adapter {name}: {part} is updated twice")
            update = found[part] = LoraPart(first, order.order_columns(pair.a, part), rows, pair.scale)
            parts.setdefault(weight, []).append(update)
    return Adapter(name, _digest(found), prepare(ctx, parts, table))


def _check_shape(adapter: str, pair: Pair, name: str, wanted: tuple[int, int], b: FloatArray) -> None:
    has = b.shape[0], pair.a.shape[1]
    if has != wanted:
        raise ModelError(
            f"adapter {adapter}: {pair.name} is for a weight of shape {has}, and {name} has {wanted}; is it made for "
            "another model?"
        )


def _digest(found: Mapping[str, LoraPart | TablePart]) -> bytes:
    """A name of all that is updated, and by what."""
    digest = hashlib.blake2b(digest_size=32)
    for name, update in sorted(found.items(), key=lambda item: item[0]):
        matrices = (update.a, update.b) if isinstance(update, LoraPart) else (update.rows, update.b)
        digest.update(repr((name, update.scale, *(matrix.shape for matrix in matrices))).encode())
        for matrix in matrices:
            digest.update(matrix.tobytes())
    return digest.digest()


def group_batch(batch: RaggedBatch) -> tuple[AdapterRows, ...]:
    """The rows of a batch by their adapters, in the order in which these come."""
    return group_rows(batch.adapters, batch.query_starts.tolist()) if batch.adapters else ()


def group_rows(adapters: Sequence[object], starts: Sequence[int]) -> tuple[AdapterRows, ...]:
    """Of rows [starts[i], starts[i + 1]), which have adapter i or None, those of each adapter."""
    rows: dict[Adapter, list[tuple[int, int]]] = {}
    for index, adapter in enumerate(adapters):
        if isinstance(adapter, Adapter):
            rows.setdefault(adapter, []).append((starts[index], starts[index + 1]))
    return tuple(AdapterRows(list_rows(own), adapter.updates) for adapter, own in rows.items())


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


@dataclass(frozen=True, slots=True)
class _Order:
    """Rows and columns of an update as the model has them, where GGUF files have them in another order than folders."""

    config: ModelConfig
    is_gguf: bool
    base_is_gguf: bool

    def order_rows(self, b: FloatArray, name: str) -> FloatArray:
        """The rows of b: files of architecture llama keep those of q and k in another order."""
        row = by_name(self.config.architecture)
        config = replace(self.config, rope_interleaved=False) if row.gguf_interleaved else self.config
        order = None if row.hf_interleaved else gguf_row_order(name, config)
        ordered: FloatArray = b if order is None or len(order) != len(b) else b[self._turn(order)]
        return ordered

    def order_columns(self, a: FloatArray, name: str) -> FloatArray:
        """The columns of a: gated delta nets keep their value heads in another order."""
        order = gguf_column_order(name, self.config)
        if order is None or len(order) != a.shape[1]:
            return a
        ordered: FloatArray = a[:, self._turn(order)].copy()
        return ordered

    def _turn(self, order: list[int]) -> list[int]:
        """The order from that of the adapter's file to that of the model's."""
        if self.is_gguf == self.base_is_gguf:
            return [*range(len(order))]
        return order if self.base_is_gguf else sorted(range(len(order)), key=order.__getitem__)
