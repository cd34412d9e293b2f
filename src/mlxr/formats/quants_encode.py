"""Encoders that search for the scale with the least error: q2_k to q6_k, iq3_s, iq4_nl, iq4_xs, and mxfp4.

An encoder takes float32 (blocks, block_size) and gives uint8 (blocks, type_size): find each group's scale, round the
scales themselves to their few bits, then round the values with the scales as stored. In a search groups stand in
columns, (values, groups), so that every step runs over all groups at once and sums run down the columns.

The method is that of ggml's k-quants: try a row of scales around the one that spans the group, round, fit the best
scale for that rounding by weighted least squares, keep the best. Where levels are few, two things go further:
`fit_symmetric` repeats rounding and fitting from there, and as the scales are stored in a few bits themselves,
`settle_symmetric` and `settle_affine` look at the neighbours of the nearest codes and keep the one with the least
error, which often is not the nearest. With the `importance` of each value, errors are weighted as llama.cpp weights
them with an importance matrix, and q4_0 and q5_0 are searched for, too. mxfp4 follows ggml's plain rule: the exponent
of the largest magnitude, nearest level.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from functools import cache

import numpy as np
from numpy.typing import NDArray

from mlxr.core.frozen import frozen
from mlxr.formats import quants
from mlxr.formats.quants import (
    IQ3_S,
    IQ4_LEVELS,
    IQ4_NL,
    IQ4_XS,
    MXFP4,
    MXFP4_LEVELS,
    Bytes,
    Floats,
    invert,
    pack_nibbles,
    pack_planes,
    pack_q3_scales,
    pack_scales_and_mins,
    scale_of_exponent,
)

_REFINEMENTS = 2


def sum_down(values: Floats) -> Floats:
    """Return the sum of each column, added from the top down."""
    total: Floats = np.add.reduce(values, axis=0)
    return total


def round_to_levels(values: Floats, lowest: int, highest: int) -> Floats:
    """Round in place to whole numbers within [lowest, highest]."""
    np.rint(values, out=values)
    np.clip(values, lowest, highest, out=values)
    return values


def fit_symmetric(x: Floats, weights: Floats, half: int, steps: Iterable[float]) -> Floats:
    """Scales (groups,) that make round(x / scale), within -half..half-1, nearest to x in weighted square error.

    x, weights: (values, groups). steps: how many steps the value of largest magnitude may be worth, near `half`.
    A scale may be negative: the value of largest magnitude then lands on -half, where there is one level more.
    """
    at = np.abs(x).argmax(axis=0)[None]
    extreme = np.take_along_axis(x, at, axis=0)[0]
    weighted = weights * x
    best_gain = np.zeros_like(extreme)
    scale: Floats = np.zeros_like(extreme)

    def keep_better(inverse: Floats) -> None:
        q = round_to_levels(x * inverse, -half, half - 1)
        sum_xq = sum_down(weighted * q)
        np.multiply(q, q, out=q)
        sum_qq = sum_down(np.multiply(q, weights, out=q))
        fitted = sum_xq * invert(sum_qq)
        gain = fitted * sum_xq  # the reduction of the error from that of all zeros
        better = gain > best_gain
        np.copyto(best_gain, gain, where=better)
        np.copyto(scale, fitted, where=better)

    inverse_extreme = invert(extreme)
    for step in steps:
        keep_better(np.float32(-step) * inverse_extreme)
    for _ in range(_REFINEMENTS):
        keep_better(invert(scale))
    return scale


def fit_affine(
    x: Floats, weights: Floats, top: int, steps: Iterable[float], refinements: int = 0
) -> tuple[Floats, Floats]:
    """(scales, offsets), both (groups,) and not negative, so that scale * q - offset with q in 0..top is nearest to x.

    x, weights: (values, groups). steps: how many steps the group's range may be worth, near `top`; each is tried from
    the best minimum so far, in this order, as ggml's search for its affine k-quants does. `refinements`: how often to
    round and fit again from the best. The error is the weighted square of the difference.
    """
    low, high = np.minimum(x.min(axis=0), 0), x.max(axis=0)
    weighted = weights * x
    sums = sum_down(weights), sum_down(weighted)
    best_error = np.full_like(low, np.inf)
    scale, minimum = np.zeros_like(low), low.copy()

    def keep_better(q: Floats, fitted: Floats, fitted_low: Floats) -> None:
        difference = fitted * q
        difference += fitted_low
        difference -= x
        np.square(difference, out=difference)
        error = sum_down(np.multiply(difference, weights, out=difference))
        better = error < best_error  # always False if the fit is not finite
        np.copyto(best_error, error, where=better)
        np.copyto(scale, fitted, where=better)
        np.copyto(minimum, fitted_low, where=better)

    spread = high - low
    plain = round_to_levels((x - low) * (np.float32(top) * invert(spread)), 0, top)
    keep_better(plain, spread / np.float32(top), low)  # the only one for a group of equal values, which has no fit
    for step in steps:
        q = round_to_levels((x - minimum) * (np.float32(step) * invert(high - minimum)), 0, top)
        keep_better(q, *_solve_affine(q, weights, weighted, sums))
    for _ in range(refinements):
        q = round_to_levels((x - minimum) * invert(scale), 0, top)
        keep_better(q, *_solve_affine(q, weights, weighted, sums))
    return scale, -minimum


def _solve_affine(q: Floats, weights: Floats, weighted: Floats, sums: tuple[Floats, Floats]) -> tuple[Floats, Floats]:
    """Weighted least squares of x = scale * q + low with low <= 0; NaN if all levels are the same.

    weighted: weights * x. sums: of the weights, and of `weighted`, down the columns.
    """
    sum_w, sum_x = sums
    scratch = weights * q
    sum_q = sum_down(scratch)
    sum_qq = sum_down(np.multiply(scratch, q, out=scratch))
    sum_xq = sum_down(np.multiply(weighted, q, out=scratch))
    determinant = sum_w * sum_qq - sum_q * sum_q
    determinant[determinant <= 0] = np.nan
    scale: Floats = np.divide(sum_w * sum_xq - sum_x * sum_q, determinant, dtype=np.float32)
    low: Floats = np.divide(sum_qq * sum_x - sum_q * sum_xq, determinant, dtype=np.float32)
    above_zero = low > 0  # a positive minimum cannot be stored: fit again through zero
    np.copyto(scale, sum_xq * invert(sum_qq), where=above_zero)
    np.copyto(low, 0, where=above_zero)
    return scale, low


def settle_symmetric(
    x: Floats, weights: Floats, d: Floats, codes: Floats, code_range: tuple[int, int], half: int
) -> Floats:
    """Codes (groups,), each the given one or a neighbour within code_range, that make d * code the best scale.

    x, weights: (values, groups). d, codes: (groups,). Values are rounded to -half..half-1.
    """
    best_error, best = np.full_like(d, np.inf), codes.copy()
    for shift in (0, 1, -1):
        tried = np.clip(codes + np.float32(shift), *code_range)
        scale = d * tried
        difference = round_to_levels(x * invert(scale), -half, half - 1)
        difference *= scale
        difference -= x
        np.square(difference, out=difference)
        error = sum_down(np.multiply(difference, weights, out=difference))
        better = error < best_error
        np.copyto(best_error, error, where=better)
        np.copyto(best, tried, where=better)
    return best


def settle_affine(
    x: Floats, weights: Floats, units: tuple[Floats, Floats], codes: tuple[Floats, Floats], code_top: int, top: int
) -> tuple[Floats, Floats]:
    """Codes of scale and offset, each the given one or a neighbour within 0..code_top, with the least error together.

    x, weights: (values, groups). units: what one step of the codes is worth, for scale and offset, both (groups,).
    Values are rounded to 0..top.
    """
    best_error = np.full_like(units[0], np.inf)
    best, best_offset = codes[0].copy(), codes[1].copy()
    for shift, offset_shift in itertools.product((0, 1, -1), repeat=2):
        tried = np.clip(codes[0] + np.float32(shift), 0, code_top)
        tried_offset = np.clip(codes[1] + np.float32(offset_shift), 0, code_top)
        scale, raised = units[0] * tried, x + units[1] * tried_offset
        difference = round_to_levels(raised * invert(scale), 0, top)
        difference *= scale
        difference -= raised
        np.square(difference, out=difference)
        error = sum_down(np.multiply(difference, weights, out=difference))
        better = error < best_error
        np.copyto(best_error, error, where=better)
        np.copyto(best, tried, where=better)
        np.copyto(best_offset, tried_offset, where=better)
    return best, best_offset


def _columns(values: Floats, group: int) -> Floats:
    """(blocks, 256) to (group, blocks * 256 / group): each group a column."""
    return np.ascontiguousarray(values.reshape(-1, group).T)


def _rows(columns: Floats) -> Bytes:
    """The inverse of `_columns`, for values that are small whole numbers: (blocks, 256)."""
    return np.ascontiguousarray(columns.astype(np.uint8).T).reshape(-1, 256)


def _unsigned_codes(scales: Floats, top: int) -> tuple[NDArray[np.float16], Floats, Floats]:
    """Scales (blocks, groups) >= 0 as d * code, code in 0..top: d (blocks,), and per group d again and the code."""
    d = (scales.max(axis=1) / np.float32(top)).astype(np.float16)
    unit = d.astype(np.float32)[:, None]
    codes = round_to_levels(scales * invert(unit), 0, top)
    return d, np.repeat(unit, scales.shape[1]), codes.reshape(-1)


def _signed_codes(scales: Floats, half: int) -> tuple[NDArray[np.float16], Floats, Floats]:
    """Scales (blocks, groups) as d * code, code in -half..half-1: d (blocks,), and per group d again and the code."""
    at = np.abs(scales).argmax(axis=1)[:, None]
    d = (np.take_along_axis(scales, at, axis=1)[:, 0] / np.float32(-half)).astype(np.float16)
    unit = d.astype(np.float32)[:, None]
    codes = round_to_levels(scales * invert(unit), -half, half - 1)
    return d, np.repeat(unit, scales.shape[1]), codes.reshape(-1)


@frozen
class _Affine:
    """Blocks of scale * q - offset ready to be packed: d, dmin (blocks,), codes (blocks, groups), q (blocks, 256)."""

    d: NDArray[np.float16]
    dmin: NDArray[np.float16]
    codes: Bytes
    offset_codes: Bytes
    q: Bytes


def _quantize_affine(x: Floats, weights: Floats, fit: tuple[Floats, Floats], code_top: int, top: int) -> _Affine:
    """Store the fitted scales and offsets of groups x (values, groups), then round the values with the stored ones."""
    groups = 256 // len(x)
    d, unit, codes = _unsigned_codes(fit[0].reshape(-1, groups), code_top)
    dmin, offset_unit, offset_codes = _unsigned_codes(fit[1].reshape(-1, groups), code_top)
    if code_top < 63:  # coarse codes: the nearest is often not the best
        codes, offset_codes = settle_affine(x, weights, (unit, offset_unit), (codes, offset_codes), code_top, top)
    q = round_to_levels((x + offset_unit * offset_codes) * invert(unit * codes), 0, top)
    small = codes.astype(np.uint8).reshape(-1, groups)
    return _Affine(d, dmin, small, offset_codes.astype(np.uint8).reshape(-1, groups), _rows(q))


def _steps(middle: int, first: float, count: int) -> list[float]:
    return [middle + first + 0.1 * index for index in range(count)]


def _weigh(values: Floats, importance: Floats, group: int, spread: float) -> Floats:
    """The importance times the root of the square plus `spread` times the block's mean square, in columns."""
    square = values * values
    mean = np.float32(spread) * np.mean(square, axis=1, keepdims=True)
    return _columns(importance * np.sqrt(square + mean), group)


