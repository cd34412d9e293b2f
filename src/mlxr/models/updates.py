"""The updates of an adapter by the weights of a model: what the model keeps apart is cut, and rows are ordered as its
files order them.

An adapter names weights as its file does. Knows no files, and not where the weights are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from mlxr.core.errors import ModelError
from mlxr.kernels.sources import Decoded
from mlxr.kernels.tensor import FloatArray
from mlxr.models.architectures import by_name
from mlxr.models.config import ModelConfig
from mlxr.models.expert_updates import ExpertPair, Parts, part_experts
from mlxr.models.names import canonical_name, from_gguf_name, gguf_column_order, gguf_row_order
from mlxr.models.weights import split_rows

TABLE, OUTPUT = "token_embd.weight", "output.weight"


class Pair(ExpertPair, Protocol):
    """An update of one weight, or of one matrix of a stack, as its file has it, in GGUF with .weight in its name."""

    @property
    def scale(self) -> float:
        """The factor on b a."""
        ...


@dataclass(frozen=True, slots=True)
class Layouts:
    """Whether the adapter's file is GGUF, and whether rows and columns of the weights are as GGUF files have them."""

    is_gguf: bool
    rows_are_gguf: bool
    columns_are_gguf: bool


@dataclass(frozen=True, slots=True, eq=False)
class WeightUpdate:
    """scale * b a of the weight `name`, as the model calls it; `adapter` and `pair` are what errors name."""

    adapter: str
    pair: str
    name: str
    a: FloatArray
    b: FloatArray
    scale: float

    def refuse(self, why: str) -> ModelError:
        """The error that says so."""
        return ModelError(f"adapter {self.adapter}: {why}")

    def check_shape(self, rows: int, columns: int) -> None:
        """Raise ModelError unless it is of a weight (rows, columns)."""
        has = self.b.shape[0], self.a.shape[1]
        if has != (rows, columns):
            raise self.refuse(
                f"{self.pair} is for a weight of shape {has}, and {self.name} has {(rows, columns)}; is it made for "
                "another model?"
            )


def list_updates(adapter: str, pairs: Iterable[Pair], config: ModelConfig, layouts: Layouts) -> Iterator[WeightUpdate]:
    """The updates of all pairs, each of one weight. Raises ModelError for what is no weight or not supported."""
    order, found = _Order(config, layouts), set()
    for pair in pairs:
        own = from_gguf_name(pair.name, config) if layouts.is_gguf else _name_peft(adapter, pair.name, config)
        try:
            parts = _part(own, pair, order)
        except ModelError as error:
            raise ModelError(f"adapter {adapter}: {error}") from error
        for name, a, b in parts:
            if name in found:
                raise ModelError(f"adapter {adapter}: {name} is updated twice")
            found.add(name)
            yield WeightUpdate(adapter, pair.name, name, a, b, pair.scale)


def _part(name: str, pair: Pair, order: _Order) -> Parts:
    """The updates of the weights that layers multiply by, of which the file's weight `name` is one or several."""
    config, layouts = order.config, order.layouts
    if name == TABLE:
        return [(name, pair.a, pair.b)]
    if config.multipliers is not None and not layouts.rows_are_gguf:
        raise ModelError(f"folders of {config.architecture} multiply what adapters add")
    experts = part_experts(name, pair, config, layouts.is_gguf)
    if experts is not None:
        return experts
    return [
        (part, order.order_columns(pair.a, part), order.order_rows(rows.to_float32(), part))
        for part, rows in split_rows(config, name, Decoded(name, pair.b)).items()
    ]


def _name_peft(adapter: str, module: str, config: ModelConfig) -> str:
    name = canonical_name(f"{module}.weight", by_name(config.architecture))
    if name is None:
        raise ModelError(f"adapter {adapter}: module {module[:120]} is not of a text model")
    return from_gguf_name(name, config)


@dataclass(frozen=True, slots=True)
class _Order:
    """Rows and columns of an update as the model has them, where GGUF files have them in another order than folders."""

    config: ModelConfig
    layouts: Layouts

    def order_rows(self, b: FloatArray, name: str) -> FloatArray:
        """The rows of b: files of architecture llama keep those of q and k in another order."""
        row = by_name(self.config.architecture)
        config = replace(self.config, rope_interleaved=False) if row.rope.gguf_interleaved else self.config
        order = None if row.rope.hf_interleaved else gguf_row_order(name, config)
        if order is None or len(order) != len(b):
            return b
        ordered: FloatArray = b[_turn(order, self.layouts.is_gguf, self.layouts.rows_are_gguf)]
        return ordered

    def order_columns(self, a: FloatArray, name: str) -> FloatArray:
        """The columns of a: gated delta nets keep their value heads in another order."""
        order = gguf_column_order(name, self.config)
        if order is None or len(order) != a.shape[1]:
            return a
        ordered: FloatArray = a[:, _turn(order, self.layouts.is_gguf, self.layouts.columns_are_gguf)].copy()
        return ordered


def _turn(order: list[int], is_gguf: bool, wanted_gguf: bool) -> list[int]:
    """The order from one layout to the other, where `order` leads to GGUF's."""
    if is_gguf == wanted_gguf:
        return [*range(len(order))]
    return order if wanted_gguf else sorted(range(len(order)), key=order.__getitem__)
