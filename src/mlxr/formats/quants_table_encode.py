"""Encoders of iq4_nl, iq4_xs and mxfp4.

Knows bytes and float32, nothing of files or tensors. An encoder takes float32 (blocks, block_size) and gives uint8
(blocks, type_size). mxfp4 follows ggml's plain rule (the exponent of the largest magnitude, then the nearest level);
the iq4 types search for the scale that loses least, weighted by the magnitude of each value.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .quants_plain import Bytes, Floats
from .quants_small import invert, pack_nibbles
from .quants_table import IQ4_LEVELS, IQ4_NL, IQ4_XS, MXFP4, MXFP4_LEVELS, scale_of_exponent
from .scale_search import round_to_levels, sum_down

_STEPS = range(-7, 8)  # the largest magnitude is tried on -127 + step
_REFINEMENTS = 2


def _code_by_half() -> Bytes:
    """Index of the nearest level for every half unit from -128 to 127.5: the middles between levels are halves."""
    middles = (IQ4_LEVELS[1:] + IQ4_LEVELS[:-1]) / 2
    return np.searchsorted(middles, np.arange(-256, 256) / 2, side="right").astype(np.uint8)


_CODE_BY_HALF = _code_by_half()
_LEVEL_BY_HALF = IQ4_LEVELS[_CODE_BY_HALF]
_CODE_BY_HALF.flags.writeable = _LEVEL_BY_HALF.flags.writeable = False


def _find_half(scaled: Floats) -> NDArray[np.intp]:
    """Where a value, in units of its scale, stands in the tables by half units."""
    halves = np.floor(scaled * np.float32(2))
    np.clip(halves, -256, 255, out=halves)
    index: NDArray[np.intp] = halves.astype(np.intp) + np.intp(256)
    return index


def _fit_levels(x: Floats) -> Floats:
    """Scales (groups,) that make scale * level nearest to x (values, groups) in square error weighted by magnitude."""
    at = np.abs(x).argmax(axis=0)[None]
    inverse_extreme = invert(np.take_along_axis(x, at, axis=0)[0])
    weights = np.abs(x)
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


def encode_iq4_nl(values: Floats) -> Bytes:
    """One float16 scale per 32 values."""
    block = np.empty(len(values), IQ4_NL)
    block["d"] = _fit_levels(np.ascontiguousarray(values.T))
    inverse = invert(block["d"].astype(np.float32))[:, None]
    block["qs"] = pack_nibbles(_CODE_BY_HALF[_find_half(values * inverse)], 16)
    return block.view(np.uint8).reshape(len(values), -1)


def encode_iq4_xs(values: Floats) -> Bytes:
    """Scales of 6 bits per 32 values under one float16 scale per 256."""
    groups = values.reshape(-1, 32)
    scales = _fit_levels(np.ascontiguousarray(groups.T)).reshape(len(values), 8)
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