def encode_q2_k(values: Floats, importance: Floats | None = None) -> Bytes:
    """Groups of 16; scales and minima of 4 bits; weighted by magnitude."""
    x = _columns(values, 16)
    weights = np.abs(x) if importance is None else _weigh(values, importance, 16, 1.0)
    parts = _quantize_affine(x, weights, fit_affine(x, weights, 3, _steps(3, -0.5, 16), refinements=2), 15, 3)
    block = np.empty(len(values), quants.Q2_K)
    block["d"], block["dmin"] = parts.d, parts.dmin
    block["scales"] = parts.codes | (parts.offset_codes << 4)
    block["qs"] = pack_planes(parts.q, 2, 4)
    return block.view(np.uint8).reshape(len(values), -1)


def encode_q3_k(values: Floats, importance: Floats | None = None) -> Bytes:
    """Groups of 16; signed scales of 6 bits; weighted by magnitude."""
    x = _columns(values, 16)
    weights = np.abs(x) if importance is None else _weigh(values, importance, 16, 2.0)
    scales = fit_symmetric(x, weights, 4, _steps(4, -1.0, 21))
    block = np.empty(len(values), quants.Q3_K)
    block["d"], unit, codes = _signed_codes(scales.reshape(len(values), -1), 32)
    codes = settle_symmetric(x, weights, unit, codes, (-32, 31), 4)
    q = _rows(round_to_levels(x * invert(unit * codes), -4, 3) + 4)
    block["scales"] = pack_q3_scales((codes + 32).astype(np.uint8).reshape(len(values), -1))
    block["qs"] = pack_planes(q & np.uint8(3), 2, 4)
    block["hmask"] = pack_planes(q >> np.uint8(2), 1, 8)
    return block.view(np.uint8).reshape(len(values), -1)


