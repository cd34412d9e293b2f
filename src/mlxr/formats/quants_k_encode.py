"""Encoders of the k-types q2_k to q6_k.

Knows bytes and float32, nothing of files or tensors. An encoder takes float32 (blocks, 256) and gives uint8 (blocks,
type_size): find each group's scale (`scale_search`), round the scales themselves to their few bits, then round the
values with the scales as stored. Layouts and packing are `quants_k`'s.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from . import quants_k
from .quants_k import pack_planes, pack_q3_scales, pack_scales_and_mins
from .quants_plain import Bytes, Floats
from .quants_small import invert, pack_nibbles
from .scale_search import fit_affine, fit_symmetric, round_to_levels, settle_affine, settle_symmetric, sum_down


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


@dataclass(frozen=True, slots=True)
class _Affine:
    """Blocks of scale * q - offset ready to be packed: d, dmin (blocks,), codes (blocks, groups), q (blocks, 256)."""

    d: NDArray[np.float16]
    dmin: NDArray[np.float16]
    codes: Bytes
    offset_codes: Bytes
    q: Bytes


def _quantize_affine(x: Floats, weights: Floats, fit: tuple[Floats, Floats], code_top: int, top: int) -> _Affine:
    """Store the fitted scales and offsets of groups x (values, groups), then round the values with what was stored."""
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


def encode_q2_k(values: Floats) -> Bytes:
    """Groups of 16; scales and minima of 4 bits; weighted by magnitude."""
    x = _columns(values, 16)
    weights = np.abs(x)
    parts = _quantize_affine(x, weights, fit_affine(x, weights, 3, _steps(3, -0.5, 16), refinements=2), 15, 3)
    block = np.empty(len(values), quants_k.Q2_K)
    block["d"], block["dmin"] = parts.d, parts.dmin
    block["scales"] = parts.codes | (parts.offset_codes << 4)
    block["qs"] = pack_planes(parts.q, 2, 4)
    return block.view(np.uint8).reshape(len(values), -1)


def encode_q3_k(values: Floats) -> Bytes:
    """Groups of 16; signed scales of 6 bits; weighted by magnitude."""
    x = _columns(values, 16)
    weights = np.abs(x)
    scales = fit_symmetric(x, weights, 4, _steps(4, -1.0, 21))
    block = np.empty(len(values), quants_k.Q3_K)
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


def encode_q4_k(values: Floats) -> Bytes:
    """Groups of 32; scales and minima of 6 bits."""
    x = _columns(values, 32)
    weights = _weigh_affine(x)
    parts = _quantize_affine(x, weights, fit_affine(x, weights, 15, _steps(15, -1.0, 21)), 63, 15)
    block = np.empty(len(values), quants_k.Q4_K)
    block["d"], block["dmin"] = parts.d, parts.dmin
    block["scales"] = pack_scales_and_mins(parts.codes, parts.offset_codes)
    block["qs"] = pack_nibbles(parts.q, 32)
    return block.view(np.uint8).reshape(len(values), -1)


def encode_q5_k(values: Floats) -> Bytes:
    """Groups of 32; scales and minima of 6 bits."""
    x = _columns(values, 32)
    weights = _weigh_affine(x)
    parts = _quantize_affine(x, weights, fit_affine(x, weights, 31, _steps(31, -0.5, 16)), 63, 31)
    block = np.empty(len(values), quants_k.Q5_K)
    block["d"], block["dmin"] = parts.d, parts.dmin
    block["scales"] = pack_scales_and_mins(parts.codes, parts.offset_codes)
    block["qs"] = pack_nibbles(parts.q & np.uint8(15), 32)
    block["qh"] = pack_planes(parts.q >> np.uint8(4), 1, 8)
    return block.view(np.uint8).reshape(len(values), -1)


def encode_q6_k(values: Floats) -> Bytes:
    """Groups of 16; signed scales of 8 bits; weighted by the square plus the group's mean square."""
    x = _columns(values, 16)
    square = x * x
    scales = fit_symmetric(x, square + sum_down(square) / np.float32(16), 32, _steps(32, -0.9, 19))
    block = np.empty(len(values), quants_k.Q6_K)
    block["d"], unit, codes = _signed_codes(scales.reshape(len(values), -1), 128)
    q = _rows(round_to_levels(x * invert(unit * codes), -32, 31) + 32)
    block["scales"] = codes.reshape(len(values), -1)
    block["ql"] = pack_nibbles(q & np.uint8(15), 64)
    block["qh"] = pack_planes(q >> np.uint8(4), 2, 4)
    return block.view(np.uint8).reshape(len(values), -1)
