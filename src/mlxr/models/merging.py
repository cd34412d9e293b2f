"""A model's tensors with an adapter's updates added, as its file would keep them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mlxr.kernels.tensor import IntArray, TensorSource
from mlxr.kernels.updated import Update, Updated, number_rows, read_numbers
from mlxr.models.config import ModelConfig
from mlxr.models.updates import OUTPUT, TABLE, Layouts, Pair, list_updates
from mlxr.models.weights import split_rows


def merge_pairs(
    adapter: str, pairs: Iterable[Pair], tensors: Mapping[str, TensorSource], config: ModelConfig, layouts: Layouts
) -> dict[str, TensorSource]:
    """The `tensors`, by canonical name, with updates of an adapter added to those that it has some for.

    A model whose output is its table of embeddings gets an output of its own when either is updated. Raises ModelError
    for an update that is of none of the tensors, or of another shape.
    """
    merged = dict(tensors)
    updates = list(list_updates(adapter, pairs, config, layouts))
    if OUTPUT not in merged and not {TABLE, OUTPUT}.isdisjoint(update.name for update in updates):
        merged[OUTPUT] = merged[TABLE]
    places = _find_rows(config, merged)
    own: dict[str, list[Update]] = {}
    for update in updates:
        if update.name not in places:
            raise update.refuse(f"{update.pair} is no weight of this model that adapters can update")
        stored, rows = places[update.name]
        update.check_shape(len(rows), merged[stored].shape[1])
        own.setdefault(stored, []).append(Update(rows, update.a, update.b, update.scale))
    return merged | {name: Updated(merged[name], parts) for name, parts in own.items()}


def _find_rows(config: ModelConfig, tensors: Mapping[str, TensorSource]) -> dict[str, tuple[str, IntArray]]:
    """Of each weight that layers multiply by, the tensor that holds it and its rows there."""
    places = {}
    for name, tensor in tensors.items():
        if len(tensor.shape) == 2 and name.endswith(".weight"):
            for part, rows in split_rows(config, name, number_rows(name, tensor.shape[0])).items():
                places[part] = name, read_numbers(rows)
    return places