def _weigh_affine(x: Floats) -> Floats:
    """Weights for q4_k and q5_k: magnitude plus the group's root mean square."""
    mean_square = sum_down(x * x) / np.float32(len(x))
    weights: Floats = np.abs(x) + np.sqrt(mean_square)
    return weights


def encode_q4_k(values: Floats, importance: Floats | None = None) -> Bytes:
    """Groups of 32; scales and minima of 6 bits."""
    x = _columns(values, 32)
    weights = _weigh_affine(x) if importance is None else _weigh(values, importance, 32, 2.0)
    parts = _quantize_affine(x, weights, fit_affine(x, weights, 15, _steps(15, -1.0, 21)), 63, 15)
    block = np.empty(len(values), quants.Q4_K)
    block["d"], block["dmin"] = parts.d, parts.dmin
    block["scales"] = pack_scales_and_mins(parts.codes, parts.offset_codes)
    block["qs"] = pack_nibbles(parts.q, 32)
    return block.view(np.uint8).reshape(len(values), -1)


def encode_q5_k(values: Floats, importance: Floats | None = None) -> Bytes:
    """Groups of 32; scales and minima of 6 bits."""
    x = _columns(values, 32)
    weights = _weigh_affine(x) if importance is None else _weigh(values, importance, 32, 2.0)
    parts = _quantize_affine(x, weights, fit_affine(x, weights, 31, _steps(31, -0.5, 16)), 63, 31)
    block = np.empty(len(values), quants.Q5_K)
    block["d"], block["dmin"] = parts.d, parts.dmin
    block["scales"] = pack_scales_and_mins(parts.codes, parts.offset_codes)
    block["qs"] = pack_nibbles(parts.q & np.uint8(15), 32)
    block["qh"] = pack_planes(parts.q >> np.uint8(4), 1, 8)
    return block.view(np.uint8).reshape(len(values), -1)


