"""The byte layout of each weight type with its decoder, and the encoders that need no search.

Knows bytes and float32, nothing of files or tensors. A decoder takes blocks as uint8 (blocks, type_size) and gives
float32 (blocks, block_size); an encoder goes the other way. All values are little endian. Layouts are those of
ggml-common.h: byte j of `qs` holds value j in its low half and value j + 16 in its high half. mxfp4 is that of the
OCP microscaling formats (MX) specification 1.0. Encoders that search for scales are in `quants_encode`.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlxr.core import tables


@cache
def load_grid(name: str) -> array[int]:
    """The numbers of a grid (`iq3_s_grid`), 16 bits each: two or four bits for each of eight or four columns.

    They are read from `grids.h`, which C++ and GPU sources include as well.
    """
    text = Path(tables.__file__).with_name("grids.h").read_text(encoding="utf-8")
    found = re.search(rf"^GRID\({name.upper()}, \d+\) = \{{(.*?)\}};", text, re.MULTILINE | re.DOTALL)
    assert found is not None, name
    return array("H", (int(number, 16) for number in re.findall(r"0x\w+", found[1])))


Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


def decode_numbers(dtype: str) -> Callable[[Bytes], Floats]:
    """A decoder of plain numbers. f64 rounds, to infinity beyond float32's range; integers beyond 2**24 lose bits."""

    def decode(blocks: Bytes) -> Floats:
        return blocks.view(dtype).astype(np.float32)

    return decode


def encode_numbers(dtype: str) -> Callable[[Floats], Bytes]:
    """An encoder that rounds to nearest even. The caller checks that the values fit (`encode_tensor` does)."""
    return lambda values: values.astype(dtype).view(np.uint8)


def decode_bf16(blocks: Bytes) -> Floats:
    """Decode exactly: bfloat16 is the upper half of a float32."""
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def encode_bf16(values: Floats) -> Bytes:
    """Round to nearest even; NaN stays NaN (made quiet, as ggml does)."""
    bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16
    quiet = (bits >> 16) | 64
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(is_nan, quiet, rounded).astype("<u2").view(np.uint8)


Q4_0 = np.dtype([("d", "<f2"), ("qs", "u1", 16)])
Q4_1 = np.dtype([("d", "<f2"), ("m", "<f2"), ("qs", "u1", 16)])
Q5_0 = np.dtype([("d", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)])
Q5_1 = np.dtype([("d", "<f2"), ("m", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)])
Q8_0 = np.dtype([("d", "<f2"), ("qs", "i1", 32)])


def unpack_nibbles(packed: Bytes, run: int) -> Bytes:
    """(n, bytes) to (n, 2 * bytes): of each `run` bytes first the low halves, then the high halves."""
    runs = packed.reshape(len(packed), -1, 1, run)
    return np.concatenate([runs & 15, runs >> 4], axis=2).reshape(len(packed), -1)


def pack_nibbles(values: Bytes, run: int) -> Bytes:
    """The inverse of `unpack_nibbles`: values of 0..15, (n, 2 * bytes) to (n, bytes)."""
    runs = values.reshape(len(values), -1, 2, run)
    packed = runs[:, :, 0] | (runs[:, :, 1] << np.uint8(4))
    return packed.reshape(len(values), -1)


def column(field: NDArray[np.float16]) -> Floats:
    """One scale per block, (n,) float16, as a float32 column (n, 1) to multiply rows with."""
    return field.astype(np.float32)[:, None]


def decode_q4_0(blocks: Bytes) -> Floats:
    """d * (q - 8)"""
    block = blocks.view(Q4_0)[:, 0]
    q = unpack_nibbles(block["qs"], 16).astype(np.float32) - np.float32(8)
    return column(block["d"]) * q


def decode_q4_1(blocks: Bytes) -> Floats:
    """d * q + m"""
    block = blocks.view(Q4_1)[:, 0]
    q = unpack_nibbles(block["qs"], 16).astype(np.float32)
    return column(block["d"]) * q + column(block["m"])


def _unpack_fifth_bits(qs: Bytes, qh: Bytes) -> Floats:
    low = unpack_nibbles(qs, 16)
    high = np.unpackbits(qh, axis=1, bitorder="little")
    return (low | (high << 4)).astype(np.float32)


