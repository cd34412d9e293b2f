"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), in place, from a table of cos and sin; and tables
stretched for longer contexts (YaRN, longrope, Llama 3).

A table may also have factors of queries at each position, and a table may rotate nothing.
"""

# ruff: noqa: ARG001 -- every implementation takes the context
from __future__ import annotations

import decimal
import math
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from mlxr.core.errors import ModelError
from mlxr.core.frozen import frozen
from mlxr.kernels.checks import check_floats, check_heads, check_ints, check_size, refuse
from mlxr.kernels.choice import REFERENCE, Choice
from mlxr.kernels.context import Context
from mlxr.kernels.tensor import FloatArray, IntArray

ScalingKind = Literal["linear", "yarn", "longrope"]
SCALING_KINDS: tuple[str, ...] = get_args(ScalingKind)
_NEEDS_ORIGINAL_CONTEXT = ("yarn", "longrope")
_POSITIVE = ("factor", "attention_factor", "beta_fast", "beta_slow")
_DIGITS = decimal.Context(prec=40)
MAX_FACTOR = 1e6


@frozen
class RopeScaling:
    """A scaling rule. Fields that a kind does not use keep their defaults; ModelError for values that make no sense.

    `attention_factor` multiplies cos and sin (with yarn: `yarn_attention_factor` unless the model states its own, with
    longrope `longrope_attention_factor`). `short_factors` and `long_factors` are longrope's, one for each pair.
    `original_context` is in tokens. `truncate` rounds the ends of yarn's ramp to whole dimensions.
    """

    kind: ScalingKind
    factor: float
    original_context: int | None = None
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in SCALING_KINDS:
            raise ModelError(f"rope scaling {self.kind!r} is not known; known are {', '.join(SCALING_KINDS)}")
        named = [(name, getattr(self, name)) for name in _POSITIVE]
        named += [("short_factors", value) for value in self.short_factors]
        named += [("long_factors", value) for value in self.long_factors]
        for name, value in named:
            if not 0 < value <= MAX_FACTOR:  # also refuses NaN
                raise ModelError(
                    f"rope scaling {self.kind}: {name} is {value}, expected above 0 and at most {MAX_FACTOR}"
                )
        if self.kind in _NEEDS_ORIGINAL_CONTEXT and (self.original_context is None or self.original_context < 1):
            raise ModelError(f"rope scaling {self.kind}: original_context is {self.original_context}, expected tokens")
        if self.kind == "yarn" and self.beta_fast < self.beta_slow:
            raise ModelError(f"rope scaling yarn: beta_fast {self.beta_fast} is below beta_slow {self.beta_slow}")
        if self.kind == "longrope" and (not self.short_factors or len(self.short_factors) != len(self.long_factors)):
            raise ModelError(
                f"rope scaling longrope: {len(self.short_factors)} short_factors and {len(self.long_factors)} "
                "long_factors, expected as many of each"
            )

    def list_factors(self, context: int) -> tuple[float, ...]:
        """Return longrope's factors for contexts of up to `context` tokens."""
        assert self.original_context is not None  # checked when made
        return self.long_factors if context > self.original_context else self.short_factors


@frozen
class QueryTemperature:
    """Factors of queries by position p, 1 + beta * ln(1 + floor((p + offset) / period)); the offset is 0 in Ministral 3
    and 1 in Llama 4. Raises ModelError for values that make no sense."""

    beta: float
    period: int
    offset: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.beta <= MAX_FACTOR:  # also refuses NaN
            raise ModelError(f"query temperature: beta is {self.beta}, expected from 0 to {MAX_FACTOR}")
        if self.period < 1 or self.offset < 0:
            raise ModelError(
                f"query temperature: period {self.period} and offset {self.offset}, expected 1 and 0 or more"
            )


def power(base: float, numerator: int, denominator: int) -> float:
    """Return `base` to the power of a fraction, rounded once from 40 digits: the same on every machine."""
    return float(
        _DIGITS.power(decimal.Decimal(base), _DIGITS.divide(decimal.Decimal(numerator), decimal.Decimal(denominator)))
    )


def logarithm(value: float) -> float:
    """Return the natural logarithm, rounded once from 40 digits."""
    return float(_DIGITS.ln(decimal.Decimal(value)))


def stretch_base(theta: float, factor: float, rot_dim: int) -> float:
    """Return the base that keeps high frequencies and divides the lowest by `factor` ("NTK-aware" scaling)."""
    return theta * power(factor, rot_dim, rot_dim - 2)


def yarn_attention_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """Return yarn's recommended attention factor: 0.1 ln(factor) + 1, or a quotient of two such with given weights."""

    def scale(weight: float) -> float:
        return 0.1 * weight * logarithm(factor) + 1.0 if factor > 1 else 1.0

    if mscale and mscale_all_dim:
        return scale(mscale) / scale(mscale_all_dim)
    return scale(1.0)