def encode_q6_k(values: Floats, importance: Floats | None = None) -> Bytes:
    """Groups of 16; signed scales of 8 bits; weighted by the square plus the group's mean square, or the importance."""
    x = _columns(values, 16)
    square = x * x
    weights = square + sum_down(square) / np.float32(16) if importance is None else _columns(importance, 16)
    scales = fit_symmetric(x, weights, 32, _steps(32, -0.9, 19))
    block = np.empty(len(values), quants.Q6_K)
    block["d"], unit, codes = _signed_codes(scales.reshape(len(values), -1), 128)
    q = _rows(round_to_levels(x * invert(unit * codes), -32, 31) + 32)
    block["scales"] = codes.reshape(len(values), -1)
    block["ql"] = pack_nibbles(q & np.uint8(15), 64)
    block["qh"] = pack_planes(q >> np.uint8(4), 2, 4)
    return block.view(np.uint8).reshape(len(values), -1)


_STEPS = range(-7, 8)  # the largest magnitude is tried on -127 + step


def _code_by_half() -> Bytes:
    """Index of the nearest level for every half unit from -128 to 127.5: the middles between levels are halves."""
    middles = (IQ4_LEVELS[1:] + IQ4_LEVELS[:-1]) / 2
    return np.searchsorted(middles, np.arange(-256, 256) / 2, side="right").astype(np.uint8)


