"""Types of one value per block: floats and integers as they are.

Knows bytes and float32, nothing of files or tensors. Like all `quants_*` bodies a decoder takes blocks as uint8
(blocks, type_size) and gives float32 (blocks, block_size); an encoder goes the other way. Here block_size is 1.
All values are little endian.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


def decode_f32(blocks: Bytes) -> Floats:
    """A copy in native order."""
    return blocks.view("<f4").astype(np.float32)


def encode_f32(values: Floats) -> Bytes:
    """The bytes as they are."""
    return values.astype("<f4").view(np.uint8)


def decode_f16(blocks: Bytes) -> Floats:
    """Return the numbers as float32, which is exact."""
    return blocks.view("<f2").astype(np.float32)


def encode_f16(values: Floats) -> Bytes:
    """Round to nearest even. The caller sees to it that the values fit (`encode_tensor` does)."""
    return values.astype("<f2").view(np.uint8)


def decode_bf16(blocks: Bytes) -> Floats:
    """Exact: bfloat16 is the upper half of a float32."""
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def encode_bf16(values: Floats) -> Bytes:
    """Round to nearest even; NaN stays NaN (made quiet, as ggml does)."""
    bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16
    quiet = (bits >> 16) | 64
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(is_nan, quiet, rounded).astype("<u2").view(np.uint8)


def decode_f64(blocks: Bytes) -> Floats:
    """Rounds to float32; a value beyond its range becomes infinity."""
    return blocks.view("<f8").astype(np.float32)


def _decode_integers(blocks: Bytes, dtype: str) -> Floats:
    result: NDArray[Any] = blocks.view(dtype)
    return result.astype(np.float32)


def decode_i8(blocks: Bytes) -> Floats:
    """Return the numbers as float32, which is exact."""
    return _decode_integers(blocks, "<i1")


def decode_u8(blocks: Bytes) -> Floats:
    """Return the numbers as float32, which is exact."""
    return _decode_integers(blocks, "u1")


def decode_i16(blocks: Bytes) -> Floats:
    """Return the numbers as float32, which is exact."""
    return _decode_integers(blocks, "<i2")


def decode_i32(blocks: Bytes) -> Floats:
    """Integers beyond 2**24 lose their low bits, as float32 has 24."""
    return _decode_integers(blocks, "<i4")


def decode_u32(blocks: Bytes) -> Floats:
    """Integers beyond 2**24 lose their low bits, as float32 has 24."""
    return _decode_integers(blocks, "<u4")


def decode_i64(blocks: Bytes) -> Floats:
    """Integers beyond 2**24 lose their low bits, as float32 has 24."""
    return _decode_integers(blocks, "<i8")
