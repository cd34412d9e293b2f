"""The weights of all experts of a layer, as they lie on a GPU: one array for each part, an expert after another.

They were put there expert by expert for `linear`. Each one is copied to its place and let go before the next is, so
that only one is in memory twice; afterwards it is a view of its place, and `linear` multiplies by it as before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlxr.core.errors import DeviceError
from mlxr.kernels.gpu.device import Upload
from mlxr.kernels.linear import LinearWeight
from mlxr.kernels.linear.parts import FLOATS, Part

ALIGNMENT_BYTES = 16  # kernels read whole words


@dataclass(frozen=True, slots=True, eq=False)
class StackedPart:
    """One part of all experts: `array` is (experts, bytes) of blocks or (experts, rows, columns) of floats.

    `raw` are the same bytes as kernels read them, those of an expert `stride` after those of the one before it; None
    where there are no kernels.
    """

    type_name: str
    rows: int
    array: Any
    raw: Any
    stride: int


@dataclass(frozen=True, slots=True, eq=False)
class Stack:
    """The parts of one weight of all experts, each (out_features, in_features), and their `biases` (experts,
    out_features), or None."""

    in_features: int
    out_features: int
    parts: tuple[StackedPart, ...]
    biases: Any


def stack_weights(gpu: Any, weights: Sequence[LinearWeight]) -> Stack:
    """Bring the weights of all experts together. Raises DeviceError unless their types are the same."""
    kinds = {tuple((part.type_name, part.rows) for part in weight.payload[0]) for weight in weights}
    if len(kinds) > 1 or len({weight.payload[1] is None for weight in weights}) > 1:
        shown = ", ".join(sorted({weight.variant for weight in weights}))
        raise DeviceError(f"the experts of a layer have weights of different types, which no GPU kernel takes: {shown}")
    mx = gpu.mx
    parts = tuple(_stack_part(gpu, weights, index) for index in range(len(next(iter(kinds)))))
    biases = None
    if weights[0].payload[1] is not None:
        biases = mx.stack([weight.payload[1] for weight in weights])
        mx.eval(biases)
    return Stack(weights[0].in_features, weights[0].out_features, parts, biases)


def _stack_part(gpu: Any, weights: Sequence[LinearWeight], index: int) -> StackedPart:
    mx = gpu.mx
    lists = [weight.payload[0] for weight in weights]
    first: Part = lists[0][index]
    type_name, rows, has_raw, shape = first.type_name, first.rows, first.raw is not None, first.upload.array.shape
    is_float, length, dtype = first.type_name in FLOATS, shape[0], first.upload.array.dtype
    padded = shape if is_float else (-(-length // ALIGNMENT_BYTES) * ALIGNMENT_BYTES,)
    stacked = mx.zeros((len(lists), *padded), dtype)
    mx.eval(stacked)
    del first
    for expert, parts in enumerate(lists):
        array, parts[index] = parts[index].upload.array, None
        if is_float:
            stacked[expert] = array
        else:
            stacked[expert, :length] = array
        mx.eval(stacked)
        del array
    all_bytes, stride = _view_bytes(mx, stacked), int(stacked.nbytes) // len(weights)
    used_bytes = stride if is_float else length
    for expert, parts in enumerate(lists):
        raw = all_bytes[expert * stride : expert * stride + used_bytes]  # of one axis: others would be copied
        view = raw.view(dtype).reshape(shape)
        mx.eval(raw, view)
        parts[index] = Part(type_name, rows, Upload(view), raw if has_raw else None)
    return StackedPart(type_name, rows, stacked, all_bytes if gpu.launcher is not None else None, stride)


def _view_bytes(mx: Any, array: Any) -> Any:
    raw = array.view(mx.uint8).reshape(-1)
    mx.eval(raw)
    return raw
