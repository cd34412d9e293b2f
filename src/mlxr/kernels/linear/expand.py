"""Blocks as plain numbers: all of a weight for products of many rows, and single rows of a table.

Products: quantised weights are expanded a piece at a time into one scratch array, and MLX multiplies.

However far MLX's evaluation runs ahead, there is never more than that array: each launch that fills it waits for the
product before, and each product for the launch, through arrays that MLX knows. (What is written in place it does not
know.) So the launch also makes the operand, and takes the product before as an input.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlxr.kernels.context import Context
from mlxr.kernels.gpu.device import Upload
from mlxr.kernels.gpu.kernel import Kernel, name_type
from mlxr.kernels.gpu.watch import SHORT_NAMES
from mlxr.kernels.linear.parts import LAYOUTS, TYPE_NAMES
from mlxr.kernels.tensor import TensorSource

SCRATCH_BYTES = 256 * 2**20
THREADS, GROUPS = 256, 1056  # eight threadgroups for each of an H200's multiprocessors
SIMD_GROUPS = 4  # of a threadgroup that picks rows, one row each
BLOCK_HEADERS = ("runs.h", "k_blocks.h", "blocks.h")  # in this order: what blocks of weights are made of
FILL = Kernel(
    "linear_fill",
    Path(__file__).parent,
    "scratch.body",
    ("weights", "x", "after", "scratch", "sizes"),
    ("operand",),
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


def multiply_expanded(gpu: Any, x: Any, number: int, rows: int, planes: Any) -> list[Any]:
    """x (tokens, columns) times all rows of a weight, piece after piece; `number` is that of its type."""
    mx = gpu.mx
    kind = mx.bfloat16 if gpu.narrow else mx.float32
    tokens, columns = x.shape
    step = max(1, min(rows, SCRATCH_BYTES // (columns * kind.size)))
    outputs: list[Any] = []
    for start in range(0, rows, step):
        count = min(step, rows - start)
        scratch = gpu.reserve(step * columns, kind)
        after = x if gpu.last_expanded is None else gpu.last_expanded
        (operand,) = gpu.launcher.launch(
            FILL,
            [
                planes,
                x,
                mx.flatten(after)[:8].view(mx.uint8),
                scratch,
                gpu.launcher.numbers(columns, count, start, rows, tokens * columns),
            ],
            groups=(GROUPS if gpu.launcher.is_lazy else 1, 1, 1),
            threads=THREADS,
            outputs=[((tokens, columns), kind)],
            constants={"TYPE_A": number, "GROUPS": GROUPS if gpu.launcher.is_lazy else 1},
            types={"Y": kind},
        )
        matrix = scratch[: count * columns].reshape(count, columns)
        outputs.append(_multiply(gpu, operand, matrix))
        gpu.last_expanded = outputs[-1]
    return outputs


def _multiply(gpu: Any, operand: Any, matrix: Any) -> Any:
    return gpu.watch.run_mlx("linear", name_product(matrix), lambda: operand @ matrix.T, operand, matrix)


def name_product(matrix: Any) -> str:
    """What the ledger calls MLX's product with a matrix."""
    kind = name_type(matrix.dtype)
    return f"matmul {SHORT_NAMES.get(kind, kind)}"


def pick_blocks(ctx: Context, upload: Upload, table: TensorSource, ids: Any, kind: Any) -> Any:
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
