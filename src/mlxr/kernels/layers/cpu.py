"""Native `run_layers`: csrc/blocks.cpp runs all operators of all layers in one call. The payload is a native object."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mlxr.kernels.attend.scores import Scores
from mlxr.kernels.buffers import empty
from mlxr.kernels.context import Context
from mlxr.kernels.layers.block import AttentionBlock, Layer, Layers
from mlxr.kernels.layers.operators import (
    Activate,
    Attend,
    Join,
    Norm,
    Operator,
    Product,
    Scale,
    SplitHeads,
    Sum,
    list_operators,
)
from mlxr.kernels.layers.step import StepInput
from mlxr.kernels.ledger import Part
from mlxr.kernels.tensor import FloatArray, pool_type

_NAME = "cpu"
_NONE = 0  # no window, no softcap


@dataclass(frozen=True, slots=True, eq=False)
class _Payload:
    """The native twin of the layers, and the operators that a run of them counts as."""

    native: Any
    counted: Counted


class Counted:
    """What a run of layers counts as in the ledger, by names only: it may outlive the weights."""

    def __init__(self, programs: Sequence[Sequence[Operator]]) -> None:
        self._operators: list[tuple[str, str]] = []
        is_first = True
        for operator in (operator for program in programs for operator in program):
            self._operators += _name_operator(operator, is_first)
            is_first = False

    def list_parts(self, ropes: tuple[str, ...], kv_type: str) -> Iterator[Part]:
        """All operators of one run; `ropes` are the variants of the step's rotations, "" for none."""
        for operator, variant in self._operators:
            if operator == "rope":
                if ropes[int(variant)]:
                    yield operator, _NAME, ropes[int(variant)]
            elif operator in ("attend", "write_pages"):
                yield operator, _NAME, variant.format(kv_type)
            else:
                yield operator, _NAME, variant


def _name_operator(operator: Operator, is_first: bool) -> list[tuple[str, str]]:
    """Names and variants, in which {} stands for the type of the pages, and for `rope` the number of the table."""
    match operator:
        case Norm(weight, source):
            return [(f"{weight.kind}_norm", "f32+residual" if source == "stream" and not is_first else "f32")]
        case Product(weight):
            return [("linear", weight.variant)]
        case SplitHeads(block):
            norms, turn = ("rms_norm", "f32"), ("rope", str(block.rope))
            queries = [turn] if block.head_norms is None else [norms, turn]
            if block.projected == "q":
                return queries
            values = [norms] if block.head_norms is not None and block.head_norms.values else []
            return [*queries, *queries[:-1], *values, turn, ("write_pages", "{}")]
        case Attend(block):
            return [
                ("attend", Scores(block.scale, block.sliding_window, block.softcap, block.sinks).name_variant("{}"))
            ]
        case Activate(kind):
            return [("activate", kind)]
        case Scale():
            return [("scale", "f32")]
        case Sum() | Join():
            return []


def name_ropes(step: StepInput) -> tuple[str, ...]:
    """What the ledger calls the rotations of a step's tables."""
    kinds = {True: "interleaved", False: "halves"}
    return tuple(kinds[table.interleaved] if table.rot_dim else "" for table in step.ropes)


def prepare(ctx: Context, layers: tuple[Layer, ...]) -> _Payload:
    """The native twin of `layers`, which it keeps alive."""
    native = ctx.module.Layers()
    programs = [list_operators(layer) for layer in layers]
    for layer, program in zip(layers, programs, strict=True):
        native.append_layer(*_describe(layer.attention))
        for operator in program:
            _append(native, operator)
    return _Payload(native, Counted(programs))


def _describe(block: AttentionBlock) -> tuple[object, ...]:
    return (
        block.qkv.in_features,
        block.heads,
        block.kv_heads,
        block.head_dim,
        block.scale,
        block.sliding_window or _NONE,
        block.softcap or _NONE,
        block.sinks,
        block.rope,
        block.group,
    )


def _append(native: Any, operator: Operator) -> None:
    match operator:
        case Norm(weight, source, target):
            native.append_norm(weight.weight, weight.bias, weight.eps, weight.kind == "layer", source, target)
        case Product(weight, source, target):
            native.append_product(weight.payload, source, target)
        case SplitHeads(block):
            norms = block.head_norms
            q_norm, k_norm, eps, values = (None, None, 0.0, False)
            if norms is not None:
                q_norm, k_norm, eps, values = norms.q, norms.k, norms.eps, norms.values
            native.append_split_heads(q_norm, k_norm, eps, values, block.projected)
        case Attend():
            native.append_attend()
        case Activate(kind, features):
            native.append_activate(kind, features)
        case Sum():
            native.append_sum()
        case Scale(factor, target):
            native.append_scale(factor, target)
        case Join():
            native.append_join()


def run_layers(
    ctx: Context, stream: FloatArray, layers: Layers, step: StepInput
) -> tuple[FloatArray, FloatArray | None]:
    """One call, in place; the ledger counts the operators in it."""
    if not layers.layers:
        return stream, None
    delta = empty(ctx, *stream.shape)
    ctx.module.run_layers(ctx.native, layers.payload.native, stream, delta, *list_arrays(step))
    ctx.ledger.count_parts(layers.payload.counted.list_parts, name_ropes(step), pool_type(step.k_pools[0]))
    return stream, delta


def list_arrays(step: StepInput) -> tuple[object, ...]:
    """A step's arrays in the order in which native calls take them."""
    batch = step.batch
    return (
        step.k_pools,
        step.v_pools,
        batch.positions,
        [(table.cos, table.sin, table.interleaved, table.query_factors) for table in step.ropes],
        [part.slots for part in batch.groups],
        batch.query_starts,
        batch.context_lengths,
        [part.page_table for part in batch.groups],
    )
