"""Blocks as plain numbers: all of a weight for products of many rows, and single rows of a table.

Products: quantised weights are expanded a piece at a time into one scratch array, and MLX multiplies.

However far MLX's evaluation runs ahead, there is never more than that array: each launch that fills it waits for the
product before, and each product for the launch, through arrays that MLX knows. (What is written in place it does not
know.) So the launch also makes zeros, which the product adds, and takes the product before as an input.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mlxr.kernels.context import Context
from mlxr.kernels.gpu.device import Gpu, Upload
from mlxr.kernels.gpu.kernel import Kernel, name_type
from mlxr.kernels.gpu.launcher import SHORT_NAMES
from mlxr.kernels.linear.parts import LAYOUTS, TYPE_NAMES
from mlxr.kernels.tensor import DeviceArray, NumberType, TensorSource

SCRATCH_BYTES = 512 * 2**20
PIECE_ROWS = (
    256  # pieces of large weights are multiples of it: the library is slow where rows of results are not aligned
)
THREADS, GROUPS = 256, 1056  # eight threadgroups for each of an H200's multiprocessors
SIMD_GROUPS = 4  # of a threadgroup that picks rows, one row each
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
    """x (tokens, columns) times all rows of some weights, each (number of its type, rows, planes): (tokens, rows)."""
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
            after = _fill(gpu, number, columns, [planes, mx.flatten(after)[:8].view(mx.uint8), scratch, sizes], count)
            place += stop - start
        outputs.append(_multiply(gpu, after, x, scratch[: count * columns].reshape(count, columns)))
        gpu.last_expanded = outputs[-1]
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=1)


def cut_rows(rows: Sequence[int], most: int) -> list[list[tuple[int, int, int]]]:
    """Rows of weights that lie behind one another, at most so many at a time: each (weight, first row, end)."""
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
    """The product waits for what made the zeros, as it adds them to every row, which costs nothing."""
    return gpu.watch.run_mlx("linear", name_product(matrix), lambda: gpu.mx.addmm(zeros, x, matrix.T), x, matrix)


def name_product(matrix: DeviceArray) -> str:
    """What the ledger calls MLX's product with a matrix."""
    kind = name_type(matrix.dtype)
    return f"matmul {SHORT_NAMES.get(kind, kind)}"


def pick_blocks(ctx: Context, upload: Upload, table: TensorSource, ids: DeviceArray, kind: NumberType) -> DeviceArray:
    """The rows of an uploaded table that `ids` names as plain numbers, (ids, columns)."""
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