def longrope_attention_factor(factor: float, original_context: int) -> float:
    """Return longrope's recommended attention factor for a context `factor` times as long as the original one."""
    if factor <= 1 or original_context <= 1:
        return 1.0
    return math.sqrt(1.0 + logarithm(factor) / logarithm(original_context))


DoubleArray = npt.NDArray[np.float64]


@frozen(eq=False)
class RopeTable:
    """cos and sin (positions, rot_dim / 2) of each position and pair.

    `interleaved`: pair i is elements (2i, 2i + 1) of a head, otherwise (i, i + rot_dim / 2). Elements from `rot_dim`
    on are not rotated; with 0 none are. `query_factors` (positions,) multiply queries, None leaves them.
    """

    cos: FloatArray
    sin: FloatArray
    interleaved: bool
    rot_dim: int
    query_factors: FloatArray | None = None

    def __post_init__(self) -> None:
        check_floats("RopeTable", "cos", self.cos, 2)
        check_floats("RopeTable", "sin", self.sin, 2)
        if self.cos.shape != self.sin.shape or self.rot_dim != 2 * self.cos.shape[1]:
            shapes = f"{self.cos.shape} and {self.sin.shape}"
            refuse("RopeTable", "cos and sin", f"of shapes {shapes}", f"(positions, {self.rot_dim} / 2)")
        if self.query_factors is not None:
            check_floats("RopeTable", "query_factors", self.query_factors, 1)
            check_size("RopeTable", "length of query_factors", len(self.query_factors), len(self.cos))

    @property
    def positions(self) -> int:
        """The number of positions that the table covers, from 0 on."""
        return len(self.cos)


def rope(ctx: Context, x: FloatArray, positions: IntArray, table: RopeTable, *, queries: bool = False) -> None:
    """Rotate x (T, heads, head_dim) in place by `positions` (T,): (a, b) becomes (a cos - b sin, b cos + a sin).

    `queries` are then multiplied by the table's factor of their position, if it has factors. x may be a view with a
    free token stride (part of a fused projection). Raises ValueError for a position that the table does not cover,
    before anything is rotated.
    """
    check_heads("rope", "x", x)
    check_ints("rope", "positions", positions)
    check_size("rope", "length of positions", positions.shape[0], x.shape[0])
    if table.rot_dim > x.shape[2]:
        refuse("rope", "rot_dim of table", table.rot_dim, f"at most the head_dim {x.shape[2]} of x")
    factors = table.query_factors if queries else None
    if not table.rot_dim and factors is None:
        return
    name, implementation = ROPE.pick(ctx.device)
    if name == REFERENCE:
        ctx.ledger.count("rope", name, "interleaved" if table.interleaved else "halves")
    implementation(ctx, x, positions, table, factors)


def _rope_reference(
    ctx: Context, x: FloatArray, positions: IntArray, table: RopeTable, factors: FloatArray | None
) -> None:
    if positions.shape[0] and (positions.min() < 0 or positions.max() >= table.positions):
        refuse("rope", "positions", positions.tolist(), f"positions from 0 to {table.positions - 1}")
    cos = table.cos[positions][:, None, :]
    sin = table.sin[positions][:, None, :]
    rotated = x[:, :, : table.rot_dim]
    half = table.rot_dim // 2
    a = rotated[:, :, 0::2] if table.interleaved else rotated[:, :, :half]
    b = rotated[:, :, 1::2] if table.interleaved else rotated[:, :, half:]
    new_a, new_b = a * cos - b * sin, b * cos + a * sin
    a[...] = new_a
    b[...] = new_b
    if factors is not None:
        x *= factors[positions][:, None, None]


def _rope_native(
    ctx: Context, x: FloatArray, positions: IntArray, table: RopeTable, factors: FloatArray | None
) -> None:
    ctx.module.rope(ctx.native, x, positions, table.cos, table.sin, table.interleaved, factors)


ROPE = Choice("rope", _rope_reference, _rope_native)


def build_table(
    positions: int,
    rot_dim: int,
    theta: float,
    *,
    interleaved: bool,
    scaling: RopeScaling | None = None,
    frequency_factors: Sequence[float] | None = None,
    context: int | None = None,
    temperature: QueryTemperature | None = None,
) -> RopeTable:
    """Return the table of `positions` positions with base `theta` (Su et al. 2021, arXiv:2104.09864).

    With a rot_dim of 0 nothing is rotated. `frequency_factors` (rot_dim / 2), as in GGUF's `rope_freqs.weight`, divide
    the frequencies. `context` is the longest context that will be served, by which longrope chooses its factors.
    """
    factors = None if temperature is None else _temper(positions, temperature)
    if not rot_dim:
        none = np.empty((positions, 0), np.float32)
        return RopeTable(none, none, interleaved, 0, factors)
    frequencies = inverse_frequencies(rot_dim, theta, scaling, frequency_factors, context)
    angles = np.arange(positions, dtype=np.float64)[:, None] * frequencies[None, :]
    factor = scaling.attention_factor if scaling is not None else 1.0
    cos, sin = np.cos(angles) * factor, np.sin(angles) * factor
    return RopeTable(cos.astype(np.float32), sin.astype(np.float32), interleaved, rot_dim, factors)


