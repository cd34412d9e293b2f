"""`linear` on a GPU: quantised weights stay in the blocks of the file, floats go to MLX's matmul.

Up to MAX_ROWS rows are multiplied by a kernel that reads each block once. More rows: the weight is expanded a tile at a
time, small enough to stay in the device's cache, and MLX multiplies. Without kernels (MLX on CPU) weights are decoded
when they are loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from mlxr.core.errors import DeviceError
from mlxr.kernels.context import Context
from mlxr.kernels.gpu.device import Upload
from mlxr.kernels.gpu.kernel import Kernel
from mlxr.kernels.linear.weight import LinearWeight
from mlxr.kernels.tensor import FloatArray, TensorSource

FLOATS = ("f32", "f16", "bf16")
# ggml's number of each type, by which blocks.h names it, and columns in a block
BLOCKS = {
    "q4_0": (2, 32), "q4_1": (3, 32), "q5_0": (6, 32), "q5_1": (7, 32), "q8_0": (8, 32),
    "q2_k": (10, 256), "q3_k": (11, 256), "q4_k": (12, 256), "q5_k": (13, 256), "q6_k": (14, 256), "q8_k": (15, 256),
    "iq4_nl": (20, 32), "iq4_xs": (23, 256), "mxfp4": (39, 32),
}  # fmt: skip
MAX_ROWS = 8
TILE_BYTES = 32 * 2**20
SIMD_GROUPS = 4
MANY_OUTPUTS = 16384  # from here on a SIMD-group has enough company to make two outputs

_FOLDER = Path(__file__).parent
ROWS = Kernel("linear_rows", _FOLDER, "rows.body", ("x", "a", "b", "bias", "sizes"), ("out",), ("blocks.h", "rows.h"))
EXPAND = Kernel("linear_expand", _FOLDER, "expand.body", ("weights", "ids", "sizes"), ("out",), ("blocks.h",))
KERNELS = (ROWS, EXPAND)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Neighbouring tensors of one type: `upload` holds their blocks, or the matrix (rows, columns) of floats."""

    type_name: str
    rows: int
    upload: Upload


Payload = tuple[list[Part], Any]  # and the bias of all outputs, or None


def prepare(
    ctx: Context, tensors: Sequence[TensorSource], biases: Sequence[FloatArray | None] | None
) -> tuple[Payload, int]:
    """The parts on the device and their bytes. Raises DeviceError for a type without a kernel."""
    mx = ctx.gpu.mx
    for tensor in tensors:
        if tensor.type_name not in FLOATS and tensor.type_name not in BLOCKS:
            known = ", ".join([*FLOATS, *BLOCKS])
            raise DeviceError(
                f"tensor {tensor.name} has type {tensor.type_name}, which has no GPU kernel; known are {known}"
            )
        block = BLOCKS.get(tensor.type_name, (0, 1))[1]
        if tensor.shape[1] % block:
            raise ValueError(
                f"tensor {tensor.name} has {tensor.shape[1]} columns, {tensor.type_name} needs whole blocks"
            )
    parts = []
    for type_name, group in groupby(tensors, key=lambda tensor: tensor.type_name):
        members = list(group)
        if ctx.gpu.launcher is None and type_name in BLOCKS:
            parts.append(_decode(ctx, members))
            continue
        uploads = [ctx.gpu.upload(tensor) for tensor in members]
        if len(uploads) > 1:
            uploads = [Upload(mx.concatenate([upload.array for upload in uploads]))]
            mx.eval(uploads[0].array)
        parts.append(Part(type_name, sum(tensor.shape[0] for tensor in members), uploads[0]))
    bias = _join_biases(ctx, tensors, biases)
    return (parts, bias), sum(part.upload.array.nbytes for part in parts) + (0 if bias is None else bias.nbytes)


def linear(ctx: Context, x: Any, weight: LinearWeight) -> Any:
    """x Wᵀ + b; x in any float type, the result in the type of the activations."""
    mx, gpu = ctx.gpu.mx, ctx.gpu
    parts, bias = weight.payload
    if not x.shape[0]:
        return mx.zeros((0, weight.out_features), gpu.activations)
    few = x.shape[0] <= MAX_ROWS
    if few and len(parts) <= 2 and all(part.type_name in BLOCKS for part in parts):
        return multiply_blocks(ctx, x, parts, bias)
    outputs = []
    for part in parts:
        if part.type_name not in BLOCKS:
            outputs.append(_multiply_floats(ctx, x, part.upload.array))
        elif few:
            outputs.append(multiply_blocks(ctx, x, [part], None))
        else:
            outputs += _multiply_tiles(ctx, x, part)
    result = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=1)
    if bias is not None:
        result = result + bias
    return result.astype(gpu.activations)


