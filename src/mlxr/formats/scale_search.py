"""Search for the scale (and minimum) that loses least when a group of weights is rounded to few levels.

Knows arrays of groups; nothing of byte layouts. Groups stand in columns, (values, groups), so that every step runs
over all groups at once and sums run down the columns. The method is that of ggml's k-quants: try a row of scales
around the one that spans the group, round, fit the best scale for that rounding by weighted least squares, keep the
best. Where levels are few, two things go further: `fit_symmetric` repeats rounding and fitting from there, and as the
scales are stored in a few bits themselves, `settle_symmetric` and `settle_affine` look at the neighbours of the nearest
codes and keep the one that loses least, which the nearest often is not.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np

from .quants_plain import Floats
from .quants_small import invert

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
        gain = fitted * sum_xq  # how much less error than with all zeros
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
        better = error < best_error  # never where the fit is not finite
        np.copyto(best_error, error, where=better)
        np.copyto(scale, fitted, where=better)
        np.copyto(minimum, fitted_low, where=better)

    spread = high - low
    plain = round_to_levels((x - low) * (np.float32(top) * invert(spread)), 0, top)
    keep_better(plain, spread / np.float32(top), low)  # all there is for a group of equal values, which has no fit
    for step in steps:
        q = round_to_levels((x - minimum) * (np.float32(step) * invert(high - minimum)), 0, top)
        keep_better(q, *_solve_affine(q, weights, weighted, sums))
    for _ in range(refinements):
        q = round_to_levels((x - minimum) * invert(scale), 0, top)
        keep_better(q, *_solve_affine(q, weights, weighted, sums))
    return scale, -minimum


def _solve_affine(q: Floats, weights: Floats, weighted: Floats, sums: tuple[Floats, Floats]) -> tuple[Floats, Floats]:
    """Weighted least squares of x = scale * q + low with low <= 0; NaN where the levels are all the same.

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
    """Codes of scale and offset, each the given one or a neighbour within 0..code_top, that lose least together.

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