def decode_q5_0(blocks: Bytes) -> Floats:
    """d * (q - 16), the fifth bit of value j is bit j of `qh`"""
    block = blocks.view(Q5_0)[:, 0]
    q = _unpack_fifth_bits(block["qs"], block["qh"]) - np.float32(16)
    return column(block["d"]) * q


def decode_q5_1(blocks: Bytes) -> Floats:
    """d * q + m"""
    block = blocks.view(Q5_1)[:, 0]
    q = _unpack_fifth_bits(block["qs"], block["qh"])
    return column(block["d"]) * q + column(block["m"])


def decode_q8_0(blocks: Bytes) -> Floats:
    """Return d * q."""
    block = blocks.view(Q8_0)[:, 0]
    return column(block["d"]) * block["qs"].astype(np.float32)


_SMALLEST_SCALE = np.finfo(np.float32).tiny


def invert(scale: Floats) -> Floats:
    """1 / scale, or 0 if the scale is 0 (a block of zeros) or so small that its inverse overflows."""
    return np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=np.abs(scale) >= _SMALLEST_SCALE)


def _quantize_signed(values: Floats, half: int) -> tuple[Floats, Bytes]:
    """Scale so that the value of largest magnitude becomes exactly -half; give (d (n, 1), q (n, 32) in 0..2*half-1)."""
    at = np.abs(values).argmax(axis=1)[:, None]
    d = np.take_along_axis(values, at, axis=1) / np.float32(-half)
    shifted = np.trunc(values * invert(d) + np.float32(half + 0.5))
    return d, shifted.clip(0, 2 * half - 1).astype(np.uint8)


def quantize_between(values: Floats, top: int) -> tuple[Floats, Floats, Bytes]:
    """Spread 0..top over [min, max]; give (d (n, 1), min (n, 1), q (n, 32))."""
    low = values.min(axis=1, keepdims=True)
    d = (values.max(axis=1, keepdims=True) - low) / np.float32(top)
    q = np.trunc((values - low) * invert(d) + np.float32(0.5))
    return d, low, q.clip(0, top).astype(np.uint8)


def encode_q4_0(values: Floats) -> Bytes:
    """The value of largest magnitude becomes -8 * d."""
    block = np.empty(len(values), Q4_0)
    d, q = _quantize_signed(values, 8)
    block["d"], block["qs"] = d[:, 0], pack_nibbles(q, 16)
    return block.view(np.uint8).reshape(len(values), -1)


def encode_q4_1(values: Floats) -> Bytes:
    """0..15 spread over the block's range."""
    block = np.empty(len(values), Q4_1)
    d, low, q = quantize_between(values, 15)
    block["d"], block["m"], block["qs"] = d[:, 0], low[:, 0], pack_nibbles(q, 16)
    return block.view(np.uint8).reshape(len(values), -1)


def encode_q5_0(values: Floats) -> Bytes:
    """The value of largest magnitude becomes -16 * d."""
    block = np.empty(len(values), Q5_0)
    d, q = _quantize_signed(values, 16)
    block["d"], block["qs"] = d[:, 0], pack_nibbles(q & np.uint8(15), 16)
    block["qh"] = np.packbits(q >> 4, axis=1, bitorder="little")
    return block.view(np.uint8).reshape(len(values), -1)


def encode_q5_1(values: Floats) -> Bytes:
    """0..31 spread over the block's range."""
    block = np.empty(len(values), Q5_1)
    d, low, q = quantize_between(values, 31)
    block["d"], block["m"], block["qs"] = d[:, 0], low[:, 0], pack_nibbles(q & np.uint8(15), 16)
    block["qh"] = np.packbits(q >> 4, axis=1, bitorder="little")
    return block.view(np.uint8).reshape(len(values), -1)


def encode_q8_0(values: Floats) -> Bytes:
    """Largest magnitude becomes 127; halves are rounded away from zero."""
    block = np.empty(len(values), Q8_0)
    d = np.abs(values).max(axis=1, keepdims=True) / np.float32(127)
    scaled = values * invert(d)
    magnitude = np.abs(scaled)
    whole = np.floor(magnitude)
    rounded = whole + np.floor(np.float32(2) * (magnitude - whole))
    block["d"], block["qs"] = d[:, 0], np.copysign(rounded, scaled).astype(np.int8)
    return block.view(np.uint8).reshape(len(values), -1)


