"""Low-rank updates of a product (LoRA, Hu et al. 2021, arXiv:2106.09685): y += scale * B (A x), for chosen rows.

They are added in f32 after the product with the unchanged weight. On the CPU the sums of a row have one order, so its
bits do not depend on other rows, their adapters, threads and instruction sets. Matrices are kept in 16 bits if that is
exact, and multiplied as f32.
"""

# ruff: noqa: ARG001 -- every implementation takes the context
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mlxr.core.frozen import frozen
from mlxr.kernels.checks import check_floats, check_ints, check_size, refuse
from mlxr.kernels.choice import REFERENCE, Choice
from mlxr.kernels.context import Context
from mlxr.kernels.linear import LinearWeight
from mlxr.kernels.native import NativeAdapter, NativeUpdates
from mlxr.kernels.tensor import BFLOAT16, FloatArray, IntArray

MAX_RANK = 256
Numbers = npt.NDArray[Any]  # f32, f16, or bf16 as uint16


@frozen(eq=False)
class LoraPart:
    """The update of a weight's outputs from `first` on: `a` (rank, in_features), `b` (outputs, rank), both float32."""

    first: int
    a: FloatArray
    b: FloatArray
    scale: float


@frozen(eq=False)
class TablePart:
    """The update of an embedding table: row i gets scale * rows[i] b.

    `rows` (vocabulary, rank) and `b` (rank, columns) are float32.
    """

    rows: FloatArray
    b: FloatArray
    scale: float


Parts = Mapping[LinearWeight, Sequence[LoraPart]]


@frozen(eq=False)
class AdapterWeights:
    """The updates of an adapter, ready to be added: `weights` are those that it updates.

    `looked_up` (vocabulary, rank) are the rows of a table's update, or None; only the implementation that made
    `payload` knows what it is; `nbytes` are the bytes of all in memory.
    """

    weights: frozenset[LinearWeight]
    looked_up: Numbers | None
    payload: Any
    nbytes: int


@frozen(eq=False)
class AdapterRows:
    """The `rows` (n,) of a batch, int32 and ascending, that one adapter updates; updates are multiplied by `factor`."""

    rows: IntArray
    updates: AdapterWeights
    factor: float = 1.0

    def multiply(self, scale: float) -> float:
        """Return the factor times the scale of an update, computed in f32."""
        return float(np.float32(scale) * np.float32(self.factor))

    def look_up(self, token_ids: IntArray) -> FloatArray | None:
        """Return the table update's numbers (n, rank) for these rows of `token_ids`; None without such an update."""
        table = self.updates.looked_up
        return None if table is None else widen(table[token_ids[self.rows]])


def prepare(ctx: Context, parts: Parts, table: TablePart | None = None) -> AdapterWeights:
    """Lay out the updates of weights, and of the embedding table, for the device.

    Raises ValueError for shapes that do not fit and for ranks above MAX_RANK.
    """
    for weight, own in parts.items():
        for part in own:
            _check(weight, part)
    if table is not None:
        check_floats("lora", "rows of the table", table.rows, 2)
        check_floats("lora", "b of the table", table.b, 2)
        check_size("lora", "ranks of the table", table.rows.shape[1], _check_rank(table.b.shape[0]))
    _, implementation = PREPARE.pick(ctx.device)
    looked_up = None if table is None else narrow(table.rows)[0]
    payload, nbytes = implementation(ctx, parts, table)
    return AdapterWeights(frozenset(parts), looked_up, payload, nbytes + (0 if looked_up is None else looked_up.nbytes))


def list_rows(ranges: Sequence[tuple[int, int]]) -> IntArray:
    """Return all rows of the ascending ranges [first, last)."""
    return np.concatenate([np.arange(first, last, dtype=np.int32) for first, last in ranges])


def choose_rows(adapters: Sequence[AdapterRows], chosen: IntArray) -> list[AdapterRows]:
    """Return the adapters of only the `chosen` rows, by index in `chosen`; adapters without any are left out."""
    placed = [(np.flatnonzero(np.isin(chosen, one.rows)).astype(np.int32), one) for one in adapters]
    return [replace(one, rows=rows) for rows, one in placed if len(rows)]


def narrow(*matrices: FloatArray) -> list[Numbers]:
    """Return the matrices in the narrowest type that holds all numbers exactly: bf16 (as uint16), f16 or f32."""
    words = [np.ascontiguousarray(matrix, np.float32).view(np.uint32) for matrix in matrices]
    if not any((word & 0xFFFF).any() for word in words):
        return [(word >> 16).astype(BFLOAT16) for word in words]
    with np.errstate(over="ignore", under="ignore"):
        halves = [matrix.astype(np.float16) for matrix in matrices]
    if all(np.array_equal(half.astype(np.float32), matrix) for half, matrix in zip(halves, matrices, strict=True)):
        return [*halves]
    return [np.ascontiguousarray(matrix, np.float32) for matrix in matrices]


def widen(numbers: Numbers) -> FloatArray:
    """Widen the numbers that `narrow` made to float32."""
    if numbers.dtype == BFLOAT16:
        return (numbers.astype(np.uint32) << 16).view(np.float32)
    return np.ascontiguousarray(numbers, np.float32)


