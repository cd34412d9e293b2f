"""The updates of an adapter by the weights of a model: what the model keeps apart is cut, and rows are ordered as its
files order them.

An adapter names weights as its file does. Knows no files, and not where the weights are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from mlxr.core.errors import ModelError
from mlxr.kernels.sources import Decoded
from mlxr.kernels.tensor import FloatArray
from mlxr.models.expert_updates import ExpertPair, Parts, part_experts
from mlxr.models.families import find_layout
from mlxr.models.folders.names import canonical_name
from mlxr.models.folders.tensors import order_columns, order_rows
from mlxr.models.model import Model
from mlxr.models.names import from_gguf_name
from mlxr.models.weights import split_rows

TABLE, OUTPUT = "token_embd.weight", "output.weight"


class Pair(ExpertPair, Protocol):
    """An update of one weight, or of one matrix of a stack, as its file has it, in GGUF with .weight in its name."""

    @property
    def scale(self) -> float:
        """The factor on b a."""
        ...


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
        """Return the error that says so."""
        return ModelError(f"adapter {self.adapter}: {why}")

    def check_shape(self, rows: int, columns: int) -> None:
        """Raise ModelError unless it is of a weight (rows, columns)."""
        has = self.b.shape[0], self.a.shape[1]
        if has != (rows, columns):
            raise self.refuse(
                f"{self.pair} is for a weight of shape {has}, and {self.name} has {(rows, columns)}; is it made for "
                "another model?"
            )


def list_updates(adapter: str, pairs: Iterable[Pair], model: Model, *, is_gguf: bool) -> Iterator[WeightUpdate]:
    """The updates of all pairs, each of one weight; `is_gguf`: the adapter's file names and orders as GGUF files do.

    Raises ModelError for what is no weight or not supported.
    """
    found = set()
    for pair in pairs:
        own = from_gguf_name(pair.name, model) if is_gguf else _name_peft(adapter, pair.name, model)
        try:
            parts = _part(own, pair, model, is_gguf)
        except ModelError as error:
            raise ModelError(f"adapter {adapter}: {error}") from error
        for name, a, b in parts:
            if name in found:
                raise ModelError(f"adapter {adapter}: {name} is updated twice")
            found.add(name)
            yield WeightUpdate(adapter, pair.name, name, a, b, pair.scale)


def _part(name: str, pair: Pair, model: Model, is_gguf: bool) -> Parts:
    """The updates of the weights that layers multiply by, of which the file's weight `name` is one or several."""
    if name == TABLE:
        return [(name, pair.a, pair.b)]
    if not is_gguf and any(layer.attention and layer.recurrence for layer in model.layers):
        raise ModelError(f"folders of {model.architecture} multiply what adapters add")
    experts = part_experts(name, pair, model, is_gguf)
    if experts is not None:
        return experts
    parts = [(part, pair.a, rows.to_float32()) for part, rows in split_rows(model, name, Decoded(name, pair.b)).items()]
    return parts if is_gguf else [(part, *_order(part, a, b, model)) for part, a, b in parts]


def _name_peft(adapter: str, module: str, model: Model) -> str:
    name = canonical_name(f"{module}.weight", find_layout(model).names)
    if name is None:
        raise ModelError(f"adapter {adapter}: module {module[:120]} is not of a text model")
    return from_gguf_name(name, model)


def _order(name: str, a: FloatArray, b: FloatArray, model: Model) -> tuple[FloatArray, FloatArray]:
    """The columns and rows of an update in the order that GGUF files have them in, where folders have another one."""
    rows, columns = order_rows(name, model), order_columns(name, model)
    if rows is not None and len(rows) == len(b):
        b = b[rows]
    if columns is not None and len(columns) == a.shape[1]:
        a = a[:, columns].copy()
    return a, b
