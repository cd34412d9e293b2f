"""Layouts and decoders of the k-types: blocks of 256 values in groups of 16 or 32 with quantised scales.

Knows bytes and float32, nothing of files or tensors. A decoder takes blocks as uint8 (blocks, type_size) and gives
float32 (blocks, 256). The layouts are those of ggml-common.h; the encoders live in `quants_k_encode`, which uses the
packing functions here, so that each bit layout is written down once.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .quants_plain import Bytes, Floats
from .quants_small import column, unpack_nibbles

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
