"""Element-wise operators `add`, `scale` and `gate_heads`; `hadamard`, block by block; and the operators of parallel
residual streams, such as `mix_streams`. `sum_rows` makes the vectors of texts on a GPU.

Each has its checks, then its reference in NumPy, which defines its numbers, then the call of the native kernel
(csrc/operators/scale.inc and streams.inc, csrc/layers/hadamard.cpp). `gpu.py` has the launches; operators of streams
run only on processors.
"""

# ruff: noqa: ARG001 -- every implementation takes the context
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np

from mlxr.core.frozen import frozen
from mlxr.kernels.arrays import empty
from mlxr.kernels.checks import check_floats, check_size, refuse
from mlxr.kernels.choice import REFERENCE, Choice
from mlxr.kernels.context import Context
from mlxr.kernels.tensor import FloatArray, IntArray

NO_SOFTCAP = 0.0  # the softcap of native kernels that cap nothing


def add(ctx: Context, x: FloatArray, other: FloatArray, factor: float = 1.0) -> FloatArray:
    """Return (x + other) * factor, each step rounded, for x and other (T, n), which are not changed.

    Raises ValueError if the shapes differ.
    """
    check_floats("add", "x", x, 2)
    check_floats("add", "other", other, 2)
    if other.shape != x.shape:
        refuse("add", "other", f"of shape {other.shape}", f"shape {x.shape} of x")
    if not x.shape[0]:
        return x
    name, implementation = ADD.pick(ctx.device)
    if name == REFERENCE:
        ctx.ledger.count("add", name, "f32" if factor == 1.0 else "f32+scale")
    return implementation(ctx, x, other, factor)


def _add_reference(ctx: Context, x: FloatArray, other: FloatArray, factor: float) -> FloatArray:
    return (x + other) * np.float32(factor)


def _add_native(ctx: Context, x: FloatArray, other: FloatArray, factor: float) -> FloatArray:
    out = empty(ctx, *x.shape)
    ctx.module.add(ctx.native, x, other, factor, out)
    return out


ADD = Choice("add", _add_reference, _add_native, f"{__name__}.gpu")


def scale(ctx: Context, x: FloatArray, factor: float = 1.0, *, softcap: float | None = None) -> FloatArray:
    """Return x * factor for x (T, n), or with a softcap c, c * tanh(x * factor / c); x itself if nothing changes."""
    check_floats("scale", "x", x, 2)
    if not math.isfinite(factor):
        refuse("scale", "factor", factor, "a finite number")
    if softcap is not None and not 0 < softcap < math.inf:
        refuse("scale", "softcap", softcap, "a number above 0")
    if (factor == 1.0 and softcap is None) or not x.shape[0]:
        return x
    name, implementation = SCALE.pick(ctx.device)
    if name == REFERENCE:
        ctx.ledger.count("scale", name, "f32" if softcap is None else "f32+softcap")
    return implementation(ctx, x, factor, softcap)


def _scale_reference(ctx: Context, x: FloatArray, factor: float, softcap: float | None) -> FloatArray:
    if softcap is None:
        return x * np.float32(factor)
    result: FloatArray = np.float32(softcap) * np.tanh(x * np.float32(factor / softcap))
    return result


def _scale_native(ctx: Context, x: FloatArray, factor: float, softcap: float | None) -> FloatArray:
    out = empty(ctx, *x.shape)
    ctx.module.scale(ctx.native, x, factor, softcap or NO_SOFTCAP, out)
    return out


SCALE = Choice("scale", _scale_reference, _scale_native, f"{__name__}.gpu")


def gate_heads(ctx: Context, x: FloatArray, gates: FloatArray, *, softplus: bool = False) -> FloatArray:
    """Return x / (1 + exp(-gate)) for x (T, n); each of the gates (T, m) is for n / m neighbours, as for a head.

    With `softplus` it is x * log(1 + exp(gate)), which has no GPU kernel.
    """
    check_floats("gate_heads", "x", x, 2)
    check_floats("gate_heads", "gates", gates, 2)
    check_size("gate_heads", "rows of gates", gates.shape[0], x.shape[0])
    if not gates.shape[1] or x.shape[1] % gates.shape[1]:
        refuse("gate_heads", "columns of gates", gates.shape[1], f"a divisor of the {x.shape[1]} columns of x")
    name, implementation = GATE_HEADS.pick(ctx.device)
    if name == REFERENCE:
        ctx.ledger.count("gate_heads", name, "elements" if gates.shape[1] == x.shape[1] else "heads")
    return implementation(ctx, x, gates, softplus)