Q2_K = np.dtype([("scales", "u1", 16), ("qs", "u1", 64), ("d", "<f2"), ("dmin", "<f2")])
Q3_K = np.dtype([("hmask", "u1", 32), ("qs", "u1", 64), ("scales", "u1", 12), ("d", "<f2")])
Q4_K = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qs", "u1", 128)])
Q5_K = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128)])
Q6_K = np.dtype([("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", "<f2")])
Q8_K = np.dtype([("d", "<f4"), ("qs", "i1", 256), ("bsums", "<i2", 16)])


def unpack_planes(packed: Bytes, bits: int, planes: int) -> Bytes:
    """Bit planes over runs of 32 bytes: value 32 * k + l of a run is `bits` bits of byte l at bit k * bits.

    (n, 32 * runs) to (n, 32 * runs * planes), runs one after another.
    """
    shifts = (np.arange(planes, dtype=np.uint8) * np.uint8(bits))[:, None]
    runs = packed.reshape(len(packed), -1, 1, 32)
    values: Bytes = (runs >> shifts) & np.uint8((1 << bits) - 1)
    return values.reshape(len(packed), -1)


def pack_planes(values: Bytes, bits: int, planes: int) -> Bytes:
    """Pack what `unpack_planes` unpacks."""
    shifts = (np.arange(planes, dtype=np.uint8) * np.uint8(bits))[:, None]
    runs = values.reshape(len(values), -1, planes, 32)
    packed: Bytes = np.bitwise_or.reduce(runs << shifts, axis=2)
    return packed.reshape(len(values), -1)


def unpack_scales_and_mins(packed: Bytes) -> tuple[Bytes, Bytes]:
    """The 12 bytes of q4_k and q5_k to 8 scales and 8 minima of 6 bits each, both (n, 8)."""
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=1)
    mins = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=1)
    return scales, mins


def pack_scales_and_mins(scales: Bytes, mins: Bytes) -> Bytes:
    """Pack what `unpack_scales_and_mins` unpacks."""
    first = scales[:, :4] | ((scales[:, 4:] >> 4) << 6)
    second = mins[:, :4] | ((mins[:, 4:] >> 4) << 6)
    third = (scales[:, 4:] & 15) | ((mins[:, 4:] & 15) << 4)
    return np.concatenate([first, second, third], axis=1)


def unpack_q3_scales(packed: Bytes) -> Bytes:
    """The 12 bytes of q3_k to 16 scales of 6 bits (0..63, meaning -32..31), (n, 16)."""
    low = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1)
    high = np.concatenate([(packed[:, 8:] >> shift) & 3 for shift in (0, 2, 4, 6)], axis=1)
    scales: Bytes = low | (high << 4)
    return scales


def pack_q3_scales(scales: Bytes) -> Bytes:
    """Pack what `unpack_q3_scales` unpacks."""
    low = (scales[:, :8] & 15) | ((scales[:, 8:] & 15) << 4)
    top = scales >> 4
    high = top[:, 0:4] | (top[:, 4:8] << 2) | (top[:, 8:12] << 4) | (top[:, 12:16] << 6)
    return np.concatenate([low, high], axis=1)


def _apply_scales(scales: Floats, values: NDArray[np.generic]) -> Floats:
    """Groups of values times their group's scale: (n, groups) and (n, 256) to (n, groups, 256 / groups)."""
    grouped = values.reshape(*scales.shape, -1).astype(np.float32)
    scaled: Floats = scales[:, :, None] * grouped
    return scaled


def decode_q2_k(blocks: Bytes) -> Floats:
    """d * scale * q - dmin * min; groups of 16; scale in the low, min in the high half of each byte of `scales`"""
    block = blocks.view(Q2_K)[:, 0]
    scales = column(block["d"]) * (block["scales"] & 15).astype(np.float32)
    mins = column(block["dmin"]) * (block["scales"] >> 4).astype(np.float32)
    values = _apply_scales(scales, unpack_planes(block["qs"], 2, 4)) - mins[:, :, None]
    return values.reshape(len(blocks), -1)


