"""Low-rank adapters of a model: the weights that they update, ready to run, or merged into the model's tensors.

An adapter names weights as its file does. Joined weights that the model keeps apart are cut, and rows are put in the
order of the model's files. For experts a file has a pair of matrices for each or stacks of all, and gate and up by
themselves or as one; here they become updates of single matrices. `make_adapter` finds the weights among those of a
model, `merge_pairs` returns the tensors as a file would keep them, with the updates added. Knows no files.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from mlxr.core.errors import DeviceError, ModelError
from mlxr.core.frozen import frozen
from mlxr.kernels.context import Context
from mlxr.kernels.elementwise import rotate_rows
from mlxr.kernels.linear import LinearWeight
from mlxr.kernels.lora import AdapterRows, AdapterWeights, LoraPart, TablePart, list_rows, prepare
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.sources import Decoded, Update, Updated, UpdatedStack, number_rows, read_row_numbers
from mlxr.kernels.tensor import FloatArray, IntArray, TensorSource
from mlxr.models.components import Experts
from mlxr.models.components.weights import name_expert
from mlxr.models.families import find_layout
from mlxr.models.folders.tensors import canonical_name, order_columns, order_rows
from mlxr.models.model import Model
from mlxr.models.weights import from_gguf_name, split_rows

_STACK = re.compile(r"(?P<prefix>blk\.(?P<layer>\d{1,5})\.)(?P<product>ffn_\w+)_exps\.weight")
_ONE = re.compile(r"(?P<prefix>blk\.(?P<layer>\d{1,5})\.)(?P<product>ffn_\w+)\.(?P<expert>\d{1,5})\.weight")
_BOTH, _HALVES = "ffn_gate_up", ("ffn_gate", "ffn_up")
Parts = list[tuple[str, FloatArray, FloatArray]]  # name, a and b of each weight


class ExpertPair(Protocol):
    """An update as its file has it: scale * b a, with `a` (rank, in) and `b` (out, rank)."""

    @property
    def name(self) -> str:
        """The weight's name in the file."""
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
    def expert(self) -> tuple[int, int] | None:
        """The number of the matrix and how many there are, if the weight is a stack of them; else None."""
        ...

    @property
    def may_be_turned(self) -> bool:
        """True if the file may count the outputs of a stack's matrices as their inputs, as PEFT before 0.19 did."""
        ...


def is_expert(name: str) -> bool:
    """Return True if the model gives this name to a matrix of an expert."""
    return _ONE.fullmatch(name) is not None


def list_experts(model: Model) -> dict[str, tuple[int, int]]:
    """Return outputs and inputs of the matrices of all experts, by the names that the model gives them."""
    return {
        name_expert(f"blk.{index}.{product}", expert): shape
        for index, layer in enumerate(model.layers)
        if layer.experts is not None
        for product, shape in layer.experts.shapes(model.hidden).items()
        for expert in range(layer.experts.count)
    }


def part_stack(name: str, expert: int, matrix: TensorSource) -> dict[str, TensorSource]:
    """Return the rows of an expert's matrix in a stack `name`, by the weights that these are; none for other
    tensors."""
    found = _STACK.fullmatch(name)
    if found is None:
        return {}
    if found["product"] != _BOTH:
        return {name_expert(found["prefix"] + found["product"], expert): matrix}
    half = matrix.shape[0] // 2
    return {
        name_expert(found["prefix"] + part, expert): matrix.take_rows(at, at + half)
        for part, at in zip(_HALVES, (0, half), strict=True)
    }


def part_experts(name: str, pair: ExpertPair, model: Model, is_gguf: bool) -> Parts | None:
    """Return the updates of an expert's matrices by a pair for the weight `name`; None for one that is not of experts.

    Raises ModelError for a stack of another number of experts, and if the model has none.
    """
    found = _STACK.fullmatch(name) or _ONE.fullmatch(name)
    if found is None:
        if pair.expert is not None:
            raise ModelError(f"{pair.name} has {pair.expert[1]} pairs of matrices, and is no stack of experts")
        return None
    index, prefix, product = int(found["layer"]), found["prefix"], found["product"]
    mixture = model.layers[index].experts if index < len(model.layers) else None
    if mixture is None:
        raise ModelError(f"{pair.name} is a weight of experts, and the model has none there")
    expert = int(found["expert"]) if found.re is _ONE else _check_stack(pair, mixture)
    if expert >= mixture.count:
        raise ModelError(f"{pair.name} is for expert {expert}, and the model has {mixture.count} there")
    a, b = _turn(pair, product, mixture, model)
    target = prefix + product
    if product != _BOTH:
        return [(name_expert(target, expert), a, b)]
    if b.shape[0] != 2 * mixture.features:
        raise ModelError(f"{pair.name} has {b.shape[0]} rows for gate and up, expected {2 * mixture.features}")
    halves = (b[: mixture.features], b[mixture.features :])
    if _alternates(model) and not is_gguf:
        halves = (b[0::2].copy(), b[1::2].copy())
    return [(name_expert(prefix + half, expert), a, rows) for half, rows in zip(_HALVES, halves, strict=True)]


def _check_stack(pair: ExpertPair, mixture: Experts) -> int:
    number, count = pair.expert or (0, 1)
    if count != mixture.count:
        raise ModelError(f"{pair.name} is for {count} experts, and the model has {mixture.count} there")
    return number