def _gate_heads_reference(ctx: Context, x: FloatArray, gates: FloatArray, softplus: bool) -> FloatArray:
    with np.errstate(over="ignore"):  # exp(-gate) may be infinite, and the sigmoid 0
        one = np.float32(1)
        share = np.logaddexp(gates, np.float32(0)) if softplus else one / (one + np.exp(-gates))
    heads: FloatArray = x.reshape(*gates.shape, x.shape[1] // gates.shape[1]) * share[:, :, None]
    return heads.reshape(x.shape)


def _gate_heads_native(ctx: Context, x: FloatArray, gates: FloatArray, softplus: bool) -> FloatArray:
    out = empty(ctx, *x.shape)
    ctx.module.gate_heads(ctx.native, x, gates, out, softplus)
    return out


GATE_HEADS = Choice("gate_heads", _gate_heads_reference, _gate_heads_native, f"{__name__}.gpu")


def _pick_streams(ctx: Context, choice: Choice[Any], form: str) -> Any:
    name, implementation = choice.pick(ctx.device)
    if name == REFERENCE:
        ctx.ledger.count("streams", name, form)
    return implementation


def _check_streams(operator: str, streams: int, arrays: Mapping[str, FloatArray]) -> None:
    """Check that all arrays have one shape, with columns that `streams` divides."""
    first = next(iter(arrays.values()))
    if streams < 1 or first.ndim != 2 or first.shape[1] % streams:
        refuse(operator, "streams", streams, f"a divisor of the columns of an array of shape {first.shape}")
    for name, array in arrays.items():
        check_floats(operator, name, array, 2)
        if array.shape != first.shape:
            refuse(operator, name, f"of shape {array.shape}", f"shape {first.shape}")


def mix_streams(ctx: Context, x: FloatArray, gates: FloatArray, streams: int) -> FloatArray:
    """Return the mean (T, n) of the `streams` parts of x (T, streams * n), each number multiplied by the sigmoid of its
    gate."""
    _check_streams("mix_streams", streams, {"x": x, "gates": gates})
    mixed: FloatArray = _pick_streams(ctx, MIX_STREAMS, "mix")(ctx, x, gates, streams)
    return mixed


def _mix_reference(ctx: Context, x: FloatArray, gates: FloatArray, streams: int) -> FloatArray:
    with np.errstate(over="ignore"):
        gated = x / (np.float32(1) + np.exp(-gates))
    mean: FloatArray = gated.reshape(len(x), streams, -1).sum(axis=1) * np.float32(1 / streams)
    return mean


def _mix_native(ctx: Context, x: FloatArray, gates: FloatArray, streams: int) -> FloatArray:
    out = empty(ctx, x.shape[0], x.shape[1] // streams)
    ctx.module.mix_streams(ctx.native, x, gates, streams, out)
    return out


MIX_STREAMS = Choice("streams", _mix_reference, _mix_native)


def spread_streams(
    ctx: Context,
    x: FloatArray,
    streams: int,
    gates: FloatArray | None = None,
    base: FloatArray | None = None,
    *,
    factor: float = 1.0,
    gate_scale: float = 1.0,
) -> FloatArray:
    """Return (T, streams * n), whose part s is base[s] + x * factor * sigmoid(gates[s] * gate_scale).

    x is (T, n), `base` (T, streams * n) and `gates` (T, streams); without a base or gates, these terms are left out.
    """
    check_floats("spread_streams", "x", x, 2)
    if streams < 1:
        refuse("spread_streams", "streams", streams, "1 or more")
    for name, array, columns in (("gates", gates, streams), ("base", base, streams * x.shape[1])):
        if array is not None:
            check_floats("spread_streams", name, array, 2)
            if array.shape != (len(x), columns):
                refuse("spread_streams", name, f"of shape {array.shape}", f"shape {(len(x), columns)}")
    implementation = _pick_streams(ctx, SPREAD_STREAMS, "spread")
    spread: FloatArray = implementation(ctx, x, streams, gates, base, factor, gate_scale)
    return spread


def _spread_reference(
    ctx: Context,
    x: FloatArray,
    streams: int,
    gates: FloatArray | None,
    base: FloatArray | None,
    factor: float,
    gate_scale: float,
) -> FloatArray:
    shares: FloatArray = np.full((len(x), streams), factor, np.float32)
    if gates is not None:
        with np.errstate(over="ignore"):
            shares /= np.float32(1) + np.exp(gates * np.float32(-gate_scale))
    spread: FloatArray = (x[:, None] * shares[:, :, None]).reshape(len(x), -1)
    return spread if base is None else base + spread


def _spread_native(
    ctx: Context,
    x: FloatArray,
    streams: int,
    gates: FloatArray | None,
    base: FloatArray | None,
    factor: float,
    gate_scale: float,
) -> FloatArray:
    out = empty(ctx, x.shape[0], streams * x.shape[1])
    ctx.module.spread_streams(ctx.native, x, gates, base, streams, factor, gate_scale, out)
    return out


SPREAD_STREAMS = Choice("streams", _spread_reference, _spread_native)
LEAST_MATCH = 1e-6  # the smallest magnitude of a product of two rows in `match_streams`


def match_streams(ctx: Context, keys: FloatArray, queries: FloatArray, streams: int, *, scale: float) -> FloatArray:
    """Return the similarity (T, streams) of each part of keys and queries (T, streams * n): sign(p) sqrt(max(|p|,
    1e-6)), where p is their dot product times `scale`."""
    _check_streams("match_streams", streams, {"keys": keys, "queries": queries})
    matched: FloatArray = _pick_streams(ctx, MATCH_STREAMS, "match")(ctx, keys, queries, streams, scale)
    return matched


def _match_reference(ctx: Context, keys: FloatArray, queries: FloatArray, streams: int, scale: float) -> FloatArray:
    alike = (keys * queries).reshape(len(keys), streams, -1).sum(axis=2) * np.float32(scale)
    matched: FloatArray = np.sign(alike) * np.sqrt(np.maximum(np.abs(alike), np.float32(LEAST_MATCH)))
    return matched


def _match_native(ctx: Context, keys: FloatArray, queries: FloatArray, streams: int, scale: float) -> FloatArray:
    out = empty(ctx, keys.shape[0], streams)
    ctx.module.match_streams(ctx.native, keys, queries, scale, LEAST_MATCH, out)
    return out


MATCH_STREAMS = Choice("streams", _match_reference, _match_native)
MOST_STREAMS = 8  # most streams that can be balanced and blended


def balance_streams(
    ctx: Context, x: FloatArray, scale: FloatArray, base: FloatArray, streams: int, *, turns: int, eps: float
) -> FloatArray:
    """Return the gains of n `streams` whose mixing is doubly stochastic (arXiv:2512.24880): (T, (2 + n) n), as x.

    Let y be x * scale + base, where `base` is as wide as a row and `scale` has a number for each of three parts. The
    first n gains are sigmoids of y plus eps, the next n twice the sigmoids. The others, (n, n), start as the softmax of
    each row plus eps; they are divided by the sums of columns + eps `turns` times, and between these by the sums of
    rows + eps.
    """
    check_floats("balance_streams", "x", x, 2)
    width = (2 + streams) * streams
    if not 1 <= streams <= MOST_STREAMS or not 1 <= turns <= 1024:
        refuse("balance_streams", "streams and turns", f"{streams} and {turns}", f"1 to {MOST_STREAMS} and 1 to 1024")
    check_size("balance_streams", "columns of x", x.shape[1], width)
    for name, vector, size in (("scale", scale, 3), ("base", base, width)):
        check_floats("balance_streams", name, vector, 1)
        check_size("balance_streams", f"length of {name}", vector.shape[0], size)
    implementation = _pick_streams(ctx, BALANCE_STREAMS, "balance")
    gains: FloatArray = implementation(ctx, x, scale, base, streams, turns, eps)
    return gains


def _balance_reference(
    ctx: Context, x: FloatArray, scale: FloatArray, base: FloatArray, streams: int, turns: int, eps: float
) -> FloatArray:
    least = np.float32(eps)
    y = x * scale.repeat((streams, streams, streams * streams)) + base
    with np.errstate(over="ignore"):
        shares = np.float32(1) / (np.float32(1) + np.exp(-y[:, : 2 * streams]))
    mixed = y[:, 2 * streams :].reshape(len(x), streams, streams)
    mixed = np.exp(mixed - mixed.max(axis=2, keepdims=True))
    mixed = mixed / mixed.sum(axis=2, keepdims=True) + least
    for turn in range(turns):
        if turn:
            mixed = mixed / (mixed.sum(axis=2, keepdims=True) + least)
        mixed = mixed / (mixed.sum(axis=1, keepdims=True) + least)
    parts = shares[:, :streams] + least, 2 * shares[:, streams:], mixed.reshape(len(x), -1)
    gains: FloatArray = np.concatenate(parts, axis=1)
    return gains


def _balance_native(
    ctx: Context, x: FloatArray, scale: FloatArray, base: FloatArray, streams: int, turns: int, eps: float
) -> FloatArray:
    out = empty(ctx, *x.shape)
    ctx.module.balance_streams(ctx.native, x, scale, base, streams, turns, eps, out)
    return out


BALANCE_STREAMS = Choice("streams", _balance_reference, _balance_native)


def blend_streams(
    ctx: Context, x: FloatArray, streams: int, gains: FloatArray | None = None, added: FloatArray | None = None
) -> FloatArray:
    """Return the sum (T, n) of the `streams` parts of x (T, streams * n), weighted by the first n gains of
    `balance_streams`; without gains, their mean.

    With `added` (T, n), return the next streams, shaped as x: each is the sum of all parts weighted by its column of
    the last (n, n) gains, plus `added` times its one of the second n gains.
    """
    _check_streams("blend_streams", streams, {"x": x})
    if streams > MOST_STREAMS:
        refuse("blend_streams", "streams", streams, f"at most {MOST_STREAMS}")
    shapes = (("gains", gains, (2 + streams) * streams), ("added", added, x.shape[1] // streams))
    for name, array, columns in shapes:
        if array is not None:
            check_floats("blend_streams", name, array, 2)
            if array.shape != (len(x), columns):
                refuse("blend_streams", name, f"of shape {array.shape}", f"shape {(len(x), columns)}")
    if added is not None and gains is None:
        refuse("blend_streams", "gains", "None", "given where something is added")
    blended: FloatArray = _pick_streams(ctx, BLEND_STREAMS, "blend")(ctx, x, streams, gains, added)
    return blended


def _blend_reference(
    ctx: Context, x: FloatArray, streams: int, gains: FloatArray | None, added: FloatArray | None
) -> FloatArray:
    parts = x.reshape(len(x), streams, -1)
    blended: FloatArray
    if gains is None:
        blended = parts.sum(axis=1) * np.float32(1 / streams)
    elif added is None:
        blended = (parts * gains[:, :streams, None]).sum(axis=1)
    else:
        mixed = gains[:, 2 * streams :].reshape(len(x), streams, streams)
        own = gains[:, streams : 2 * streams, None] * added[:, None]
        blended = (own + (mixed[:, :, :, None] * parts[:, :, None]).sum(axis=1)).reshape(x.shape)
    return blended


def _blend_native(
    ctx: Context, x: FloatArray, streams: int, gains: FloatArray | None, added: FloatArray | None
) -> FloatArray:
    out = empty(ctx, x.shape[0], x.shape[1] // (streams if added is None else 1))
    ctx.module.blend_streams(ctx.native, x, gains, added, streams, out)
    return out


BLEND_STREAMS = Choice("streams", _blend_reference, _blend_native)


def predict_gains(coefficients: FloatArray, streams: int) -> tuple[FloatArray, FloatArray]:
    """Return the weight ((2 + n) n, n) and bias of a product that makes gains of `blend_streams` to predict streams.

    A stream becomes itself plus the sum of all, weighted by its `coefficients` (n * n, n). The first stream is what is
    added.
    """
    made = coefficients.reshape(streams, streams, streams)  # to, from, by
    own, kept = np.eye(streams, dtype=np.float32)[0], np.eye(streams, dtype=np.float32)
    mixed = made.transpose(1, 0, 2).copy()
    mixed[0], kept[0] = 0, 0
    return _join_gains(made[:, 0], own, mixed, kept)


def correct_gains(coefficients: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the same for gains that correct streams: each becomes itself plus the difference of what is added from the
    first stream, times 1 + its `coefficients` (n, n)."""
    streams = len(coefficients)
    mixed, kept = np.zeros((streams,) * 3, np.float32), np.eye(streams, dtype=np.float32)
    mixed[0], kept[0] = -coefficients, kept[0] - 1
    return _join_gains(coefficients, np.ones(streams, np.float32), mixed, kept)


def _join_gains(
    own: FloatArray, own_bias: FloatArray, mixed: FloatArray, kept: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Join gains: read the first stream; `own` is what each stream takes of what is added, `mixed` of all streams."""
    first: FloatArray = np.eye(len(own), dtype=np.float32)[0]
    rows = np.concatenate([np.zeros_like(kept), own, mixed.reshape(-1, len(own))])
    return rows, np.concatenate([first, own_bias, kept.reshape(-1)])


LEAST_SQUARE = 1e-5  # the smallest mean square by which a stream is divided


def level_streams(ctx: Context, x: FloatArray, base: FloatArray, streams: int) -> FloatArray:
    """Return the parts of x (T, streams * n), the first replaced by `base` (T, n) and the others scaled to its mean
    square (to less if their own is below 1e-5)."""
    check_floats("level_streams", "base", base, 2)
    _check_streams("level_streams", streams, {"x": x})
    if (len(x), x.shape[1] // streams) != base.shape:
        refuse("level_streams", "base", f"of shape {base.shape}", f"shape {(len(x), x.shape[1] // streams)}")
    levelled: FloatArray = _pick_streams(ctx, LEVEL_STREAMS, "level")(ctx, x, base, streams)
    return levelled


def _level_reference(ctx: Context, x: FloatArray, base: FloatArray, streams: int) -> FloatArray:
    parts = x.reshape(len(x), streams, -1).copy()
    parts[:, 0] = base
    squares = np.square(parts).mean(axis=2, keepdims=True)
    scales = np.sqrt(squares[:, :1] / np.maximum(squares, np.float32(LEAST_SQUARE)))
    scales[:, 0] = 1
    levelled: FloatArray = (parts * scales).reshape(x.shape)
    return levelled


def _level_native(ctx: Context, x: FloatArray, base: FloatArray, streams: int) -> FloatArray:
    out = empty(ctx, *x.shape)
    ctx.module.level_streams(ctx.native, x, base, streams, LEAST_SQUARE, out)
    return out


LEVEL_STREAMS = Choice("streams", _level_reference, _level_native)


def cut_gates(ctx: Context, x: FloatArray, columns: int, factor: float) -> FloatArray:
    """Return x (T, n) with the mean and `factor` times the standard deviation of each row's first `columns` numbers
    subtracted from these, and negative results set to 0."""
    check_floats("cut_gates", "x", x, 2)
    if not 1 <= columns <= x.shape[1]:
        refuse("cut_gates", "columns", columns, f"1 to {x.shape[1]}")
    name, implementation = CUT_GATES.pick(ctx.device)
    if name == REFERENCE:
        ctx.ledger.count("scale", name, "cut")
    return implementation(ctx, x, columns, factor)


def _cut_reference(ctx: Context, x: FloatArray, columns: int, factor: float) -> FloatArray:
    cut, part = x.copy(), x[:, :columns]
    off = part.mean(axis=1, keepdims=True) + part.std(axis=1, keepdims=True) * np.float32(factor)
    cut[:, :columns] = np.maximum(part - off, np.float32(0))
    return cut


def _cut_native(ctx: Context, x: FloatArray, columns: int, factor: float) -> FloatArray:
    out = x.copy()
    ctx.module.cut_gates(ctx.native, x, columns, factor, out)
    return out


CUT_GATES = Choice("scale", _cut_reference, _cut_native)


MAX_BLOCK = 8192  # most numbers of a transform, for which a GPU's threadgroup has memory


@frozen(eq=False)
class Hadamard:
    """A rotation of rows: H (signs * x[order]) of each `block` neighbours, or `inverse`: signs * (H x).

    H is the normalised Walsh-Hadamard matrix in Sylvester's order, its own inverse: entry (i, j) is 1 / sqrt(block),
    negative where i & j has an odd number of ones. Sums and differences are made of numbers that stand 1, 2, 4, ...
    apart, and the result is multiplied by 1 / sqrt(block); each step is rounded.
    """

    columns: int
    block: int  # a power of two that divides the columns
    signs: FloatArray | None = None  # (columns,) of 1 and -1
    order: IntArray | None = None  # (columns,): the column of x that goes to each place
    inverse: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.block <= MAX_BLOCK or self.block & (self.block - 1) or self.columns % self.block:
            refuse("hadamard", "block", self.block, f"a power of two that divides {self.columns}, up to {MAX_BLOCK}")
        for name, array in (("signs", self.signs), ("order", self.order)):
            if array is not None:
                check_size("hadamard", f"length of {name}", len(array), self.columns)
        if self.order is not None and self.inverse:
            refuse("hadamard", "order", "given", "None, as it is the inverse")

    @property
    def variant(self) -> str:
        """The variant of `scale` under which the ledger counts it."""
        return "inverse hadamard" if self.inverse else "hadamard"

    @property
    def scale(self) -> float:
        """The factor of all sums, which keeps the length of a row."""
        return 1.0 / math.sqrt(self.block)

    def invert(self) -> Hadamard:
        """Return the inverse rotation; this one must have no order."""
        return replace(self, inverse=not self.inverse)


def make_hadamard(columns: int, block: int, signs: Sequence[int] = (), order: Sequence[int] = ()) -> Hadamard:
    """Return a rotation with these signs and this order, if there are any. Raises ValueError if they do not fit."""
    own_signs = np.array(signs, np.float32) if signs else None
    return Hadamard(columns, block, own_signs, np.array(order, np.int32) if order else None)


def hadamard(ctx: Context, x: FloatArray, rotation: Hadamard | None) -> FloatArray:
    """Rotate the rows of x (T, columns); return x itself if there is no rotation."""
    if rotation is None:
        return x
    check_floats("hadamard", "x", x, 2)
    check_size("hadamard", "columns of x", x.shape[1], rotation.columns)
    name, implementation = HADAMARD.pick(ctx.device)
    if name == REFERENCE:
        ctx.ledger.count("scale", name, rotation.variant)
    return implementation(ctx, x, rotation)


def rotate_rows(x: FloatArray, rotation: Hadamard) -> FloatArray:
    """Rotate rows (T, columns) in NumPy: the definition of `hadamard`."""
    signs = np.float32(1) if rotation.signs is None else rotation.signs
    ordered = x if rotation.order is None else x[:, rotation.order]
    blocks = (ordered if rotation.inverse else ordered * signs).reshape(-1, rotation.block)
    step = 1
    while step < rotation.block:
        pairs = blocks.reshape(len(blocks), -1, 2, step)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        blocks = np.stack([first + second, first - second], axis=2)
        step *= 2
    scaled: FloatArray = blocks.reshape(x.shape) * np.float32(rotation.scale)
    return scaled * signs if rotation.inverse else scaled


def _hadamard_reference(ctx: Context, x: FloatArray, rotation: Hadamard) -> FloatArray:
    return rotate_rows(x, rotation)


def _hadamard_native(ctx: Context, x: FloatArray, rotation: Hadamard) -> FloatArray:
    out = empty(ctx, *x.shape)
    ctx.module.hadamard(ctx.native, x, rotation.signs, rotation.order, rotation.block, rotation.inverse, out)
    return out


HADAMARD = Choice("hadamard", _hadamard_reference, _hadamard_native, f"{__name__}.gpu")


def sum_rows(ctx: Context, x: FloatArray, counts: Sequence[int]) -> FloatArray:
    """Return the sums (parts, n) of each `counts[i]` neighbouring rows of x (T, n); ValueError if rows are left."""
    check_floats("sum_rows", "x", x, 2)
    check_size("sum_rows", "rows of all parts", sum(counts), x.shape[0])
    name, implementation = SUM_ROWS.pick(ctx.device)
    if name == REFERENCE:
        ctx.ledger.count("sum_rows", name, "f32")
    return implementation(ctx, x, counts)


def _sum_rows_reference(ctx: Context, x: FloatArray, counts: Sequence[int]) -> FloatArray:
    ends = [*accumulate(counts)]
    sums = [x[end - count : end].sum(axis=0, dtype=np.float64) for end, count in zip(ends, counts, strict=True)]
    return np.array(sums, np.float32).reshape(len(counts), x.shape[1])


SUM_ROWS = Choice("sum_rows", _sum_rows_reference, None, f"{__name__}.gpu")
