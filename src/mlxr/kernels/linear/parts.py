"""Weights in a GPU's memory: their layout, their expansion to plain numbers, and the extras of a product (`Extras`).

Neighbouring tensors of one type are one part, with one bias for the outputs of all. Blocks of a file are split into
planes, one for each field, so that a lane reads whole words; floats, and types with aligned blocks, are copied as they
are. Without kernels (MLX on CPU), blocks are decoded. `gpu.py` decides how to multiply: it reads parts, and hands
kernels the number of a layout, rows and raw bytes.

For products of many rows, quantised weights are expanded a piece at a time into one scratch array, and MLX multiplies.
However far MLX's evaluation runs ahead, there is only that one array: each launch that fills it waits for the previous
product, and each product for its launch, through arrays that MLX tracks, since it does not track what is written in
place. So the launch also makes zeros, which the product adds, and takes the previous product as an input.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import get_args

import numpy as np

from mlxr.core.errors import DeviceError
from mlxr.core.frozen import frozen
from mlxr.core.tables import WEIGHT_TYPES, Activation, WeightType
from mlxr.kernels.context import Context
from mlxr.kernels.gpu.device import Gpu, Upload
from mlxr.kernels.gpu.kernel import Kernel, name_type
from mlxr.kernels.gpu.launcher import SHORT_NAMES
from mlxr.kernels.gpu.mlx import Mlx
from mlxr.kernels.tensor import DeviceArray, FloatArray, NumberType, TensorSource

FLOATS = ("f32", "f16", "bf16")


@frozen
class Layout:
    """A type's layout, as in blocks.h: ggml's number, the values and bytes of a block, and the field of each plane.

    `fields` are (offset, bytes) in a block, in the order of the planes; without any, blocks stay whole.
    """

    number: int
    block_size: int
    block_bytes: int
    fields: tuple[tuple[int, int], ...] = ()


_FIELD_BYTES = {"halves": 2, "bytes": 1}  # bytes of a number by kind of field; all others have words of four
_ALIGNMENT = 16  # blocks with a multiple of these bytes stay whole
_FLOAT_COLUMNS = {"f32": 32, "f16": 256, "bf16": 256}  # columns that kernels read as one block


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


@frozen(eq=False)
class Part:
    """Neighbouring tensors of one type: `upload` holds their planes, or the matrix (rows, columns) of floats.

    `raw` are the bytes that kernels read; None if no kernel multiplies by them.
    """

    type_name: str
    rows: int
    upload: Upload
    raw: DeviceArray | None

    @property
    def planes(self) -> DeviceArray:
        """`raw`; TypeError if no kernel multiplies by it."""
        if self.raw is None:
            raise TypeError(f"no kernel multiplies by a weight of type {self.type_name} in this form")
        return self.raw


Payload = tuple[list[Part], DeviceArray | None]  # parts, and the bias of all outputs or None
MOST_APPLE_BYTES = 2**32  # bytes of a weight must be fewer: Apple kernels count in 32 bits, which is much faster


def prepare(
    ctx: Context, tensors: Sequence[TensorSource], biases: Sequence[FloatArray | None] | None
) -> tuple[Payload, int]:
    """Return the parts on the device and their bytes. Raises DeviceError for a type without a kernel."""
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
    is_large = ctx.gpu.is_apple and upload.array.nbytes >= MOST_APPLE_BYTES
    if is_large and type_name in BLOCKS:
        raise DeviceError(
            f"tensor {tensors[0].name} has {upload.array.nbytes} bytes with what is multiplied beside it, and an Apple "
            f"GPU's kernels take less than {MOST_APPLE_BYTES}; use device 'cpu'"
        )
    if ctx.gpu.launcher is None or layout is None or columns % layout.block_size or is_large:
        return Part(type_name, rows, upload, None)
    raw = upload.array
    if type_name in FLOATS:
        raw = raw.view(mx.uint8)  # keep the rows: MLX counts a dimension in 31 bits
        mx.eval(raw)
    return Part(type_name, rows, upload, raw)


def arrange_blocks(mx: Mlx, type_name: str, raw: DeviceArray) -> DeviceArray:
    """Return blocks of a file as planes; floats, and types with aligned blocks, unchanged."""
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


Weights = list[tuple[int, int, DeviceArray]]  # one or two weights: number of the type, rows, planes
GATES: Mapping[str, int] = {kind: code for code, kind in enumerate(get_args(Activation), 1)}


@frozen(eq=False)
class Extras:
    """The extras that a product does in its launch: a bias, the norm of x before it, a gate or a sum after it.

    None and 0 mean nothing to do. Every kernel of products takes these arrays after the weights, and constants say
    which of them it reads. With `gate`, one of GATES, the upper half of the outputs gates the lower one. `norm` is the
    weight and the epsilon of the norm of x.
    """

    gate: int = 0
    bias: DeviceArray | None = None
    norm: tuple[DeviceArray, float] | None = None
    residual: DeviceArray | None = None

    def list_inputs(self, gpu: Gpu) -> list[DeviceArray]:
        """Return the bias, the norm's weight, the residual and the norm's epsilon, with zeros for unused ones."""
        numbers = gpu.launcher.numbers
        none = numbers(0.0)
        weight, eps = (none, none) if self.norm is None else (self.norm[0], numbers(self.norm[1]))
        bias = none if self.bias is None else self.bias
        return [bias, weight, none if self.residual is None else self.residual, eps]

    @property
    def constants(self) -> dict[str, int]:
        """The constants for which a kernel is compiled."""
        return flag_extras(
            self.gate, is_normed=self.norm is not None, is_biased=self.bias is not None, adds=self.residual is not None
        )


def flag_extras(gate: int, *, is_normed: bool = False, is_biased: bool = False, adds: bool = False) -> dict[str, int]:
    """Return `Extras.constants` without having the arrays."""
    return {"NORM": int(is_normed), "BIAS": int(is_biased), "GATE": gate, "RESIDUAL": int(adds)}


SCRATCH_BYTES = 512 * 2**20
PIECE_ROWS = 256  # pieces of large weights are multiples of it: the library is slow with unaligned rows
THREADS, GROUPS = 256, 1056  # eight threadgroups for each of an H200's multiprocessors
SIMD_GROUPS = 4  # SIMD-groups of a threadgroup that picks rows, one row each
BLOCK_HEADERS = ("runs.h", "k_blocks.h", "../../core/grids.h", "grid_blocks.h", "blocks.h")  # in this order
FILL = Kernel(
    "linear_fill",
    Path(__file__).parent,
    "scratch.body",
    ("weights", "after", "scratch", "sizes"),
    ("zeros",),
    (*BLOCK_HEADERS, "expand.h"),
    type_names=TYPE_NAMES,
)
EXPAND = Kernel(
    "linear_expand",
    Path(__file__).parent,
    "expand.body",
    ("weights", "ids", "sizes"),
    ("out",),
    (*BLOCK_HEADERS, "expand.h"),
    type_names=TYPE_NAMES,
)


def multiply_expanded(gpu: Gpu, x: DeviceArray, weights: list[tuple[int, int, DeviceArray]]) -> DeviceArray:
    """Multiply x (tokens, columns) by some weights, each (number of its type, rows, planes): (tokens, all rows)."""
    mx = gpu.mx
    kind = mx.bfloat16 if gpu.narrow else mx.float32
    columns, outputs = x.shape[1], []
    x = x if x.dtype == kind else x.astype(kind)
    most = SCRATCH_BYTES // (columns * kind.size)
    most = max(1, most - most % PIECE_ROWS if most > PIECE_ROWS else most)
    for pieces in cut_rows([rows for _, rows, _ in weights], most):
        count = sum(stop - start for _, start, stop in pieces)
        scratch, place = gpu.reserve(count * columns, kind), 0
        after = x if gpu.last_expanded is None else gpu.last_expanded
        for index, start, stop in pieces:
            number, rows, planes = weights[index]
            sizes = gpu.launcher.numbers(stop - start, start, rows, place, count)
            after = _fill(gpu, number, columns, [planes, after, scratch, sizes], count)
            place += stop - start
        outputs.append(_multiply(gpu, after, x, gpu.reserve_matrix(count, columns, kind)))
        gpu.last_expanded = outputs[-1]
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=1)


def cut_rows(rows: Sequence[int], most: int) -> list[list[tuple[int, int, int]]]:
    """Cut the rows of consecutive weights into pieces of at most `most` rows, each of (weight, first row, end)."""
    cuts: list[list[tuple[int, int, int]]] = []
    room = 0
    for index, count in enumerate(rows):
        start = 0
        while start < count:
            if not room:
                cuts.append([])
                room = most
            stop = min(count, start + room)
            cuts[-1].append((index, start, stop))
            room -= stop - start
            start = stop
    return cuts


def _fill(gpu: Gpu, number: int, columns: int, inputs: list[DeviceArray], zeros: int) -> DeviceArray:
    kind, groups = inputs[2].dtype, GROUPS if gpu.launcher.is_lazy else 1
    (made,) = gpu.launcher.launch(
        FILL,
        inputs,
        groups=(groups, 1, 1),
        threads=THREADS,
        outputs=[((zeros,), kind)],
        constants={"TYPE_A": number, "INPUTS": columns, "GROUPS": groups},
        types={"Y": kind},
    )
    return made


def _multiply(gpu: Gpu, zeros: DeviceArray, x: DeviceArray, matrix: DeviceArray) -> DeviceArray:
    """Multiply by the expanded matrix. Adding the zeros costs nothing and makes the product wait for their launch."""
    name = name_product(matrix.dtype)
    return gpu.watch.run_mlx("linear", name, lambda: gpu.mx.addmm(zeros, x, matrix.T), x, matrix)


@cache
def name_product(dtype: NumberType) -> str:
    """Return the ledger's name of MLX's product with a matrix of such numbers."""
    kind = name_type(dtype)
    return f"matmul {SHORT_NAMES.get(kind, kind)}"


def pick_blocks(ctx: Context, upload: Upload, table: TensorSource, ids: DeviceArray, kind: NumberType) -> DeviceArray:
    """Return rows `ids` of an uploaded table as plain numbers, (ids, columns)."""
    rows, columns = table.shape
    (out,) = ctx.gpu.launcher.launch(
        EXPAND,
        [upload.array, ids, ctx.gpu.launcher.numbers(columns, ids.shape[0], rows)],
        groups=(-(-ids.shape[0] // SIMD_GROUPS), 1, 1),
        threads=32 * SIMD_GROUPS,
        outputs=[((ids.shape[0], columns), kind)],
        constants={"TYPE_A": LAYOUTS[table.type_name].number},
        types={"Y": kind},
    )
    return out
