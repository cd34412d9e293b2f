"""The weights of a model, as components read them: from its tensors, one after another, ready for the operators.

The source of each is released once it is read, so at most one layer is in memory twice. If there is no room for all
experts, layers share an `ExpertBudget`: each keeps those that were used last, the others stay in the mapped file.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from mlxr.core.errors import DeviceError, ModelError, SettingError
from mlxr.core.frozen import frozen
from mlxr.kernels.context import Context
from mlxr.kernels.elementwise import MAX_BLOCK, Hadamard, make_hadamard, rotate_rows
from mlxr.kernels.layers.operators import (
    AllReduce,
    MatMul,
    Norm,
    NormKind,
    NormWeight,
    Operator,
    Register,
    Scale,
    Turn,
)
from mlxr.kernels.linear import LinearWeight, leave, prepare
from mlxr.kernels.sources import Decoded, as_float32, make_vector, make_zeros
from mlxr.kernels.tensor import FloatArray, TensorSource, read_numbers, read_vector

TABLE = "token_embd.weight"
FULL_PERCENT = 90  # of the free memory: weights that take more leave too little for the cache
TAKEN_PERCENT = 70  # of the free memory, which weights take if not all of them are in memory


@frozen
class ExpertBudget:
    """Bytes for the experts of all layers; `sizes` are the bytes of each layer's experts in the file."""

    nbytes: int
    sizes: tuple[int, ...]

    def count_slots(self, layer: int, expert_bytes: int, experts: int) -> int:
        """Return how many experts of a layer, each of `expert_bytes`, fit in memory. Raises SettingError if none."""
        share = self.nbytes * self.sizes[layer] // sum(self.sizes)
        if share >= expert_bytes:
            return min(experts, share // expert_bytes)
        least = expert_bytes * sum(self.sizes) // self.sizes[layer] + len(self.sizes)
        raise SettingError(
            f"expert_bytes: one expert of each layer takes {least:,} bytes, and there is room for {self.nbytes:,}; set "
            "it higher, free memory or take a smaller model"
        )


def plan_experts(
    sizes: Sequence[int], total_bytes: int, device: str, expert_bytes: int | None, free_bytes: int | None
) -> ExpertBudget | None:
    """Return the budget of a model of `total_bytes` whose layers have experts of `sizes` bytes; None if all are held.

    `expert_bytes` is the setting; None means all experts, unless the free memory, if known, has no room for the model.
    Raises DeviceError for a setting on a device that has all weights in memory.
    """
    if expert_bytes is not None and device != "cpu":
        raise DeviceError(
            f"expert_bytes: experts stay in their file on device 'cpu' only, not on {device!r}; leave it out there"
        )
    experts = sum(sizes)
    free = None if device != "cpu" else free_bytes
    if expert_bytes is None and free is not None and total_bytes > free * FULL_PERCENT // 100:
        expert_bytes = max(0, free * TAKEN_PERCENT // 100 - (total_bytes - experts))
    return None if expert_bytes is None or not experts else ExpertBudget(expert_bytes, tuple(sizes))


Shape = tuple[int, ...]
Tensors = Iterator[tuple[str, Shape]]  # names, without the layer's prefix, and shapes
NormPlaces = Literal["before", "after", "both", "stream"]


@frozen
class Norms:
    """The norms of a layer."""

    eps: float  # added to the variance
    kind: NormKind = "rms"
    bias: bool = False
    places: NormPlaces = "before"  # a block's input is normed, or what it adds to the stream, or both, or their sum
    has_weights: bool = True  # else none of them multiplies by anything
    after_eps: float | None = None  # of the norms of what blocks add, if another
    mixer: str | None = "attn_norm"  # name of the norm of the first block's input; None: there is none
    feed_forward: str = "ffn_norm"  # name of the norm of the second block's input

    def __post_init__(self) -> None:
        if not 0 < self.eps < 1:
            raise ModelError(f"model has norms with eps {self.eps}, expected between 0 and 1")


@frozen
class Flow:
    """The register of a block's input, and the way in which its result is added to the stream."""

    source: Register
    target: Register = "delta"
    factor: float = 1.0  # that the result is multiplied by
    norm: NormWeight | None = None  # of the result

    def finish(self, weight: LinearWeight) -> Iterator[Operator]:
        """List the block's last operators, of which the first multiplies `x` by the weight."""
        made: Register = self.target if self.norm is None else "x"
        yield MatMul(weight, "x", made)
        if weight.is_share:
            yield AllReduce(made)
        if self.norm is not None:
            yield Norm(self.norm, "x", self.target)
        yield from self.multiply()

    def multiply(self) -> Iterator[Operator]:
        """List the operators that multiply the result by the factor."""
        if self.factor != 1.0:
            yield Scale(self.factor, self.target)


@frozen
class RotatedWeights:
    """Weights that a file has rotated, each row w as H (signs * w): their inputs must be rotated alike.

    `signs` has the signs for each length of rows; without any all are 1. Rows of a rotated table of embeddings are
    rotated back when they are looked up. `groups_heads`: the output of a gated delta net reads the values of one key's
    heads after those of another's, as folders have them.
    """

    block: int
    names: frozenset[str]
    signs: tuple[tuple[int, ...], ...] = ()
    has_table: bool = False
    groups_heads: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.block <= MAX_BLOCK or self.block & (self.block - 1):
            raise ModelError(
                f"weights are rotated in blocks of {self.block}, expected a power of two up to {MAX_BLOCK}"
            )

    def make(self, name: str, columns: int, order: Sequence[int] = ()) -> Hadamard:
        """Return the rotation of a tensor's rows. Raises ModelError, naming it, for blocks or signs that do not fit."""
        if columns % self.block:
            raise ModelError(f"tensor {name} has {columns} columns, expected a multiple of the blocks of {self.block}")
        signs = next((own for own in self.signs if len(own) == columns), ())
        if self.signs and not signs:
            raise ModelError(f"tensor {name} has {columns} columns, expected some that its rotation has signs for")
        return make_hadamard(columns, self.block, signs, order)

    def of_layer(self, index: int) -> RotatedWeights:
        """Return the rotated weights of one layer, as if it were the first."""
        prefix = f"blk.{index}."
        own = frozenset(f"blk.0.{name.removeprefix(prefix)}" for name in self.names if name.startswith(prefix))
        return replace(self, names=own)


class Weights:
    """Prepares the weights of one model; `of_layer` gives those of a layer.

    With an `expert_budget` only some experts of each layer are in memory at a time. Products of the weights named in
    `summed` are parts of sums over all ranks. `turned` has the rotations of `rotated` weights once they are read.
    """

    def __init__(
        self,
        ctx: Context,
        tensors: Mapping[str, TensorSource],
        expert_budget: ExpertBudget | None = None,
        summed: Collection[str] = (),
        rotated: RotatedWeights | None = None,
    ) -> None:
        self.ctx, self.tensors, self.expert_budget, self.summed = ctx, tensors, expert_budget, summed
        self.rotated = rotated
        self.turned: dict[str, Hadamard] = {}
        self._rotations: dict[tuple[int, tuple[int, ...]], Hadamard] = {}

    def turn(self, names: Sequence[str], order: Sequence[int] = ()) -> Hadamard | None:
        """Return the rotation of the input of these weights; None if the file has rotated none of them.

        `order` gives for each number of their input its place in the layer's. Raises ModelError for a rotation that
        does not fit.
        """
        if self.rotated is None or self.rotated.names.isdisjoint(names):
            return None
        key = self.tensors[names[0]].shape[1], tuple(order)
        if key not in self._rotations:
            self._rotations[key] = self.rotated.make(names[0], *key)
        self.turned |= dict.fromkeys(names, self._rotations[key])
        return self._rotations[key]

    def take_turned(self, name: str) -> TensorSource:
        """Return a tensor in the basis of the input that it reads: one beside rotated ones is decoded and rotated."""
        tensor, rotation = self.tensors[name], self.turned.get(name)
        if rotation is None or (self.rotated is not None and name in self.rotated.names):
            return tensor
        return Decoded(name, rotate_rows(tensor.to_float32(), rotation))

    def check_turned(self, others: Collection[str] = ()) -> None:
        """Raise ModelError for a weight, none of `others`, that the file says is rotated and that was not turned."""
        names = () if self.rotated is None else self.rotated.names - self.turned.keys() - {*others}
        for name in sorted(names):
            raise ModelError(f"tensor {name} is said to be rotated, and mlxr rotates no input of such a tensor")

    def of_model(self, norms: Norms) -> LayerWeights:
        """Return the weights outside the layers."""
        return LayerWeights(self, "", norms)

    def check(self, prefix: str, tensors: Tensors) -> None:
        """Raise ModelError, naming the tensor, unless those of a layer have the shapes that it lists.

        A bias of a sum over all ranks may be missing, as one rank alone adds it.
        """
        for name, shape in tensors:
            tensor = self.tensors.get(prefix + name)
            is_added_once = f"{prefix}{name.removesuffix('.bias')}.weight" in self.summed and name.endswith(".bias")
            if tensor is None and is_added_once:
                continue
            if tensor is None or tensor.shape != shape:
                has = "is missing" if tensor is None else f"has shape {tensor.shape}"
                raise ModelError(f"tensor {prefix}{name} {has}, expected {shape}")


@frozen
class LayerWeights:
    """Reads the weights of one layer by their names without its prefix."""

    model: Weights
    prefix: str
    norms: Norms
    index: int = 0
    rope: int = 0  # number of the layer's rotation table
    group: int = 0  # number of its group in the cache

    @property
    def ctx(self) -> Context:
        """The context that weights are prepared for."""
        return self.model.ctx

    def take(self, name: str) -> TensorSource:
        """Return the tensor itself, as its file has it."""
        return self.model.tensors[self.prefix + name]

    def turn(self, source: Register, *names: str, order: Sequence[int] = ()) -> Generator[Operator, None, Register]:
        """List the operators that rotate `source` for the weights of these names, if some of them are rotated; return
        the register of their input. `order` gives for each number of it its place in the source."""
        rotation = self.model.turn([f"{self.prefix}{name}.weight" for name in names], order)
        if rotation is None:
            return source
        target: Register = "x" if source == "x" else "turned"
        yield Turn(rotation, source, target)
        return target

    def product(self, *names: str) -> LinearWeight:
        """Return the weights of these names in one, each with its bias, if it has one."""
        full_names = tuple(f"{self.prefix}{name}.weight" for name in names)
        biases = [self.model.tensors.get(f"{self.prefix}{name}.bias") for name in names]
        weight = prepare(
            self.ctx,
            [self.model.take_turned(name) for name in full_names],
            [None if bias is None else read_vector(bias) for bias in biases],
            full_names,
        )
        is_share, rotation = full_names[0] in self.model.summed, self.model.turned.get(full_names[0])
        return replace(weight, is_share=is_share, rotation=rotation)

    def prepare(self, sources: list[TensorSource], *names: str) -> LinearWeight:
        """Return weights without biases that differ from those in the file; adapters know them by these names."""
        full_names = tuple(self.prefix + name for name in names)
        weight = prepare(self.ctx, sources, None, full_names)
        return replace(weight, rotation=self.model.turned.get(full_names[0])) if full_names else weight

    def exact_product(self, name: str, *, bias: bool = False) -> LinearWeight:
        """Return a weight for products in float32."""
        biases = [self.vector(f"{name}.bias")] if bias else None
        full_name = f"{self.prefix}{name}.weight"
        return prepare(self.ctx, [as_float32(self.model.tensors[full_name])], biases, (full_name,))

    def bias_alone(self, name: str, columns: int) -> LinearWeight:
        """Return a weight whose products are the bias of that name, for any `columns` finite numbers."""
        bias, full_name = self.vector(name), self.prefix + name
        return prepare(self.ctx, [make_zeros(full_name, len(bias), columns)], [bias], (full_name,))

    def scaled_product(self, name: str, scales: FloatArray) -> LinearWeight:
        """Return a weight whose columns are multiplied by these numbers, for products in float32."""
        tensor = self.take(f"{name}.weight")
        return self.prepare([Decoded(tensor.name, tensor.to_float32() * scales)], name)

    def made_product(self, rows: FloatArray, bias: FloatArray) -> LinearWeight:
        """Return a weight of these rows and this bias, for products in float32."""
        return prepare(self.ctx, [Decoded(self.prefix, rows)], [bias], ())

    def expert(self, names: tuple[str, ...], expert: int) -> LinearWeight:
        """Return the matrices of one expert, from stacks of all; left in the file if not all are in memory."""
        tensors = self.model.tensors
        weights = [self.take(f"{name}_exps.weight").take_matrix(expert) for name in names]
        biases = [tensors.get(f"{self.prefix}{name}_exps.bias") for name in names]
        vectors = [None if bias is None else read_vector(bias.take_matrix(expert)) for bias in biases]
        own_names = tuple(name_expert(self.prefix + name, expert) for name in names)
        return (prepare if self.model.expert_budget is None else leave)(self.ctx, weights, vectors, own_names)

    def norm(self, name: str, *, eps: float | None = None, has_weight: bool = True) -> NormWeight:
        """Return the norm of that name; one without a weight multiplies by ones, as many as embeddings have numbers."""
        norms = self.norms
        if has_weight and norms.has_weights:
            weight = self.vector(f"{name}.weight")
        else:
            weight = self.make_ones(self.model.tensors[TABLE].shape[1])
        bias = self.vector(f"{name}.bias") if norms.bias else None
        return NormWeight(weight, eps or norms.eps, norms.kind, bias)

    def make_ones(self, count: int) -> FloatArray:
        """Return the weight of a norm that multiplies by 1."""
        return read_vector(make_vector(self.prefix, [1.0] * count))

    def vector(self, name: str) -> FloatArray:
        """Return a small tensor of one axis as numbers."""
        return read_vector(self.take(name))

    def numbers(self, name: str) -> FloatArray:
        """Return a small tensor of any shape as numbers."""
        return read_numbers(self.take(name))

    def scalar(self, name: str) -> float:
        """Return the only number of a tensor. Raises ModelError unless it is finite."""
        return read_number(self.take(name))


def read_number(tensor: TensorSource) -> float:
    """Return the only number of a tensor. Raises ModelError unless there is one, and it is finite."""
    if math.prod(tensor.shape) != 1:
        raise ModelError(f"tensor {tensor.name} has shape {tensor.shape}, expected one number")
    value = float(read_numbers(tensor).reshape(()))
    if not math.isfinite(value):
        raise ModelError(f"tensor {tensor.name} holds {value}, expected a finite number")
    return value


def check_range(what: str, value: float, low: float, high: float) -> None:
    """Raise ModelError for a number of a model outside [low, high]."""
    if not low <= value <= high:
        raise ModelError(f"model has {what} {value:g}, expected from {low:g} to {high:g}")


def list_product(name: str, rows: int, columns: int, *, bias: bool = False) -> Tensors:
    """List the tensors of a product."""
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)


def name_expert(product: str, expert: int) -> str:
    """Return the name of one expert's matrix as old GGUF files spell it, for a `product` such as blk.0.ffn_up."""
    return f"{product}.{expert}.weight"
