"""The types whose 4-bit codes index a table of values: iq4_nl, iq4_xs, mxfp4 (layouts and decoders).

Knows bytes and float32, nothing of files or tensors. A decoder takes blocks as uint8 (blocks, type_size) and gives
float32 (blocks, block_size). The layouts are those of ggml-common.h, mxfp4 that of the OCP microscaling formats (MX)
specification 1.0. The encoders live in `quants_table_encode`.
"""

from __future__ import annotations

import numpy as np

from .quants_plain import Bytes, Floats
from .quants_small import column, unpack_nibbles

IQ4_NL = np.dtype([("d", "<f2"), ("qs", "u1", 16)])
IQ4_XS = np.dtype([("d", "<f2"), ("scales_h", "<u2"), ("scales_l", "u1", 4), ("qs", "u1", 128)])
MXFP4 = np.dtype([("e", "u1"), ("qs", "u1", 16)])

# The 16 levels of iq4_nl and iq4_xs: denser around zero, as weights are.
IQ4_LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32)
# E2M1 values times two (0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives), so `scale_of_exponent` halves to make up.
MXFP4_LEVELS = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.float32)
IQ4_LEVELS.flags.writeable = MXFP4_LEVELS.flags.writeable = False


def scale_of_exponent(e: Bytes) -> Floats:
    """2 ** (e - 128) of an E8M0 byte; below the normal range of float32 as a subnormal."""
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
