"""The types that hold what MLX calls affine: whole numbers of 4 or 8 bits, times a scale, plus a bias.

No file has these blocks; `mlx_affine` makes them out of a checkpoint's tensors, without loss, as kernels like them: the
scale and the bias of 32 or 64 columns in f32, then the numbers. 4 bits lie in the order of q4_0, 32 columns after
another. Knows bytes and float32, nothing of files or tensors; bodies have the form of all `quants_*`.
"""

from __future__ import annotations

import numpy as np

from .quants_plain import Bytes, Floats
from .quants_small import pack_nibbles, quantize_between, unpack_nibbles

BLOCKS = {
    (bits, columns): np.dtype([("scale", "<f4"), ("bias", "<f4"), ("q", "u1", columns * bits // 8)])
    for bits in (4, 8)
    for columns in (32, 64)
}


def decode_affine4_32(blocks: Bytes) -> Floats:
    """scale * q + bias"""
    return _decode(blocks, 4, 32)


def decode_affine4_64(blocks: Bytes) -> Floats:
    """scale * q + bias"""
    return _decode(blocks, 4, 64)


def decode_affine8_32(blocks: Bytes) -> Floats:
    """scale * q + bias"""
    return _decode(blocks, 8, 32)


def decode_affine8_64(blocks: Bytes) -> Floats:
    """scale * q + bias"""
    return _decode(blocks, 8, 64)


def encode_affine4_32(values: Floats) -> Bytes:
    """0..15 spread over the block's range."""
    return _encode(values, 4)


def encode_affine4_64(values: Floats) -> Bytes:
    """0..15 spread over the block's range."""
    return _encode(values, 4)


def encode_affine8_32(values: Floats) -> Bytes:
    """0..255 spread over the block's range."""
    return _encode(values, 8)


def encode_affine8_64(values: Floats) -> Bytes:
    """0..255 spread over the block's range."""
    return _encode(values, 8)


def _decode(blocks: Bytes, bits: int, columns: int) -> Floats:
    block = blocks.view(BLOCKS[bits, columns])[:, 0]
    q = unpack_nibbles(block["q"], 16) if bits == 4 else block["q"]
    values: Floats = block["scale"][:, None] * q.astype(np.float32) + block["bias"][:, None]
    return values


def _encode(values: Floats, bits: int) -> Bytes:
    block = np.empty(len(values), BLOCKS[bits, values.shape[1]])
    scale, low, q = quantize_between(values, (1 << bits) - 1)
    block["scale"], block["bias"] = scale[:, 0], low[:, 0]
    block["q"] = pack_nibbles(q, 16) if bits == 4 else q
    return block.view(np.uint8).reshape(len(values), -1)
