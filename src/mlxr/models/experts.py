"""The tensors of experts as the layers want them, however a file has them. Nothing is decoded but vectors.

A file may have a tensor for each expert, a stack of all, and gate and up as one. What has to be laid out anew is made
when an expert is prepared, one at a time.
"""

from __future__ import annotations

from mlxr.core.errors import ModelError
from mlxr.kernels.sources import Columns, Rows, Stack, as_float32
from mlxr.kernels.tensor import TensorSource
from mlxr.models.specs import FeedForward, Mixture

_SHARED_GATE = "ffn_gate_inp_shexp.weight"
_FLOAT_TYPES = ("f32", "f16", "bf16")
_HALVES = (("ffn_gate", 0), ("ffn_up", 1))


def part_alternating(tensors: dict[str, TensorSource]) -> None:
    """Part gate and up, whose rows alternate, in the stacks of a folder of gpt-oss.

    Stacks of floats have their columns first, (experts, columns, rows); quantised ones do not.
    """
    for name in [name for name in tensors if name.endswith(("ffn_gate_up_exps.weight", "ffn_down_exps.weight"))]:
        stack = tensors[name]
        _check_stack(stack)
        is_turned, is_joined = stack.type_name in _FLOAT_TYPES, name.endswith("gate_up_exps.weight")
        prefix = name[: name.rindex(".ffn_") + 1]
        if not is_turned and not is_joined:
            continue
        del tensors[name]
        experts = [stack.take_matrix(expert) for expert in range(stack.shape[0])]
        kind, rows = (Columns, stack.shape[2]) if is_turned else (Rows, stack.shape[1])
        for target, first in _HALVES if is_joined else (("ffn_down", 0),):
            chosen = range(first, rows, 2 if is_joined else 1)
            tensors[f"{prefix}{target}_exps.weight"] = Stack(name, [kind(expert, chosen) for expert in experts])
    for name in [name for name in tensors if name.endswith("ffn_gate_up_exps.bias")]:
        decoded = as_float32(tensors.pop(name))
        for part, first in _HALVES:
            target = f"{name.removesuffix('ffn_gate_up_exps.bias')}{part}_exps.bias"
            tensors[target] = decoded.take_columns(range(first, decoded.shape[1], 2))


def _check_stack(stack: TensorSource) -> None:
    if len(stack.shape) != 3:
        raise ModelError(f"tensor {stack.name} has shape {stack.shape}, expected a stack of a matrix for each expert")


def rename_shared(tensors: dict[str, TensorSource], prefix: str, block: FeedForward) -> None:
    """Name the block of a layer as what it is, where a file of a family with experts names it as one beside them."""
    _part_shared(tensors, prefix, block.features, "")
    down = f"{prefix}ffn_down_shexp.weight"
    if down in tensors and f"{prefix}ffn_down.weight" not in tensors:
        tensors[f"{prefix}ffn_down.weight"] = tensors.pop(down)


def part_shared(tensors: dict[str, TensorSource], prefix: str, mixture: Mixture) -> None:
    """Part gate and up of the block that all tokens go through beside the experts, where a file has them as one."""
    _part_shared(tensors, prefix, mixture.shared_features, "_shexp")


def _part_shared(tensors: dict[str, TensorSource], prefix: str, features: int, suffix: str) -> None:
    joined = tensors.get(f"{prefix}ffn_gate_up_shexp.weight")
    if joined is None or joined.shape[0] != 2 * features:
        return
    del tensors[f"{prefix}ffn_gate_up_shexp.weight"]
    for name, half in _HALVES:
        tensors[f"{prefix}{name}{suffix}.weight"] = joined.take_rows(half * features, (half + 1) * features)


def arrange_mixture(tensors: dict[str, TensorSource], prefix: str, mixture: Mixture) -> None:
    """Make one stack of each product of the experts of a layer, whose names begin with `prefix`."""
    part_shared(tensors, prefix, mixture)
    gate = tensors.get(prefix + _SHARED_GATE)
    if gate is not None and len(gate.shape) == 2 and gate.shape[0] == 1:  # a matrix of one row, in folders
        tensors[prefix + _SHARED_GATE] = as_float32(gate).take_matrix(0)
    _part_gate_and_up(tensors, prefix, mixture)
    for name in (*mixture.projections, "ffn_down"):
        if f"{prefix}{name}.0.weight" in tensors:
            _stack_experts(tensors, prefix, name, mixture.experts)


def _part_gate_and_up(tensors: dict[str, TensorSource], prefix: str, mixture: Mixture) -> None:
    joined = tensors.get(f"{prefix}ffn_gate_up_exps.weight")
    if joined is None or joined.shape[:2] != (mixture.experts, 2 * mixture.features) or len(joined.shape) != 3:
        return
    del tensors[f"{prefix}ffn_gate_up_exps.weight"]
    for name, half in _HALVES:
        first = half * mixture.features
        parts = [
            joined.take_matrix(expert).take_rows(first, first + mixture.features) for expert in range(mixture.experts)
        ]
        tensors[f"{prefix}{name}_exps.weight"] = Stack(f"{prefix}{name}_exps.weight", parts)


def _stack_experts(tensors: dict[str, TensorSource], prefix: str, name: str, experts: int) -> None:
    parts: list[TensorSource] = []
    for expert in range(experts):
        part = tensors.pop(f"{prefix}{name}.{expert}.weight", None)
        if part is None:
            raise ModelError(f"tensor {prefix}{name}.{expert}.weight is missing, one of {experts} experts")
        if parts and (part.shape, part.type_name) != (parts[0].shape, parts[0].type_name):
            raise ModelError(
                f"tensor {part.name} is {part.type_name} {part.shape}, expected {parts[0].type_name} "
                f"{parts[0].shape} as the experts before it"
            )
        parts.append(part)
    tensors[f"{prefix}{name}_exps.weight"] = Stack(f"{prefix}{name}_exps.weight", parts)