def multiply_blocks(ctx: Context, x: Any, parts: Sequence[Part], bias: Any) -> Any:
    """One launch for one or two parts, straight from their blocks."""
    gpu = ctx.gpu
    tokens, columns = x.shape
    first, second = parts[0], parts[-1]
    rows = first.rows, (second.rows if len(parts) == 2 else 0)
    per_group = 2 if sum(rows) >= MANY_OUTPUTS else 1
    width = next(width for width in (1, 2, 4, 8) if width >= min(tokens, MAX_ROWS))
    places = sum(-(-count // per_group) for count in rows)
    sizes = gpu.launcher.numbers(columns, tokens, *rows)
    constants = {
        "TYPE_A": BLOCKS[first.type_name][0],
        "TYPE_B": BLOCKS[second.type_name][0],
        "ROWS": per_group,
        "T": width,
        "BIAS": int(bias is not None),
    }
    (out,) = gpu.launcher.launch(
        ROWS,
        [x, first.upload.array, second.upload.array, gpu.launcher.numbers(0.0) if bias is None else bias, sizes],
        groups=(-(-places // SIMD_GROUPS), -(-tokens // width), 1),
        threads=32 * SIMD_GROUPS,
        outputs=[((tokens, sum(rows)), gpu.activations)],
        constants=constants,
        types={"X": x.dtype, "Y": gpu.activations},
    )
    return out


def expand_blocks(ctx: Context, upload: Upload, type_name: str, columns: int, rows: range, kind: Any) -> Any:
    """Rows of quantised weights as plain numbers of type `kind`, (rows, columns)."""
    sizes = ctx.gpu.launcher.numbers(columns, len(rows), rows.start)
    return _launch_expand(ctx, upload, type_name, sizes, sizes, (len(rows), columns), kind, pick=0)


def pick_blocks(ctx: Context, upload: Upload, type_name: str, columns: int, ids: Any, kind: Any) -> Any:
    """The rows that `ids` names as plain numbers, (ids, columns)."""
    sizes = ctx.gpu.launcher.numbers(columns, ids.shape[0])
    return _launch_expand(ctx, upload, type_name, ids, sizes, (ids.shape[0], columns), kind, pick=1)


def _launch_expand(
    ctx: Context, upload: Upload, type_name: str, ids: Any, sizes: Any, shape: tuple[int, int], kind: Any, pick: int
) -> Any:
    (out,) = ctx.gpu.launcher.launch(
        EXPAND,
        [upload.array, ids, sizes],
        groups=(-(-shape[0] // SIMD_GROUPS), 1, 1),
        threads=32 * SIMD_GROUPS,
        outputs=[(shape, kind)],
        constants={"TYPE_A": BLOCKS[type_name][0], "PICK": pick},
        types={"Y": kind},
    )
    return out


def _multiply_tiles(ctx: Context, x: Any, part: Part) -> list[Any]:
    mx = ctx.gpu.mx
    kind = mx.bfloat16 if ctx.gpu.narrow else mx.float32
    inputs, columns = x.astype(kind), x.shape[1]
    step = max(1, TILE_BYTES // (columns * kind.size))
    outputs = []
    for start in range(0, part.rows, step):
        rows = range(start, min(start + step, part.rows))
        outputs.append(inputs @ expand_blocks(ctx, part.upload, part.type_name, columns, rows, kind).T)
    return outputs


def _multiply_floats(ctx: Context, x: Any, matrix: Any) -> Any:
    if ctx.gpu.narrow:
        return x.astype(matrix.dtype) @ matrix.T
    return x.astype(ctx.gpu.mx.float32) @ matrix.T.astype(ctx.gpu.mx.float32)


def _decode(ctx: Context, tensors: Sequence[TensorSource]) -> Part:
    matrix = np.concatenate([tensor.to_float32() for tensor in tensors])
    for tensor in tensors:
        tensor.release()
    array = ctx.gpu.mx.array(matrix)
    ctx.gpu.mx.eval(array)
    return Part("f32", len(matrix), Upload(array))


def _join_biases(ctx: Context, tensors: Sequence[TensorSource], biases: Sequence[FloatArray | None] | None) -> Any:
    if biases is None or all(bias is None for bias in biases):
        return None
    vectors = [
        np.zeros(tensor.shape[0], np.float32) if bias is None else bias
        for tensor, bias in zip(tensors, biases, strict=True)
    ]
    joined = ctx.gpu.mx.array(np.concatenate(vectors))
    ctx.gpu.mx.eval(joined)
    return joined
