"""Low-rank updates on a GPU, in two launches each: one multiplies rows by A, one by B and adds the result.

Steps with adapters are not recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mlxr.core.frozen import frozen
from mlxr.kernels.context import Context
from mlxr.kernels.gpu.deferred import settle
from mlxr.kernels.gpu.kernel import LANES, Kernel
from mlxr.kernels.gpu.launcher import MIN_ARRAY
from mlxr.kernels.linear import LinearWeight
from mlxr.kernels.lora import AdapterRows, Numbers, Parts, TablePart, narrow
from mlxr.kernels.tensor import BFLOAT16, DeviceArray, FloatArray, IntArray

THREADS = 256
REDUCE = Kernel("lora_reduce", Path(__file__).parent, "reduce.body", ("x", "rows", "a", "sizes"), ("reduced",))
EXPAND = Kernel(
    "lora_expand",
    Path(__file__).parent,
    "expand.body",
    ("product", "reduced", "places", "b", "scale", "sizes"),
    ("out",),
)
KERNELS = (REDUCE, EXPAND)


@frozen(eq=False)
class Matrices:
    """An update on the device: `a` (rank, in_features), None for a table; `b` (rank, outputs), outputs from `first`."""

    first: int
    a: DeviceArray | None
    b: DeviceArray
    scale: float


@frozen(eq=False)
class Updates:
    """The updates of each weight, and of the embedding table."""

    parts: dict[LinearWeight, list[Matrices]]
    table: Matrices | None


def prepare(ctx: Context, parts: Parts, table: TablePart | None) -> tuple[Updates, int]:
    """Copy all matrices to the device; return them and their bytes."""
    placed: dict[LinearWeight, list[Matrices]] = {weight: [] for weight in parts}
    for weight, own in parts.items():
        for part in own:
            a, b = (_place(ctx, one) for one in narrow(part.a, np.ascontiguousarray(part.b.T)))
            placed[weight].append(Matrices(part.first, a, b, part.scale))
    held = None
    if table is not None:
        held = Matrices(0, None, _place(ctx, narrow(np.ascontiguousarray(table.b))[0]), table.scale)
    every = [matrix for own in placed.values() for one in own for matrix in (one.a, one.b) if matrix is not None]
    return Updates(placed, held), sum(matrix.nbytes for matrix in [*every, *([] if held is None else [held.b])])


def add_lora(
    ctx: Context, x: DeviceArray, out: DeviceArray, weight: LinearWeight, adapters: Sequence[AdapterRows]
) -> DeviceArray:
    """Add the updates; each makes a new array."""
    x, out = settle(x), settle(out)
    for one in adapters:
        for matrices in one.updates.payload.parts[weight]:
            out = _expand(ctx, out, one, _reduce(ctx, x, one.rows, matrices.a), matrices)
    return out


def add_lora_rows(ctx: Context, out: DeviceArray, adapters: Sequence[tuple[AdapterRows, FloatArray]]) -> DeviceArray:
    """Add the updates of the table; each adapter makes a new array."""
    out = settle(out)
    for one, looked_up in adapters:
        out = _expand(ctx, out, one, ctx.gpu.mx.array(looked_up), one.updates.payload.table)
    return out


def _place(ctx: Context, numbers: Numbers) -> DeviceArray:
    array = ctx.gpu.mx.array(numbers)
    return array.view(ctx.gpu.mx.bfloat16) if numbers.dtype == BFLOAT16 else array


def _reduce(ctx: Context, x: DeviceArray, rows: IntArray, a: DeviceArray) -> DeviceArray:
    """Return the chosen rows of x times A, (n, rank) in f32."""
    gpu, mx, ranks = ctx.gpu, ctx.gpu.mx, a.shape[0]
    placed = mx.array(np.pad(rows, (0, max(0, MIN_ARRAY - len(rows)))))
    if gpu.launcher is None:
        return gpu.watch.run_mlx(
            "lora", "reduce", lambda: x[placed[: len(rows)]].astype(mx.float32) @ a.astype(mx.float32).T, x, placed
        )
    (reduced,) = gpu.launcher.launch(
        REDUCE,
        [x, placed, a, gpu.launcher.numbers(x.shape[1], ranks)],
        groups=(-(-ranks * LANES // THREADS), len(rows), 1),
        threads=THREADS,
        outputs=[((len(rows), ranks), mx.float32)],
    )
    return reduced


def _expand(
    ctx: Context, product: DeviceArray, one: AdapterRows, reduced: DeviceArray, matrices: Matrices
) -> DeviceArray:
    """Return `product` with the update added to its rows, in its type."""
    gpu, mx, rows, scale = ctx.gpu, ctx.gpu.mx, one.rows, one.multiply(matrices.scale)
    (count, columns), (ranks, made) = product.shape, matrices.b.shape
    if gpu.launcher is None:

        def compose() -> DeviceArray:
            added = (reduced @ matrices.b.astype(mx.float32)) * scale
            chosen = product.astype(mx.float32).at[mx.array(rows), matrices.first : matrices.first + made]
            return chosen.add(added).astype(product.dtype)

        return gpu.watch.run_mlx("lora", "expand", compose, product, reduced)
    places = np.full(max(count, MIN_ARRAY), -1, np.int32)
    places[rows] = np.arange(len(rows), dtype=np.int32)
    (out,) = gpu.launcher.launch(
        EXPAND,
        [
            product,
            reduced,
            mx.array(places),
            matrices.b,
            gpu.launcher.numbers(scale),
            gpu.launcher.numbers(columns, matrices.first, made, ranks),
        ],
        groups=(-(-columns // THREADS), count, 1),
        threads=THREADS,
        outputs=[((count, columns), product.dtype)],
        types={"Y": product.dtype},
    )
    return out
