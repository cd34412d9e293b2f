"""Weights as they lie on a GPU: neighbouring tensors of one type are one part, with one bias for the outputs of all.

Blocks of a file go there field by field in planes, so that a lane reads whole words; floats, and types whose blocks are
aligned already, as they are. Where there are no kernels (MLX on CPU) blocks are decoded instead. Knows nothing of what
multiplies: `gpu.py` reads parts, and hands kernels the number of a layout, rows and raw bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from mlxr.core.errors import DeviceError
from mlxr.core.tables import WEIGHT_TYPES, WeightType
from mlxr.kernels.context import Context
from mlxr.kernels.gpu.device import Upload
from mlxr.kernels.gpu.mlx import Mlx
from mlxr.kernels.tensor import DeviceArray, FloatArray, TensorSource

FLOATS = ("f32", "f16", "bf16")


@dataclass(frozen=True, slots=True)
class Layout:
    """How blocks.h knows a type: ggml's number, values and bytes of a block, and where in it each plane's field lies.

    `fields` are (offset, bytes), in the order of the planes; without any, blocks stay whole.
    """

    number: int
    block_size: int
    block_bytes: int
    fields: tuple[tuple[int, int], ...] = ()


_FIELD_BYTES = {"halves": 2, "bytes": 1}  # by kind of a field; all others are words of four
_ALIGNMENT = 16  # blocks of a multiple of it stay whole
_FLOAT_COLUMNS = {"f32": 32, "f16": 256, "bf16": 256}  # of what kernels read as one block


def _lay_out(row: WeightType) -> Layout:
    if row.name in FLOATS:
        columns = _FLOAT_COLUMNS[row.name]
        return Layout(row.code, columns, columns * row.block_bytes)
    return Layout(row.code, row.block_size, row.block_bytes, tuple(_cut_planes(row)))


def _cut_planes(row: WeightType) -> Iterator[tuple[int, int]]:
    if row.block_bytes % _ALIGNMENT == 0:
        return
    for kind, offset, count in row.fields:
        size = count * _FIELD_BYTES.get(kind, 4)
        if kind == "six_bits":  # as files have them: four bits of all numbers, then two
            yield offset, size * 2 // 3
            yield offset + size * 2 // 3, size // 3
        else:
            yield offset, size


LAYOUTS = {row.name: _lay_out(row) for row in WEIGHT_TYPES}
TYPE_NAMES = {layout.number: name for name, layout in LAYOUTS.items()}
BLOCKS = frozenset(LAYOUTS) - frozenset(FLOATS)
GRIDS = frozenset(name for name in BLOCKS if name.startswith(("iq1", "iq2", "iq3")))  # grid_blocks.h


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Neighbouring tensors of one type: `upload` holds their planes, or the matrix (rows, columns) of floats.

    `raw` are the bytes that kernels read, None for what they do not multiply.
    """

    type_name: str
    rows: int
    upload: Upload
    raw: DeviceArray | None

    @property
    def planes(self) -> DeviceArray:
        """`raw`, for what kernels multiply."""
        if self.raw is None:
            raise TypeError(f"no kernel multiplies by a weight of type {self.type_name} in this form")
        return self.raw


Payload = tuple[list[Part], DeviceArray | None]  # and the bias of all outputs, or None


def prepare(
    ctx: Context, tensors: Sequence[TensorSource], biases: Sequence[FloatArray | None] | None
) -> tuple[Payload, int]:
    """The parts on the device and their bytes. Raises DeviceError for a type without a kernel."""
    for tensor in tensors:
        if tensor.type_name not in FLOATS and tensor.type_name not in BLOCKS:
            known = ", ".join([*FLOATS, *sorted(BLOCKS)])
            raise DeviceError(
                f"tensor {tensor.name} has type {tensor.type_name}, which has no GPU kernel; known are {known}"
            )
        if tensor.type_name in BLOCKS and tensor.shape[1] % LAYOUTS[tensor.type_name].block_size:
            raise ValueError(
                f"tensor {tensor.name} has {tensor.shape[1]} columns, {tensor.type_name} needs whole blocks"
            )
    parts = []
    for type_name, group in groupby(tensors, key=lambda tensor: tensor.type_name):
        parts.append(_make_part(ctx, type_name, list(group)))
    bias = _join_biases(ctx, tensors, biases)
    return (parts, bias), sum(part.upload.array.nbytes for part in parts) + (0 if bias is None else bias.nbytes)


def _make_part(ctx: Context, type_name: str, tensors: list[TensorSource]) -> Part:
    mx, layout = ctx.gpu.mx, LAYOUTS.get(type_name)
    rows, columns = sum(tensor.shape[0] for tensor in tensors), tensors[0].shape[1]
    if ctx.gpu.launcher is None and type_name in BLOCKS:
        return _decode(ctx, tensors)
    if len(tensors) == 1:
        upload = ctx.gpu.upload(tensors[0], arrange_blocks)
    else:
        joined = mx.concatenate([ctx.gpu.read(tensor) for tensor in tensors])
        for tensor in tensors:
            tensor.release()
        upload = Upload(arrange_blocks(mx, type_name, joined))
    if ctx.gpu.launcher is None or layout is None or columns % layout.block_size:
        return Part(type_name, rows, upload, None)
    raw = upload.array
    if type_name in FLOATS:
        raw = raw.view(mx.uint8)  # not one long row: MLX counts a dimension in 31 bits
        mx.eval(raw)
    return Part(type_name, rows, upload, raw)


def arrange_blocks(mx: Mlx, type_name: str, raw: DeviceArray) -> DeviceArray:
    """Blocks of a file as planes; floats and types whose blocks are aligned as they are."""
    layout = LAYOUTS.get(type_name)
    if layout is not None and layout.fields:
        blocks = raw.reshape(-1, layout.block_bytes)
        raw = mx.concatenate([blocks[:, at : at + size].reshape(-1) for at, size in layout.fields])
    mx.eval(raw)
    return raw


def _decode(ctx: Context, tensors: Sequence[TensorSource]) -> Part:
    matrix = np.concatenate([tensor.to_float32() for tensor in tensors])
    for tensor in tensors:
        tensor.release()
    array = ctx.gpu.mx.array(matrix)
    ctx.gpu.mx.eval(array)
    return Part("f32", len(matrix), Upload(array), None)


def _join_biases(
    ctx: Context, tensors: Sequence[TensorSource], biases: Sequence[FloatArray | None] | None
) -> DeviceArray | None:
    if biases is None or all(bias is None for bias in biases):
        return None
    vectors = [
        np.zeros(tensor.shape[0], np.float32) if bias is None else bias
        for tensor, bias in zip(tensors, biases, strict=True)
    ]
    joined = ctx.gpu.mx.array(np.concatenate(vectors))
    ctx.gpu.mx.eval(joined)
    return joined