_CODE_BY_HALF = _code_by_half()
_LEVEL_BY_HALF = IQ4_LEVELS[_CODE_BY_HALF]
_CODE_BY_HALF.flags.writeable = _LEVEL_BY_HALF.flags.writeable = False


def _find_half(scaled: Floats) -> NDArray[np.intp]:
    """Return the index of a value, in units of its scale, in the tables by half units."""
    halves = np.floor(scaled * np.float32(2))
    np.clip(halves, -256, 255, out=halves)
    index: NDArray[np.intp] = halves.astype(np.intp) + np.intp(256)
    return index


def _fit_levels(x: Floats, weights: Floats) -> Floats:
    """Scales (groups,) that make scale * level nearest to x (values, groups) in weighted square error."""
    at = np.abs(x).argmax(axis=0)[None]
    inverse_extreme = invert(np.take_along_axis(x, at, axis=0)[0])
    weighted = weights * x
    best_gain, scale = np.zeros_like(inverse_extreme), np.zeros_like(inverse_extreme)

    def keep_better(inverse: Floats) -> None:
        level = _LEVEL_BY_HALF[_find_half(x * inverse)]
        sum_xl = sum_down(weighted * level)
        np.multiply(level, level, out=level)
        fitted = sum_xl * invert(sum_down(np.multiply(level, weights, out=level)))
        gain = fitted * sum_xl
        better = gain > best_gain
        np.copyto(best_gain, gain, where=better)
        np.copyto(scale, fitted, where=better)

    for step in _STEPS:
        keep_better((IQ4_LEVELS[0] + np.float32(step)) * inverse_extreme)
        keep_better((-IQ4_LEVELS[0] - np.float32(step)) * inverse_extreme)
    for _ in range(_REFINEMENTS):
        keep_better(invert(scale))
    return scale


def encode_iq4_nl(values: Floats, importance: Floats | None = None) -> Bytes:
    """One float16 scale per 32 values; weighted by magnitude."""
    block = np.empty(len(values), IQ4_NL)
    x = _columns(values, 32)
    block["d"] = _fit_levels(x, np.abs(x) if importance is None else _weigh(values, importance, 32, 2.0))
    inverse = invert(block["d"].astype(np.float32))[:, None]
    block["qs"] = pack_nibbles(_CODE_BY_HALF[_find_half(values * inverse)], 16)
    return block.view(np.uint8).reshape(len(values), -1)


