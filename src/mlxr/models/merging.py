"""A model's tensors with an adapter's updates added, as its file would keep them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mlxr.kernels.tensor import IntArray, TensorSource
from mlxr.kernels.updated import Update, Updated, UpdatedStack, number_rows, read_numbers
from mlxr.models.expert_updates import part_stack
from mlxr.models.model import Model
from mlxr.models.updates import OUTPUT, TABLE, Pair, list_updates
from mlxr.models.weights import split_rows


def merge_pairs(
    adapter: str, pairs: Iterable[Pair], tensors: Mapping[str, TensorSource], model: Model, *, is_gguf: bool
) -> dict[str, TensorSource]:
    """Return the `tensors`, by canonical name, with updates of an adapter added to those that it has some for.

    A model whose output is its table of embeddings gets an output of its own when either is updated. Raises ModelError
    for an update that is of none of the tensors, or of another shape.
    """
    merged = dict(tensors)
    updates = list(list_updates(adapter, pairs, model, is_gguf=is_gguf))
    if OUTPUT not in merged and not {TABLE, OUTPUT}.isdisjoint(update.name for update in updates):
        merged[OUTPUT] = merged[TABLE]
    places = _find_places(model, merged)
    own: dict[tuple[str, int | None], list[Update]] = {}
    for update in updates:
        if update.name not in places:
            raise update.refuse(f"{update.pair} is no weight of this model that adapters can update")
        place = places[update.name]
        update.check_shape(len(place.rows), merged[place.stored].shape[-1])
        own.setdefault((place.stored, place.expert), []).append(Update(place.rows, update.a, update.b, update.scale))
    matrices = {name: Updated(merged[name], parts) for (name, expert), parts in own.items() if expert is None}
    stacks = {name: _update_stack(name, merged[name], own) for name, expert in own if expert is not None}
    return merged | matrices | stacks


def _update_stack(name: str, stack: TensorSource, own: Mapping[tuple[str, int | None], list[Update]]) -> UpdatedStack:
    """Return a stack with the updates of some of its matrices; the others stay as they are."""
    parts = []
    for expert in range(stack.shape[0]):
        matrix, updates = stack.take_matrix(expert), own.get((name, expert))
        parts.append(matrix if updates is None else Updated(matrix, updates))
    return UpdatedStack(name, parts, stack)


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """Where a weight that layers multiply by is: in the tensor `stored`, a stack's matrix, some rows."""

    stored: str
    rows: IntArray
    expert: int | None = None


def _find_places(model: Model, tensors: Mapping[str, TensorSource]) -> dict[str, _Place]:
    """Return the place of each weight by the name that the model gives it."""
    places = {}
    for name, tensor in tensors.items():
        if len(tensor.shape) == 2 and name.endswith(".weight"):
            for part, rows in split_rows(model, name, number_rows(name, tensor.shape[0])).items():
                places[part] = _Place(name, read_numbers(rows))
        elif len(tensor.shape) == 3:
            for expert in range(tensor.shape[0]):
                for part, rows in part_stack(name, expert, number_rows(name, tensor.shape[1])).items():
                    places[part] = _Place(name, read_numbers(rows), expert)
    return places