def decode_q3_k(blocks: Bytes) -> Floats:
    """d * (scale - 32) * (q - (0 if its bit in hmask is set else 4)); groups of 16"""
    block = blocks.view(Q3_K)[:, 0]
    scales = column(block["d"]) * (unpack_q3_scales(block["scales"]).astype(np.float32) - np.float32(32))
    q = unpack_planes(block["qs"], 2, 4) | (unpack_planes(block["hmask"], 1, 8) << 2)
    return _apply_scales(scales, q.astype(np.int8) - np.int8(4)).reshape(len(blocks), -1)


def decode_q4_k(blocks: Bytes) -> Floats:
    """d * scale * q - dmin * min; groups of 32"""
    block = blocks.view(Q4_K)[:, 0]
    scales, mins = unpack_scales_and_mins(block["scales"])
    offset = (column(block["dmin"]) * mins.astype(np.float32))[:, :, None]
    values = _apply_scales(column(block["d"]) * scales.astype(np.float32), unpack_nibbles(block["qs"], 32)) - offset
    return values.reshape(len(blocks), -1)


def decode_q5_k(blocks: Bytes) -> Floats:
    """As q4_k with a fifth bit in the planes of `qh`"""
    block = blocks.view(Q5_K)[:, 0]
    scales, mins = unpack_scales_and_mins(block["scales"])
    q = unpack_nibbles(block["qs"], 32) | (unpack_planes(block["qh"], 1, 8) << 4)
    offset = (column(block["dmin"]) * mins.astype(np.float32))[:, :, None]
    values = _apply_scales(column(block["d"]) * scales.astype(np.float32), q) - offset
    return values.reshape(len(blocks), -1)


def decode_q6_k(blocks: Bytes) -> Floats:
    """d * scale * (q - 32); groups of 16; 4 low bits in `ql` (runs of 64), 2 high bits in the planes of `qh`"""
    block = blocks.view(Q6_K)[:, 0]
    q = unpack_nibbles(block["ql"], 64) | (unpack_planes(block["qh"], 2, 4) << 4)
    scales = column(block["d"]) * block["scales"].astype(np.float32)
    return _apply_scales(scales, q.astype(np.int8) - np.int8(32)).reshape(len(blocks), -1)


def decode_q8_k(blocks: Bytes) -> Floats:
    """d * q; `bsums` (sums of 16) serve dot products and say nothing new"""
    block = blocks.view(Q8_K)[:, 0]
    scale: Floats = block["d"].astype(np.float32)
    return scale[:, None] * block["qs"].astype(np.float32)


IQ4_NL = np.dtype([("d", "<f2"), ("qs", "u1", 16)])
IQ4_XS = np.dtype([("d", "<f2"), ("scales_h", "<u2"), ("scales_l", "u1", 4), ("qs", "u1", 128)])
MXFP4 = np.dtype([("e", "u1"), ("qs", "u1", 16)])

# The 16 levels of iq4_nl and iq4_xs: denser around zero, like weights.
IQ4_LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32)
# E2M1 values times two (0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives), so `scale_of_exponent` halves to make up.
MXFP4_LEVELS = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.float32)
IQ4_LEVELS.flags.writeable = MXFP4_LEVELS.flags.writeable = False


def scale_of_exponent(e: Bytes) -> Floats:
    """2 ** (e - 128) of an E8M0 byte; subnormal below the normal range of float32."""
    wide = e.astype(np.uint32)
    subnormal = np.uint32(0x00200000) << np.minimum(wide, 1)
    normal = (np.maximum(wide, 2) - 1) << 23
    return np.where(wide < 2, subnormal, normal).astype(np.uint32).view(np.float32)


def decode_iq4_nl(blocks: Bytes) -> Floats:
    """Return d * level[q]."""
    block = blocks.view(IQ4_NL)[:, 0]
    return column(block["d"]) * IQ4_LEVELS[unpack_nibbles(block["qs"], 16)]