def add_lora(
    ctx: Context, x: FloatArray, out: FloatArray, weight: LinearWeight, adapters: Sequence[AdapterRows]
) -> FloatArray:
    """Return `out` (T, out_features), the product of x (T, in_features), with adapters' updates added to their rows.

    The memory of `out` may be overwritten. A row may have several adapters, whose updates are added in order. Raises
    ValueError for shapes that do not fit.
    """
    chosen = [one for one in adapters if weight in one.updates.weights]
    if not chosen:
        return out
    for one in chosen:
        check_ints("lora", "rows", one.rows)
    check_size("lora", "columns of x", x.shape[1], weight.in_features)
    check_size("lora", "columns of out", out.shape[1], weight.out_features)
    name, implementation = ADD.pick(ctx.device)
    if name == REFERENCE:
        ctx.ledger.count("lora", name, "f32")
    return implementation(ctx, x, out, weight, chosen)


def add_lora_rows(ctx: Context, token_ids: IntArray, out: FloatArray, adapters: Sequence[AdapterRows]) -> FloatArray:
    """Return `out` (T, columns), the embeddings of `token_ids` (T,), with the table's updates; else as `add_lora`."""
    chosen = [(one, looked_up) for one in adapters if (looked_up := one.look_up(token_ids)) is not None]
    if not chosen:
        return out
    name, implementation = ADD_ROWS.pick(ctx.device)
    if name == REFERENCE:
        ctx.ledger.count("lora", name, "f32")
    return implementation(ctx, out, chosen)


def _check(weight: LinearWeight, part: LoraPart) -> None:
    check_floats("lora", "a", part.a, 2)
    check_floats("lora", "b", part.b, 2)
    check_size("lora", "columns of a", part.a.shape[1], weight.in_features)
    check_size("lora", "ranks of b", part.b.shape[1], _check_rank(part.a.shape[0]))
    outputs = part.b.shape[0]
    if part.first < 0 or part.first + outputs > weight.out_features:
        refuse("lora", "outputs", f"{outputs} from {part.first} on", f"within {weight.out_features}")


def _check_rank(rank: int) -> int:
    if not 1 <= rank <= MAX_RANK:
        refuse("lora", "rank", rank, f"1 to {MAX_RANK}")
    return rank


def _prepare_reference(ctx: Context, parts: Parts, table: TablePart | None) -> tuple[Any, int]:
    """Return the parts unchanged, and their bytes."""
    matrices = [matrix for own in parts.values() for part in own for matrix in (part.a, part.b)]
    return (dict(parts), table), sum(matrix.nbytes for matrix in [*matrices, *([] if table is None else [table.b])])


def _add_lora_reference(
    ctx: Context, x: FloatArray, out: FloatArray, weight: LinearWeight, adapters: Sequence[AdapterRows]
) -> FloatArray:
    """Add update after update, row after row, so that a row's bits do not depend on the number of rows."""
    for one in adapters:
        for part in one.updates.payload[0][weight]:
            columns = slice(part.first, part.first + part.b.shape[0])
            for row in one.rows:
                out[row, columns] += (part.b @ (part.a @ x[row])) * np.float32(one.multiply(part.scale))
    return out


def _add_lora_rows_reference(
    ctx: Context, out: FloatArray, adapters: Sequence[tuple[AdapterRows, FloatArray]]
) -> FloatArray:
    """Add a table's updates row after row."""
    for one, looked_up in adapters:
        table = one.updates.payload[1]
        for row, numbers in zip(one.rows, looked_up, strict=True):
            out[row] += (numbers @ table.b) * np.float32(one.multiply(table.scale))
    return out


def _prepare_native(ctx: Context, parts: Parts, table: TablePart | None) -> tuple[NativeAdapter, int]:
    """Return the native adapter, which has the matrices in tiles and keeps the weights alive, and its bytes."""
    native = ctx.module.Adapter()
    for weight, own in parts.items():
        for part in own:
            a, b = narrow(part.a, np.ascontiguousarray(part.b.T))
            native.append(weight.payload, part.first, a, b, part.scale)
    if table is not None:
        (looked_up,) = narrow(np.ascontiguousarray(table.b))
        native.append_table(looked_up, table.scale)
    return native, native.nbytes


def list_native(adapters: Sequence[AdapterRows], token_ids: IntArray | None = None) -> NativeUpdates:
    """Return adapters and their rows as native calls take them, with the table's rows for `token_ids`."""
    looked_up = [None if token_ids is None else one.look_up(token_ids) for one in adapters]
    return [(one.updates.payload, one.rows, one.factor, own) for one, own in zip(adapters, looked_up, strict=True)]


def _add_lora_native(
    ctx: Context, x: FloatArray, out: FloatArray, weight: LinearWeight, adapters: Sequence[AdapterRows]
) -> FloatArray:
    """Add to `out` in place."""
    ctx.module.lora(ctx.native, weight.payload, list_native(adapters), x, out)
    return out


def _add_lora_rows_native(
    ctx: Context, out: FloatArray, adapters: Sequence[tuple[AdapterRows, FloatArray]]
) -> FloatArray:
    """Add to `out` in place."""
    native = [(one.updates.payload, one.rows, one.factor, looked_up) for one, looked_up in adapters]
    ctx.module.lora_table(ctx.native, native, out)
    return out


GPU = f"{__name__}.gpu"
PREPARE = Choice("lora", _prepare_reference, _prepare_native, GPU, "prepare")
ADD = Choice("lora", _add_lora_reference, _add_lora_native, GPU, "add_lora")
ADD_ROWS = Choice("lora", _add_lora_rows_reference, _add_lora_rows_native, GPU, "add_lora_rows")
