"""The types with blocks of 32 values and one scale: q4_0, q4_1, q5_0, q5_1, q8_0.

Knows bytes and float32, nothing of files or tensors. A decoder takes blocks as uint8 (blocks, type_size) and gives
float32 (blocks, 32); an encoder goes the other way, by ggml's plain rule (no search), so that the bytes are the same.
The layouts are those of ggml-common.h; byte j of `qs` holds value j in its low half and value j + 16 in its high half.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .quants_plain import Bytes, Floats

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
    """1 / scale, and 0 where the scale is 0 (a block of zeros) or so small that its inverse overflows."""
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