def decode_iq4_xs(blocks: Bytes) -> Floats:
    """d * (scale - 32) * level[q]; groups of 32; 4 low bits of a scale in `scales_l`, 2 high bits in `scales_h`"""
    block = blocks.view(IQ4_XS)[:, 0]
    low = np.stack([block["scales_l"] & 15, block["scales_l"] >> 4], axis=2).reshape(len(blocks), 8)
    high = (block["scales_h"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16)) & 3
    scales = (low | (high << 4)).astype(np.float32) - np.float32(32)
    levels = IQ4_LEVELS[unpack_nibbles(block["qs"], 16)].reshape(len(blocks), 8, 32)
    values: Floats = (column(block["d"]) * scales)[:, :, None] * levels
    return values.reshape(len(blocks), -1)


def decode_mxfp4(blocks: Bytes) -> Floats:
    """2 ** (e - 128) * level[q]"""
    block = blocks.view(MXFP4)[:, 0]
    return scale_of_exponent(block["e"])[:, None] * MXFP4_LEVELS[unpack_nibbles(block["qs"], 16)]


NVFP4 = np.dtype([("d", "u1", 4), ("qs", "u1", 32)])
NVFP4_SCALED = np.dtype([("factor", "<f4"), ("blocks", "u1", NVFP4.itemsize)])


def decode_nvfp4(blocks: Bytes) -> Floats:
    """scale * level[q], a scale in E4M3 for 16 columns; its sign is ignored and 127 means zero"""
    block = blocks.view(NVFP4)[:, 0]
    scales = np.where(block["d"] == 127, np.float32(0), _E4M3_HALVES[block["d"] & 127])
    return _apply_scales(scales, MXFP4_LEVELS[unpack_nibbles(block["qs"], 8)]).reshape(len(blocks), -1)


def decode_nvfp4_scaled(blocks: Bytes) -> Floats:
    """nvfp4 with a factor for the scales: not a type of files, `mlx_affine` makes it from a weight's tensors"""
    block = blocks.view(NVFP4_SCALED)[:, 0]
    parts = np.ascontiguousarray(block["blocks"]).view(NVFP4)[:, 0]
    scales = np.where(parts["d"] == 127, np.float32(0), _E4M3_HALVES[parts["d"] & 127]) * block["factor"][:, None]
    return _apply_scales(scales, MXFP4_LEVELS[unpack_nibbles(parts["qs"], 8)]).reshape(len(blocks), -1)