def _alternates(model: Model) -> bool:
    """Return True if folders keep stacks with their columns first, and the rows of gate and up in turns."""
    layout = find_layout(model)
    return layout.alternates or layout.columns_first


def _turn(pair: ExpertPair, product: str, mixture: Experts, model: Model) -> tuple[FloatArray, FloatArray]:
    """Return both matrices, which PEFT once took for each other in stacks that do not have their columns first."""
    shape = mixture.shapes(model.hidden).get(product, (2 * mixture.features, model.hidden))
    if not pair.may_be_turned or _alternates(model) or (pair.a.shape[1], pair.b.shape[0]) != shape:
        return pair.a, pair.b
    return pair.b.T.copy(), pair.a.T.copy()


TABLE, OUTPUT = "token_embd.weight", "output.weight"


class Pair(ExpertPair, Protocol):
    """An update of one weight, or of one matrix of a stack, as its file has it, in GGUF with .weight in its name."""

    @property
    def scale(self) -> float:
        """The factor on b a."""
        ...


@frozen(eq=False)
class WeightUpdate:
    """scale * b a of the weight `name`, as the model calls it; errors name `adapter` and `pair`."""

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
    """Yield the updates of all pairs, each of one weight; `is_gguf`: the file names and orders as GGUF files do.

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
    """Return the updates of the weights that layers multiply by; the file's weight `name` is one or several of them."""
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
    """Return the columns and rows of an update in the order of GGUF files, if folders have another one."""
    rows, columns = order_rows(name, model), order_columns(name, model)
    if rows is not None and len(rows) == len(b):
        b = b[rows]
    if columns is not None and len(columns) == a.shape[1]:
        a = a[:, columns].copy()
    return a, b


def merge_pairs(
    adapter: str, pairs: Iterable[Pair], tensors: Mapping[str, TensorSource], model: Model, *, is_gguf: bool
) -> dict[str, TensorSource]:
    """Return the `tensors`, by canonical name, with updates of an adapter added to those that it updates.

    A model whose output is its table of embeddings gets an output of its own when either is updated. Raises ModelError
    for an update that is of none of the tensors, or of another shape.
    """
    if model.rotated is not None:
        raise ModelError(
            f"adapter {adapter}: weights of the model are rotated, so that it can only be served with them"
        )
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


@frozen(eq=False)
class _Place:
    """The place of a weight that layers multiply by: rows of the tensor `stored`, or of a matrix in that stack."""

    stored: str
    rows: IntArray
    expert: int | None = None


def _find_places(model: Model, tensors: Mapping[str, TensorSource]) -> dict[str, _Place]:
    """Return the place of each weight by the name that the model gives it."""
    places = {}
    for name, tensor in tensors.items():
        if len(tensor.shape) == 2 and name.endswith(".weight"):
            for part, rows in split_rows(model, name, number_rows(name, tensor.shape[0])).items():
                places[part] = _Place(name, read_row_numbers(rows))
        elif len(tensor.shape) == 3:
            for expert in range(tensor.shape[0]):
                for part, rows in part_stack(name, expert, number_rows(name, tensor.shape[1])).items():
                    places[part] = _Place(name, read_row_numbers(rows), expert)
    return places


@frozen(eq=False)
class AdapterPart:
    """Updates that count `factor` times."""

    updates: AdapterWeights
    factor: float = 1.0


@frozen(eq=False, weakref_slot=True)
class Adapter:
    """Updates of one model's weights; the `parts` are added in their order.

    `digest` (32 bytes) is a hash of all updates. `sources` are the adapters whose matrices a copy or a sum uses, and
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
    """Return the sum of adapters of one model in their order, each times its factor; None without any."""
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
    places = _place_weights(weights)
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
        a = update.a if weight.rotation is None else rotate_rows(update.a, weight.rotation)
        part = found[update.name] = LoraPart(first, a, update.b, update.scale)
        parts.setdefault(weight, []).append(part)
    return Adapter(name, _digest(found), (AdapterPart(prepare(ctx, parts, table)),))


def _digest(found: Mapping[str, LoraPart | TablePart]) -> bytes:
    """Return a hash of all that is updated, and by what."""
    digest = hashlib.blake2b(digest_size=32)
    for name, update in sorted(found.items(), key=lambda item: item[0]):
        matrices = (update.a, update.b) if isinstance(update, LoraPart) else (update.rows, update.b)
        digest.update(repr((name, update.scale, *(matrix.shape for matrix in matrices))).encode())
        for matrix in matrices:
            digest.update(matrix.tobytes())
    return digest.digest()


def group_batch(batch: RaggedBatch) -> tuple[AdapterRows, ...]:
    """Return the rows of a batch by their adapters, in the order in which these occur."""
    return group_rows(batch.adapters, batch.query_starts.tolist()) if batch.adapters else ()


def group_rows(adapters: Sequence[object], starts: Sequence[int]) -> tuple[AdapterRows, ...]:
    """Return the rows of each part of adapters; rows [starts[i], starts[i + 1]) have adapter i or None.

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


def _place_weights(weights: Iterable[LinearWeight]) -> dict[str, tuple[LinearWeight, int, int]]:
    """Return for each tensor the weight that holds it, the first of its outputs there, and their number."""
    places = {}
    for weight in weights:
        first = 0
        for name, count in zip(weight.names, weight.splits, strict=False):
            places[name] = weight, first, count
            first += count
    return places
