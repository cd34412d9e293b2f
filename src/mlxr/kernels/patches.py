"""Pictures and sounds as an encoder's input: patches and frames, their positions, and their batch.

On processors all of it is NumPy, as it takes little time. On a GPU, MLX's operations of the same names compute the rows
of pictures; positions of patches, and sounds, are computed on the host.

Patches are in the order of squares: a grid is cut into squares of `merge` x `merge` patches, and the patches of a
square, which become one row in the end, follow one another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from mlxr.core.frozen import frozen
from mlxr.kernels.arrays import hold, widen
from mlxr.kernels.context import Context
from mlxr.kernels.linear import LinearWeight, linear
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.sources import Decoded
from mlxr.kernels.tensor import FloatArray, IntArray, PoolArray

Pixels = npt.NDArray[np.uint8]  # (height, width, colours)
Moved = TypeVar("Moved", FloatArray, IntArray)


def make_shades(mean: Sequence[float], deviation: Sequence[float]) -> FloatArray:
    """Return the value of each of 256 shades of each colour, (256, colours): (shade / 255 - mean) / deviation."""
    shades = np.arange(256, dtype=np.float32)[:, None] * np.float32(1 / 255)
    table = np.empty((256, len(mean)), np.float32)
    table[:] = (shades - np.array(mean, np.float32)) / np.array(deviation, np.float32)
    return table


def order_patches(grid: tuple[int, int], merge: int) -> tuple[IntArray, IntArray]:
    """Return the row and column of each patch, in the order of the squares."""
    axes = []
    for axis in np.indices(grid, dtype=np.int32):
        parted = axis.reshape(grid[0] // merge, merge, grid[1] // merge, merge)
        axes.append(np.ascontiguousarray(parted.transpose(0, 2, 1, 3)).reshape(-1))
    return axes[0], axes[1]


def cut_patches(ctx: Context, pixels: Pixels, shades: FloatArray, patch: int, merge: int) -> FloatArray:
    """Return the patches (N, colours * patch * patch) of a picture, in the order of the squares."""
    height, width, colours = pixels.shape
    rows, columns = height // (patch * merge), width // (patch * merge)
    split, order = (rows, merge, patch, columns, merge, patch, colours), (0, 3, 1, 4, 6, 2, 5)
    shape = rows * columns * merge**2, colours * patch**2
    if ctx.gpu is not None:  # which gets the pixels, a quarter of the bytes
        mx = ctx.gpu.mx
        cut = mx.array(pixels.reshape(split)).transpose(*order).astype(mx.int32) * colours
        numbered: Any = cut + mx.arange(colours)[:, None, None]
        shaded: Any = mx.take(ctx.gpu.hold(shades).reshape(-1), numbered.reshape(-1))
        return shaded.reshape(shape)  # type: ignore[no-any-return]
    patches = np.empty(shape, np.float32)
    picked = np.take_along_axis(shades, pixels.reshape(-1, colours), axis=0)
    patches[:] = picked.reshape(split).transpose(order).reshape(shape)
    return patches


def pick_positions(table: FloatArray, rows: IntArray, columns: IntArray) -> FloatArray:
    """Return the positions (N, hidden) of patches at these rows and columns in a table of a square (side * side,
    hidden)."""
    return np.ascontiguousarray(table[rows * round(len(table) ** 0.5) + columns])


def resize_positions(table: FloatArray, grid: tuple[int, int], rows: IntArray, columns: IntArray) -> FloatArray:
    """Return the positions (N, hidden) of patches, from a table of a square (side * side, hidden) resized to the grid.

    It is resized like a picture: linearly, over as many rows and columns of the table as become one.
    """
    side = round(len(table) ** 0.5)
    made = table.reshape(side, side, -1)
    for axis, count in enumerate(grid):
        step = np.float32(side) / np.float32(count)
        centres = (np.arange(count, dtype=np.float32) + np.float32(0.5)) * step - np.float32(0.5)
        away = np.abs(np.arange(side, dtype=np.float32) - centres[:, None]) / max(step, np.float32(1))
        weights = np.maximum(np.float32(1) - away, np.float32(0))
        weights = weights / weights.sum(axis=1, keepdims=True)
        lines = np.moveaxis(made, axis, 0)
        total = np.zeros((count, *lines.shape[1:]), np.float32)
        for line in range(side):  # one after another, so that the bits are the same everywhere
            total += weights[:, line, None, None] * lines[line]
        made = np.moveaxis(total, 0, axis)
    return np.ascontiguousarray(made[rows, columns])


def sample_positions(table: FloatArray, grid: tuple[int, int], rows: IntArray, columns: IntArray) -> FloatArray:
    """Return the positions (N, hidden) of patches, sampled from a table of a square (side * side, hidden) by cubic
    curves (Keys, with -0.75) through the four nearest rows and columns of each patch."""
    side = round(len(table) ** 0.5)
    square = table.reshape(side, side, -1)
    axes = []
    for count, places in zip(grid, (rows, columns), strict=True):
        exact = (places.astype(np.float64) + 0.5) * side / count - 0.5
        low = np.floor(exact)
        away = np.abs(exact[:, None] - low[:, None] - np.arange(-1, 3))
        near = (1.25 * away - 2.25) * away**2 + 1
        far = ((-0.75 * away + 3.75) * away - 6) * away + 3
        taps = np.clip(low[:, None] + np.arange(-1, 3), 0, side - 1).astype(np.int32)
        axes.append((taps, np.where(away <= 1, near, far).astype(np.float32)[:, :, None]))
    (down, shares_down), (across, shares_across) = axes
    total = np.zeros((len(rows), square.shape[2]), np.float32)
    for row in range(4):  # one after another, so that the bits are the same everywhere
        line = np.zeros_like(total)
        for column in range(4):
            line += square[down[:, row], across[:, column]] * shares_across[:, column]
        total += line * shares_down[:, row]
    return total


def join_neighbours(ctx: Context, x: FloatArray, count: int, *, by_columns: bool) -> FloatArray:
    """Return x (N, columns) as rows (N / count, count * columns): neighbours one after another, or column by column."""
    parts = widen(ctx, x).reshape(x.shape[0] // count, count, -1)
    return (parts.transpose(0, 2, 1) if by_columns else parts).reshape(parts.shape[0], -1)


def sum_neighbours(ctx: Context, x: FloatArray, count: int) -> FloatArray:
    """Return the sums (N / count, columns) of each `count` neighbouring rows of x (N, columns), added in order."""
    parts = widen(ctx, x).reshape(x.shape[0] // count, count, -1)
    total: FloatArray = parts[:, 0]
    for part in range(1, count):
        total = total + parts[:, part]
    return total


def shift_columns(ctx: Context, x: FloatArray, weight: FloatArray, bias: FloatArray) -> FloatArray:
    """Return (x - bias) * weight: x (N, columns), bias and weight (columns,)."""
    shifted: FloatArray = (widen(ctx, x) - hold(ctx, bias)) * hold(ctx, weight)
    return shifted


def blend_positions(table: FloatArray, grid: tuple[int, int], rows: IntArray, columns: IntArray) -> FloatArray:
    """Return the positions (N, hidden) of patches at these rows and columns, from a table of a square (side * side,
    hidden).

    Each is a bilinear blend of the four entries around it; the corners of the grid are those of the square.
    """
    side = round(len(table) ** 0.5)
    square = table.reshape(side, side, -1)
    axes = []
    for count, places in ((grid[0], rows), (grid[1], columns)):
        exact = (np.linspace(0, side - 1, count) if count > 1 else np.zeros(1)).astype(np.float32)[places]
        low = exact.astype(np.int32)
        axes.append((low, np.minimum(low + 1, side - 1), (exact - low.astype(np.float32))[:, None]))
    (top, bottom, down), (left, right, across) = axes
    one = np.float32(1)
    upper = square[top, left] * ((one - down) * (one - across)) + square[top, right] * ((one - down) * across)
    lower = square[bottom, left] * (down * (one - across)) + square[bottom, right] * (down * across)
    blended: FloatArray = upper + lower
    return blended


def order_windows(grid: tuple[int, int], side: int) -> tuple[IntArray, list[int]]:
    """Return the squares of a grid in the order of windows of `side` x `side` squares, and the squares of each window.

    Windows at the lower and the right edge are cut off there.
    """
    places = np.arange(grid[0] * grid[1], dtype=np.int32).reshape(grid)
    firsts = [(row, column) for row in range(0, grid[0], side) for column in range(0, grid[1], side)]
    windows = [places[row : row + side, column : column + side].reshape(-1) for row, column in firsts]
    return np.concatenate(windows), [len(window) for window in windows]


def move_squares(ctx: Context, array: Moved, order: IntArray, merge: int) -> Moved:
    """Return the rows of patches with their squares put into this order."""
    squares = array.reshape(len(order), merge**2, -1)
    if isinstance(array, np.ndarray):
        return np.ascontiguousarray(squares[order]).reshape(array.shape)
    moved: Any = ctx.gpu.mx.take(squares, ctx.gpu.mx.array(order), axis=0)
    return moved.reshape(array.shape)


def restore_squares(rows: FloatArray, order: IntArray) -> FloatArray:
    """Undo `order` for rows of squares on the host."""
    return np.ascontiguousarray(rows[np.argsort(order)])


def add_token(ctx: Context, x: FloatArray, token: FloatArray) -> FloatArray:
    """Return the patches and, after them, the row `token`."""
    return join_rows(ctx, [widen(ctx, x), hold(ctx, token)[None]])


def sum_axes(table: FloatArray, rows: IntArray, columns: IntArray) -> FloatArray:
    """Return positions (N, hidden) from a table whose first half is for columns and whose second is for rows."""
    both: FloatArray = table[columns] + table[rows + np.int32(len(table) // 2)]
    return both


def batch_parts(lengths: Sequence[int], page_size: int) -> RaggedBatch:
    """Return a batch of whole sequences of these lengths, each in its own pages, from page 0 on.

    Its rotation tables have a row for each token of the batch.
    """
    counts = np.array(lengths, np.int32)
    ends = np.concatenate([np.zeros(1, np.int32), np.cumsum(counts, dtype=np.int32)])
    pages = -(-counts // np.int32(page_size))
    firsts = np.concatenate([np.zeros(1, np.int32), np.cumsum(pages, dtype=np.int32)])
    steps = np.arange(pages.max(), dtype=np.int32)
    table = np.where(steps < pages[:, None], firsts[:-1, None] + steps, np.int32(-1))
    rows = np.arange(ends[-1], dtype=np.int32)
    places = rows - np.repeat(ends[:-1], counts)
    slots = places + np.repeat(firsts[:-1], counts) * np.int32(page_size)
    batch = RaggedBatch(np.zeros_like(rows), places, slots, ends, counts, table, rows)
    return batch.with_pictures(None, np.stack([rows] * 3))


def cut_batch(batch: RaggedBatch, first: int, last: int) -> RaggedBatch:
    """Return tokens [first, last) of a batch of `batch_parts`, each with its rotation.

    They are the last tokens of their sequences there, so that each sees all of its sequence.
    """
    bounds = np.unique(np.clip(batch.query_starts, first, last))
    owners = np.searchsorted(batch.query_starts, bounds[:-1], side="right") - 1
    starts, lengths = (bounds - first).astype(np.int32), batch.context_lengths[owners]
    rows = np.arange(last - first, dtype=np.int32)
    places = rows + np.repeat(lengths - starts[1:], np.diff(starts))
    slots, table = batch.slots[first:last], batch.page_table[owners]
    cut = RaggedBatch(np.zeros_like(rows), places, slots, starts, lengths, table, rows)
    return cut.with_pictures(None, np.stack([rows + np.int32(first)] * 3))


def make_ones(count: int) -> FloatArray:
    """Return a weight of ones, which changes nothing."""
    return np.ones(count, np.float32)


Range = tuple[float, float]


@frozen(eq=False)
class Ranges:
    """Bounds of a product: each part's input is clipped to `inputs` (parts, 2) and its result to `outputs` (2,
    columns), which is then multiplied by `scale` (columns,), if there is one."""

    inputs: FloatArray
    outputs: FloatArray
    scale: FloatArray | None = None

    @classmethod
    def of(
        cls, inputs: Sequence[Range], outputs: Sequence[Range], splits: Sequence[int], scale: FloatArray | None
    ) -> Ranges:
        """Return the ranges of parts that make `splits` columns each."""
        return cls(np.array(inputs, np.float32), np.repeat(np.array(outputs, np.float32).T, splits, axis=1), scale)

    def multiply(self, ctx: Context, x: FloatArray, weight: LinearWeight) -> FloatArray:
        """Return the clipped product of x, whose parts may clip it differently."""
        device: Any = np if ctx.gpu is None else ctx.gpu.mx
        kinds, x = np.unique(self.inputs, axis=0), widen(ctx, x)
        made = [widen(ctx, linear(ctx, device.clip(x, *kind.tolist()), weight)) for kind in kinds]
        whole = made[0]
        if len(made) > 1:
            chosen = [int((kinds == own).all(axis=1).argmax()) for own in self.inputs]
            ends = np.cumsum([0, *weight.splits]).tolist()
            parts = [made[one][:, ends[at] : ends[at + 1]] for at, one in enumerate(chosen)]
            whole = device.concatenate(parts, axis=1)
        cut: FloatArray = device.clip(whole, *hold(ctx, self.outputs))
        return cut if self.scale is None else cut * hold(ctx, self.scale)


def sum_slices(name: str, slices: Sequence[FloatArray]) -> Decoded:
    """Return the sum of a weight's slices in time (rows, ...), for still pictures, as one matrix (rows, numbers)."""
    total = slices[0]
    for part in slices[1:]:
        total = total + part
    return Decoded(name, np.ascontiguousarray(total.reshape(len(total), -1)))