def gather_table(table: RopeTable, axes: IntArray, pair_axes: Sequence[int]) -> RopeTable:
    """Return a table with a row for each of T tokens, whose coordinates are `axes` (axes, T); a pair turns by one axis.

    The numbers are those of the given table, to the bit.
    """
    pairs = np.arange(table.cos.shape[1])
    places = axes[np.array(pair_axes, np.intp)].T
    factors = None if table.query_factors is None else table.query_factors[axes[0]]
    cos, sin = (np.ascontiguousarray(part[places, pairs]) for part in (table.cos, table.sin))
    return RopeTable(cos, sin, table.interleaved, table.rot_dim, factors)


def build_plane_table(
    rows: IntArray, columns: IntArray, head_dim: int, theta: float, *, lies_between: bool = False
) -> RopeTable:
    """Return a table with a row for each of T tokens of a plane: the first half of pairs turns by the token's row, the
    second by its column.

    Both have the same frequencies; with `lies_between`, those of columns lie between those of rows.
    """
    frequencies = _plain(head_dim, theta) if head_dim else np.empty(0)
    axes = (rows, frequencies[0::2]), (columns, frequencies[1 if lies_between else 0 :: 2])
    angles = np.concatenate([places[:, None] * turns for places, turns in axes], axis=1)
    return RopeTable(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32), False, head_dim)


def _temper(positions: int, temperature: QueryTemperature) -> FloatArray:
    turns = (np.arange(positions, dtype=np.int64) + temperature.offset) // temperature.period
    return (1.0 + temperature.beta * np.log1p(turns.astype(np.float64))).astype(np.float32)


def inverse_frequencies(
    rot_dim: int,
    theta: float,
    scaling: RopeScaling | None = None,
    frequency_factors: Sequence[float] | None = None,
    context: int | None = None,
) -> DoubleArray:
    """Return the radians per position of each pair, (rot_dim / 2,): theta ** (-2 i / rot_dim), scaled."""
    if rot_dim < 2 or rot_dim % 2:
        refuse("build_table", "rot_dim", rot_dim, "an even number from 2")
    frequencies = _plain(rot_dim, theta)
    if scaling is not None:
        frequencies = _scale(frequencies, rot_dim, theta, scaling, context)
    if frequency_factors is not None:
        if len(frequency_factors) != rot_dim // 2:
            refuse("build_table", "length of frequency_factors", len(frequency_factors), rot_dim // 2)
        frequencies = frequencies / np.asarray(frequency_factors, dtype=np.float64)
    return frequencies


def _plain(rot_dim: int, theta: float) -> DoubleArray:
    return np.array([power(theta, -2 * pair, rot_dim) for pair in range(rot_dim // 2)])


def _scale(plain: DoubleArray, rot_dim: int, theta: float, scaling: RopeScaling, context: int | None) -> DoubleArray:
    match scaling.kind:
        case "linear":
            return plain / scaling.factor
        case "yarn":
            keep = 1.0 - _yarn_ramp(rot_dim, theta, scaling)
            return plain * keep + plain / scaling.factor * (1.0 - keep)
        case "longrope":
            if context is None:
                refuse(
                    "build_table", "context with longrope scaling", "None", "the longest context that will be served"
                )
            factors = scaling.list_factors(context)
            check_size("build_table", "number of longrope factors", len(factors), rot_dim // 2)
            return plain / np.asarray(factors, dtype=np.float64)


def _yarn_ramp(rot_dim: int, theta: float, scaling: RopeScaling) -> DoubleArray:
    """Return 0 for pairs that turn often within the original context, 1 for those that hardly turn, a ramp between."""

    def pair_turning(rotations: float) -> float:
        assert scaling.original_context is not None  # checked when made
        turns = scaling.original_context / (rotations * 2 * math.pi)
        return rot_dim * logarithm(turns) / (2 * logarithm(theta))

    low, high = pair_turning(scaling.beta_fast), pair_turning(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rot_dim - 1)
    width = high - low if high != low else 0.001
    ramp: DoubleArray = np.clip((np.arange(rot_dim // 2) - low) / width, 0.0, 1.0)
    return ramp


def llama3_factors(plain: DoubleArray, factor: float, original_context: int, low: float, high: float) -> DoubleArray:
    """Return the divisors of plain frequencies in Llama 3.1; GGUF files store them as `rope_freqs.weight`.

    Wavelengths below original_context / high stay, those above original_context / low are divided by `factor`, with a
    smooth transition.
    """
    turns = original_context * plain / (2 * math.pi)  # original context in wavelengths
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    result: DoubleArray = 1.0 / ((1.0 - smooth) / factor + smooth)
    return result