def encode_iq4_xs(values: Floats, importance: Floats | None = None) -> Bytes:
    """Scales of 6 bits per 32 values under one float16 scale per 256; weighted by magnitude."""
    groups, x = values.reshape(-1, 32), _columns(values, 32)
    weights = np.abs(x) if importance is None else _weigh(values, importance, 32, 2.0)
    scales = _fit_levels(x, weights).reshape(len(values), 8)
    at = np.abs(scales).argmax(axis=1)[:, None]
    block = np.empty(len(values), IQ4_XS)
    block["d"] = np.take_along_axis(scales, at, axis=1)[:, 0] / np.float32(-32)
    d = block["d"].astype(np.float32)[:, None]
    codes = round_to_levels(scales * invert(d), -32, 31)
    halves = _find_half(groups * invert((d * codes).reshape(-1, 1)))
    block["qs"] = pack_nibbles(_CODE_BY_HALF[halves].reshape(len(values), 256), 16)
    stored = (codes + 32).astype(np.uint8)
    block["scales_l"] = (stored[:, 0::2] & 15) | ((stored[:, 1::2] & 15) << 4)
    high = (stored >> 4).astype(np.uint16) << np.arange(0, 16, 2, dtype=np.uint16)
    block["scales_h"] = np.bitwise_or.reduce(high, axis=1)
    return block.view(np.uint8).reshape(len(values), -1)


_NEAR = 16  # entries of the grid that a rounding chooses among


@cache
def _list_entries() -> tuple[Floats, NDArray[np.uint16]]:
    """The grid of iq3_s, (512, 4) odd numbers, and for each four levels, the first in the lowest three bits, its
    nearest entries, nearest first, (4096, _NEAR)."""
    levels = np.array(quants.load_grid("iq3_s_grid"))[:, None] >> np.arange(0, 16, 4) & 7
    points = np.arange(4096)[:, None] >> np.arange(0, 12, 3) & 7
    distances = np.square(points[:, None] - levels).sum(axis=2)
    nearest = np.argsort(distances, axis=1, kind="stable")[:, :_NEAR].astype(np.uint16)
    return (2 * levels + 1).astype(np.float32), nearest


def _find_levels(x: Floats) -> NDArray[np.uint16]:
    """The nearest odd numbers up to 15 of each four of x (32, groups), in `_list_entries`' numbering: (8, groups)."""
    levels = round_to_levels((x - np.float32(1)) * np.float32(0.5), 0, 7).astype(np.uint16).reshape(8, 4, -1)
    shifts = np.array([[0], [3], [6], [9]], np.uint16)
    found: NDArray[np.uint16] = np.bitwise_or.reduce(levels << shifts, axis=1)
    return found


def encode_iq3_s(values: Floats, importance: Floats | None = None) -> Bytes:
    """Four magnitudes are an entry of the grid; scales of 4 bits per 32 values under one float16 scale per 256.

    Scales are searched for with the nearest entries; weighted by magnitude. With the stored scales each four take the
    entry with the least error among those near them.
    """
    x = np.abs(_columns(values, 32))
    weights = x if importance is None else _weigh(values, importance, 32, 2.0)
    grid, near = _list_entries()
    weighted, inverse = weights * x, invert(x.max(axis=0))
    best_gain, scale = np.zeros_like(inverse), np.zeros_like(inverse)
    for step in np.arange(13.2, 16.9, 0.4, dtype=np.float32):
        q = np.moveaxis(grid[near[_find_levels(x * (step * inverse)), 0]], 2, 1).reshape(x.shape)
        sum_xq, sum_qq = sum_down(weighted * q), sum_down(weights * q * q)
        fitted = sum_xq * invert(sum_qq)
        better = fitted * sum_xq > best_gain
        np.copyto(best_gain, fitted * sum_xq, where=better)
        np.copyto(scale, fitted, where=better)
    block = np.empty(len(values), IQ3_S)
    scales = scale.reshape(-1, 8)
    block["d"] = scales.max(axis=1) / np.float32(31)
    d = block["d"].astype(np.float32)[:, None]
    codes = round_to_levels((scales * invert(d) - np.float32(1)) * np.float32(0.5), 0, 15)
    unit = (d * (2 * codes + 1)).reshape(-1)
    tried = near[_find_levels(x * invert(unit))]  # (8, groups, _NEAR)
    best_error, chosen = np.full(tried.shape[:2], np.inf, np.float32), tried[:, :, 0].copy()
    fours, weighs = x.reshape(8, 4, -1), weights.reshape(8, 4, -1)
    for place in range(_NEAR):
        difference = fours - np.moveaxis(grid[tried[:, :, place]], 2, 1) * unit
        np.square(difference, out=difference)
        difference *= weighs
        error = difference[:, 0] + difference[:, 1] + difference[:, 2] + difference[:, 3]
        better = error < best_error
        np.copyto(best_error, error, where=better)
        np.copyto(chosen, tried[:, :, place], where=better)
    indices = np.ascontiguousarray(chosen.T).reshape(len(values), 64)
    block["qs"], block["qh"] = (indices & 255).astype(np.uint8), np.packbits(indices >> 8, axis=1, bitorder="little")
    block["signs"] = np.packbits(values < 0, axis=1, bitorder="little")
    block["scales"] = pack_nibbles(codes.astype(np.uint8), 1)
    return block.view(np.uint8).reshape(len(values), -1)


