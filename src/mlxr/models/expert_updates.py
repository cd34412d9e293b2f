"""Updates of experts by the matrix of the expert that each is for, however a file names and joins these.

A file has a pair of matrices for each expert or stacks of all, and gate and up by themselves or as one.
"""

from __future__ import annotations

import re
from typing import Protocol

from mlxr.core.errors import ModelError
from mlxr.kernels.tensor import FloatArray, TensorSource
from mlxr.models.components import Experts
from mlxr.models.components.weights import name_expert
from mlxr.models.families import find_layout
from mlxr.models.model import Model

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
        """The number of the matrix and how many there are, where the weight is a stack of them; else None."""
        ...

    @property
    def may_be_turned(self) -> bool:
        """Whether the file may count the outputs of a stack's matrices as their inputs, as PEFT before 0.19 did."""
        ...


def is_expert(name: str) -> bool:
    """Return true if the model calls a matrix of an expert so."""
    return _ONE.fullmatch(name) is not None


def list_experts(model: Model) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the matrices of all experts, by the names that the model gives them."""
    return {
        name_expert(f"blk.{index}.{product}", expert): shape
        for index, layer in enumerate(model.layers)
        if layer.experts is not None
        for product, shape in layer.experts.shapes(model.hidden).items()
        for expert in range(layer.experts.count)
    }


def part_stack(name: str, expert: int, matrix: TensorSource) -> dict[str, TensorSource]:
    """Return the rows of an expert's matrix in a stack `name`, by the weights that these are; none of other tensors."""
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
    """The updates of an expert's matrices by a pair for the weight `name`; None for a weight that all tokens have.

    Raises ModelError for a stack of another number of experts, and where the model has none.
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
    """Return true if folders keep stacks with their columns first, and the rows of gate and up in turns."""
    return find_layout(model).alternates


def _turn(pair: ExpertPair, product: str, mixture: Experts, model: Model) -> tuple[FloatArray, FloatArray]:
    """Both matrices, which PEFT once took for each other where a stack does not have its columns first."""
    shape = mixture.shapes(model.hidden).get(product, (2 * mixture.features, model.hidden))
    if not pair.may_be_turned or _alternates(model) or (pair.a.shape[1], pair.b.shape[0]) != shape:
        return pair.a, pair.b
    return pair.b.T.copy(), pair.a.T.copy()