# MLX's affine blocks, which `mlx_affine` makes of a checkpoint's tensors: in no file. 4 bits lie in the order of q4_0.
AFFINE_BLOCKS = {
    (bits, columns): np.dtype([("scale", "<f4"), ("bias", "<f4"), ("q", "u1", columns * bits // 8)])
    for bits in (4, 8)
    for columns in (32, 64)
}


def decode_affine(blocks: Bytes, bits: int, columns: int) -> Floats:
    """scale * q + bias"""
    block = blocks.view(AFFINE_BLOCKS[bits, columns])[:, 0]
    q = unpack_nibbles(block["q"], 16) if bits == 4 else block["q"]
    values: Floats = block["scale"][:, None] * q.astype(np.float32) + block["bias"][:, None]
    return values


def encode_affine(values: Floats, bits: int) -> Bytes:
    """0..15 or 0..255 spread over the block's range."""
    block = np.empty(len(values), AFFINE_BLOCKS[bits, values.shape[1]])
    scale, low, q = quantize_between(values, (1 << bits) - 1)
    block["scale"], block["bias"] = scale[:, 0], low[:, 0]
    block["q"] = pack_nibbles(q, 16) if bits == 4 else q
    return block.view(np.uint8).reshape(len(values), -1)


def decode_f8_e4m3(blocks: Bytes) -> Floats:
    """1 sign, 4 bits of exponent (bias 7), 3 of fraction; no infinities, and 127 is NaN (OCP's E4M3)."""
    exponent, fraction = np.int32(blocks >> 3 & 15), np.float32(blocks & 7)
    magnitude = np.ldexp(fraction + np.where(exponent > 0, 8, 0).astype(np.float32), np.maximum(exponent, 1) - 10)
    signed = np.where(blocks & 128, -magnitude, magnitude)
    return np.where(blocks & 127 == 127, np.float32(np.nan), signed).astype(np.float32)


# Half of each number without a sign; 127 (NaN) has the value that its bits have as a number.
_E4M3_HALVES = decode_f8_e4m3(np.arange(128, dtype=np.uint8)[:, None])[:, 0] / np.float32(2)
_E4M3_HALVES[127] = 240
F8_E4M3_128 = np.dtype([("scale", "<f4"), ("codes", "u1", 128)])


def decode_f8_e4m3_128(blocks: Bytes) -> Floats:
    """scale * E4M3; not a type of files, `packed` makes it from a weight's tensors"""
    block = blocks.view(F8_E4M3_128)[:, 0]
    values: Floats = block["scale"][:, None] * decode_f8_e4m3(block["codes"])
    return values


def decode_f8_e5m2(blocks: Bytes) -> Floats:
    """The upper byte of an f16."""
    return (blocks.astype(np.uint16) << 8).view(np.float16).astype(np.float32)


# Types with a grid: an index stands for the magnitudes of eight columns (IQ1, IQ2) or four (IQ3).
IQ3_S = np.dtype([("d", "<f2"), ("qs", "u1", 64), ("qh", "u1", 8), ("signs", "u1", 32), ("scales", "u1", 4)])
IQ3_XXS = np.dtype([("d", "<f2"), ("qs", "u1", 64), ("signs", "<u4", 8)])
IQ2_XXS = np.dtype([("d", "<f2"), ("qs", "<u4", 16)])
IQ2_XS = np.dtype([("d", "<f2"), ("qs", "<u2", 32), ("scales", "u1", 8)])
IQ2_S = np.dtype([("d", "<f2"), ("qs", "u1", 32), ("signs", "u1", 32), ("qh", "u1", 8), ("scales", "u1", 8)])
IQ1_S = np.dtype([("d", "<f2"), ("qs", "u1", 32), ("qh", "<u2", 8)])
IQ1_M = np.dtype([("qs", "u1", 32), ("qh", "u1", 16), ("scales", "<u2", 4)])

IQ1_LEVELS, IQ2_LEVELS = (-1, 0, 1), (8, 25, 43)
IQ3_S_LEVELS, IQ3_XXS_LEVELS = (1, 3, 5, 7, 9, 11, 13, 15), (4, 12, 20, 28, 36, 44, 52, 62)


@cache
def _read_grid(name: str, levels: Sequence[int]) -> Floats:
    """The entries of a grid, (entries, 8) or of IQ3 (entries, 4): levels by their numbers."""
    bits, columns = (4, 4) if len(levels) == 8 else (2, 8)
    entries = np.array(load_grid(name))[:, None] >> (bits * np.arange(columns)) & ((1 << bits) - 1)
    grid: Floats = np.array(levels, np.float32)[entries]
    grid.flags.writeable = False
    return grid


def _unpack_bits(packed: Bytes) -> Bytes:
    """Bits from the lowest of the first byte on: (n, bytes) to (n, 8 * bytes)."""
    return np.unpackbits(packed, axis=1, bitorder="little")


def _negate(magnitudes: Floats, signs: Bytes) -> Floats:
    """Numbers of (n, columns) with the sign bits of (n, columns / 8) bytes."""
    return np.where(_unpack_bits(signs), -magnitudes, magnitudes)


def _odd(numbers: NDArray[Any]) -> Floats:
    """2 q + 1."""
    odd: Floats = numbers.astype(np.float32) * np.float32(2) + np.float32(1)
    return odd


def decode_iq3_s(blocks: Bytes) -> Floats:
    """d * (2 * scale + 1) * grid[index]; groups of 32; the ninth bit of an index in `qh`, a sign for each column"""
    block = blocks.view(IQ3_S)[:, 0]
    indices = block["qs"] | _unpack_bits(block["qh"]).astype(np.uint16) << 8
    values = _read_grid("iq3_s_grid", IQ3_S_LEVELS)[indices].reshape(len(blocks), -1)
    scales = column(block["d"]) * _odd(unpack_nibbles(block["scales"], 1))
    return _apply_scales(scales, _negate(values, block["signs"])).reshape(len(blocks), -1)


def _complete_signs(signs: NDArray[Any]) -> Bytes:
    """The eighth bit behind seven, so that an even number of columns is negative: (n, k) to bytes (n, k)."""
    sevens = (signs & 127).astype(np.uint8)
    parity = sevens ^ sevens >> 4
    parity ^= parity >> 2
    eights = sevens | ((parity ^ parity >> 1) & 1) << 7
    return eights.astype(np.uint8)


def _split_sevens(words: NDArray[np.uint32]) -> tuple[Bytes, Floats]:
    """Words of four times seven sign bits and a scale: signs, (n, 4 * words), and 2 * scale + 1, (n, words)."""
    signs = words[:, :, None] >> np.arange(0, 28, 7, dtype=np.uint32)
    return _complete_signs(signs).reshape(len(words), -1), _odd(words >> 28)


def decode_iq3_xxs(blocks: Bytes) -> Floats:
    """d * (scale + 1/2) / 2 * grid[index]; groups of 32"""
    block = blocks.view(IQ3_XXS)[:, 0]
    values = _read_grid("iq3_xxs_grid", IQ3_XXS_LEVELS)[block["qs"]].reshape(len(blocks), -1)
    signs, scales = _split_sevens(block["signs"])
    return _apply_scales(column(block["d"]) * scales * np.float32(0.25), _negate(values, signs)).reshape(
        len(blocks), -1
    )


def decode_iq2_xxs(blocks: Bytes) -> Floats:
    """d * (scale + 1/2) / 4 * grid[index]; groups of 32"""
    block = blocks.view(IQ2_XXS)[:, 0]
    indices = np.ascontiguousarray(block["qs"][:, 0::2]).view(np.uint8)
    values = _read_grid("iq2_xxs_grid", IQ2_LEVELS)[indices].reshape(len(blocks), -1)
    signs, scales = _split_sevens(block["qs"][:, 1::2])
    return _apply_scales(column(block["d"]) * scales * np.float32(0.125), _negate(values, signs)).reshape(
        len(blocks), -1
    )


def decode_iq2_xs(blocks: Bytes) -> Floats:
    """As iq2_xxs with groups of 16; nine bits of an index and seven signs are a number of `qs`"""
    block = blocks.view(IQ2_XS)[:, 0]
    values = _read_grid("iq2_xs_grid", IQ2_LEVELS)[block["qs"] & 511].reshape(len(blocks), -1)
    scales = column(block["d"]) * _odd(unpack_nibbles(block["scales"], 1)) * np.float32(0.125)
    return _apply_scales(scales, _negate(values, _complete_signs(block["qs"] >> 9))).reshape(len(blocks), -1)


def decode_iq2_s(blocks: Bytes) -> Floats:
    """As iq2_xs with ten bits of an index, the upper ones in `qh`, and all signs"""
    block = blocks.view(IQ2_S)[:, 0]
    high = block["qh"][:, :, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3
    indices = block["qs"] | high.reshape(len(blocks), -1).astype(np.uint16) << 8
    values = _read_grid("iq2_s_grid", IQ2_LEVELS)[indices].reshape(len(blocks), -1)
    scales = column(block["d"]) * _odd(unpack_nibbles(block["scales"], 1)) * np.float32(0.125)
    return _apply_scales(scales, _negate(values, block["signs"])).reshape(len(blocks), -1)


def _decode_iq1(indices: NDArray[np.uint16], scales: Floats, is_lower: NDArray[np.bool_]) -> Floats:
    """scale * (grid[index] + delta), delta 1/8, or -1/8 where `is_lower`; one delta for 8 or 32 columns."""
    values = _read_grid("iq1_grid", IQ1_LEVELS)[indices].reshape(*is_lower.shape, -1)
    shifted = values + np.where(is_lower, np.float32(-0.125), np.float32(0.125))[:, :, None]
    return _apply_scales(scales, shifted).reshape(len(indices), -1)


def decode_iq1_s(blocks: Bytes) -> Floats:
    """d * (2 * scale + 1) * (grid[index] + delta); groups of 32; three bits of each index, scale and delta in `qh`"""
    block = blocks.view(IQ1_S)[:, 0]
    high = block["qh"][:, :, None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7
    indices = block["qs"] | high.reshape(len(blocks), -1) << 8
    return _decode_iq1(indices, column(block["d"]) * _odd(block["qh"] >> 12 & 7), block["qh"] >> 15 != 0)


def decode_iq1_m(blocks: Bytes) -> Floats:
    """As iq1_s, groups of 16 and a delta for 8 columns; d is on top of the four numbers of scales, four bits each"""
    block = blocks.view(IQ1_M)[:, 0]
    high, packed = unpack_nibbles(block["qh"], 1), block["scales"]
    indices = block["qs"] | (high & 7).astype(np.uint16) << 8
    d = np.bitwise_or.reduce((packed >> 12) << np.arange(0, 16, 4, dtype=np.uint16), axis=1).astype("<u2").view("<f2")
    scales = packed[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7
    return _decode_iq1(indices, column(d) * _odd(scales.reshape(len(blocks), -1)), high >> 3 != 0)


# Ternary types: d * (q - 1).
TQ1_0 = np.dtype([("qs", "u1", 48), ("qh", "u1", 4), ("d", "<f2")])
TQ2_0 = np.dtype([("qs", "u1", 64), ("d", "<f2")])
Q1_0 = np.dtype([("d", "<f2"), ("qs", "u1", 16)])
Q2_0 = np.dtype([("d", "<f2"), ("qs", "u1", 16)])
PQ2_0 = np.dtype([("d", "<f2"), ("qs", "u1", 32)])
PTQ1_0 = np.dtype([("qs", "u1", 24), ("qh", "u1", 2), ("d", "<f2")])


def _unpack_digits(packed: Bytes, digits: int) -> Bytes:
    """Digits of base 3, the highest of all bytes first: (n, bytes) to (n, digits * bytes)."""
    powers = (np.uint8(3) ** np.arange(digits, dtype=np.uint8))[:, None]
    rest = packed[:, None, :] * powers  # below 256, as bytes wrap around
    return (rest.astype(np.uint16) * np.uint16(3) >> 8).astype(np.uint8).reshape(len(packed), -1)


def decode_tq1_0(blocks: Bytes) -> Floats:
    """Five digits of 32 bytes, then of 16, and four digits of 4"""
    block = blocks.view(TQ1_0)[:, 0]
    parts = ((block["qs"][:, :32], 5), (block["qs"][:, 32:], 5), (block["qh"], 4))
    q = np.concatenate([_unpack_digits(part, digits) for part, digits in parts], axis=1)
    return column(block["d"]) * (q.astype(np.float32) - np.float32(1))


def decode_tq2_0(blocks: Bytes) -> Floats:
    """Two bits each, in planes as in q2_k"""
    block = blocks.view(TQ2_0)[:, 0]
    return column(block["d"]) * (unpack_planes(block["qs"], 2, 4).astype(np.float32) - np.float32(1))


def decode_q1_0(blocks: Bytes) -> Floats:
    """A bit each, -d or d"""
    block = blocks.view(Q1_0)[:, 0]
    return column(block["d"]) * (np.unpackbits(block["qs"], axis=1, bitorder="little") * np.float32(2) - np.float32(1))


def decode_q2_0(blocks: Bytes) -> Floats:
    """Two bits each, four columns in a byte, from the lowest up"""
    return _decode_twos(blocks.view(Q2_0)[:, 0])


def decode_pq2_0(blocks: Bytes) -> Floats:
    """As q2_0 with 128 columns: PrismML's type, which its older files call q2_0"""
    return _decode_twos(blocks.view(PQ2_0)[:, 0])


def _decode_twos(block: NDArray[np.void]) -> Floats:
    q = (block["qs"][:, :, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3).reshape(len(block), -1)
    return column(block["d"]) * (q.astype(np.float32) - np.float32(1))


def decode_ptq1_0(blocks: Bytes) -> Floats:
    """PrismML's: five digits of 16 bytes, then of 8, and four digits of 2"""
    block = blocks.view(PTQ1_0)[:, 0]
    parts = ((block["qs"][:, :16], 5), (block["qs"][:, 16:], 5), (block["qh"], 4))
    q = np.concatenate([_unpack_digits(part, digits) for part, digits in parts], axis=1)
    return column(block["d"]) * (q.astype(np.float32) - np.float32(1))