def cut_taps(x: FloatArray, bands: int, inputs: int, most: int) -> Iterator[FloatArray]:
    """Yield the inputs (rows, inputs * 9) of a 3 x 3 convolution with stride 2 over x (frames, bands * inputs).

    x has zeros around it. There is a row for each band of each output frame; at most `most` frames come at a time.
    """
    kept, count = -(-bands // 2), -(-len(x) // 2)
    padded = np.zeros((2 * count + 1, 2 * kept + 1, inputs), np.float32)
    padded[1 : len(x) + 1, 1 : bands + 1] = x.reshape(len(x), bands, inputs)
    for first in range(0, count, most):
        rows = min(most, count - first)
        taps = [
            padded[2 * first + down : 2 * (first + rows) + down - 1 : 2, across : 2 * kept + across - 1 : 2]
            for down in range(3)
            for across in range(3)
        ]
        yield np.ascontiguousarray(np.stack(taps, axis=3)).reshape(rows * kept, inputs * 9)


def join_arrays(parts: Sequence[Moved]) -> Moved:
    """Return arrays of the host joined one after another."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def join_rows(ctx: Context, parts: Sequence[FloatArray]) -> FloatArray:
    """Return arrays with equal columns joined one after another."""
    device: Any = np if ctx.gpu is None else ctx.gpu.mx
    joined: FloatArray = parts[0] if len(parts) == 1 else device.concatenate(parts)
    return joined


def split_columns(x: FloatArray, count: int) -> list[FloatArray]:
    """Return the columns of x in `count` parts of the same width."""
    return [np.ascontiguousarray(part) for part in np.split(x, count, axis=1)]


def convolve_columns(x: FloatArray, taps: FloatArray) -> FloatArray:
    """Convolve each column of x (N, columns) with its own taps (columns, kernel); the last tap is the row's own."""
    kernel = taps.shape[1]
    padded = np.concatenate([np.zeros((kernel - 1, x.shape[1]), np.float32), x])
    total: FloatArray = padded[: len(x)] * taps[:, 0]
    for tap in range(1, kernel):  # one after another, so that the bits are the same everywhere
        total += padded[tap : tap + len(x)] * taps[:, tap]
    return total


def make_waves(count: int, columns: int) -> FloatArray:
    """Return sines, then cosines, of the numbers from 0 on, (count, columns), in waves from 1 to 10000 radians long."""
    half = columns // 2
    step = math.log(10000.0) / max(half - 1, 1)
    turns = np.array([math.exp(-step * place) for place in range(half)], np.float32).tolist()
    rows = [[number * turn for turn in turns] for number in range(count)]
    return np.array([[*map(math.sin, row), *map(math.cos, row)] for row in rows], np.float32)


def widen_heads(
    queries: FloatArray, keys: FloatArray, values: FloatArray, scores: Sequence[FloatArray]
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Widen heads (N, heads, dim) by numbers that add the score of their distance to a product of query and key.

    `scores` has, for each head, (N, window) scores of keys 0, 1, 2, ... rows before a query. Each is put into the place
    of the query at which that key has a one: the key's row, modulo the number of places. Values have zeros there.
    """
    (count, heads, dim), window = queries.shape, scores[0].shape[1]
    room = -(-window // 4) * 4
    wide = np.zeros((3, count, heads, dim + room), np.float32)
    for part, own in zip(wide, (queries, keys, values), strict=True):
        part[:, :, :dim] = own
    numbers = np.arange(count)
    wide[1, numbers, :, dim + numbers % room] = 1
    places = dim + (numbers[:, None] - np.arange(window)) % room
    for head, own in enumerate(scores):
        np.put_along_axis(wide[0, :, head], places, own, axis=1)
    return wide[0], wide[1], wide[2]


def fill_pool(pool: PoolArray, rows: FloatArray) -> None:
    """Write rows (N, heads, dim) of f32 into the pages of a pool (pages, heads, page_size, dim), from the first on."""
    pages, heads, page_size, dim = pool.shape
    filled = np.zeros((pages * page_size, heads, dim), np.float32)
    filled[: len(rows)] = rows
    pool[:] = filled.reshape(pages, page_size, heads, dim).transpose(0, 2, 1, 3)


def narrow_heads(x: FloatArray, heads: int, dim: int) -> FloatArray:
    """Return the first `dim` numbers of each head of x (N, heads * more), as (N, heads * dim)."""
    return np.ascontiguousarray(x.reshape(len(x), heads, -1)[:, :, :dim]).reshape(len(x), heads * dim)