def encode_mxfp4(values: Floats) -> Bytes:
    """A power of two per 32 values, so that the largest magnitude lies in the levels' upper octave."""
    largest = np.abs(values).max(axis=1)
    octaves = np.frexp(largest)[1] - 1  # exact, which NumPy's log2 is not on every processor
    exponents = np.where(largest > 0, np.where(np.isinf(largest), 254, octaves + 125), 0)
    block = np.empty(len(values), MXFP4)
    block["e"] = np.clip(exponents, 0, 254).astype(np.uint8)
    scale = scale_of_exponent(block["e"])[:, None]
    magnitudes = MXFP4_LEVELS[:8]
    q = np.zeros(values.shape, np.uint8)
    for middle in (magnitudes[1:] + magnitudes[:-1]) / 2:  # a value in the middle goes to the smaller magnitude
        q += np.abs(values) > middle * scale
    q[(values < 0) & (q > 0)] |= 8
    block["qs"] = pack_nibbles(q, 16)
    return block.view(np.uint8).reshape(len(values), -1)


def _weigh_symmetric(values: Floats, importance: Floats, half: int) -> tuple[NDArray[np.float16], Bytes]:
    """Scales (blocks,) and numbers (blocks, 32) within 0..2 * half - 1 with the least error, for q4_0 and q5_0."""
    x = _columns(values, 32)
    d = fit_symmetric(x, _weigh(values, importance, 32, 1.0), half, _steps(half, -0.9, 19)).astype(np.float16)
    q = round_to_levels(x * invert(d.astype(np.float32)), -half, half - 1) + np.float32(half)
    return d, np.ascontiguousarray(q.astype(np.uint8).T)


def encode_weighted_q4_0(values: Floats, importance: Floats) -> Bytes:
    """Search for the scale; the plain encoder takes that of the largest magnitude."""
    block = np.empty(len(values), quants.Q4_0)
    block["d"], q = _weigh_symmetric(values, importance, 8)
    block["qs"] = pack_nibbles(q, 16)
    return block.view(np.uint8).reshape(len(values), -1)


def encode_weighted_q5_0(values: Floats, importance: Floats) -> Bytes:
    """Search for the scale, as for q4_0."""
    block = np.empty(len(values), quants.Q5_0)
    block["d"], q = _weigh_symmetric(values, importance, 16)
    block["qs"], block["qh"] = pack_nibbles(q & np.uint8(15), 16), np.packbits(q >> 4, axis=1, bitorder="little")
    return block.view(np.uint8).reshape(len(values), -1)


WEIGHTED: dict[str, Callable[[Floats, Floats], Bytes]] = {
    "q4_0": encode_weighted_q4_0,
    "q5_0": encode_weighted_q5_0,
    "q2_k": encode_q2_k,
    "q3_k": encode_q3_k,
    "q4_k": encode_q4_k,
    "q5_k": encode_q5_k,
    "q6_k": encode_q6_k,
    "iq3_s": encode_iq3_s,
    "iq4_nl": encode_iq4_nl,
    "iq4_xs": encode_iq4_xs,
}  # the encoders that use an importance
