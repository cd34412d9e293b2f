"""bf16 and int8 numbers in pages: rounding, and where each number of a page lies (as csrc/attend/packed_pages.h).

A page holds page_size * head_dim numbers of a KV head, in pairs as products of pairs want them. Keys: groups of 16
positions (the last may have fewer), each (head_dim / 2, positions of the group, 2). Values: pairs of positions,
(page_size / 2, head_dim, 2). Of an odd number of dimensions or positions the last stands alone, so that every page is
exactly full. NumPy has no bf16; the numbers travel as uint16.

A page of q8 holds int8 numbers in the same order, and after them an f32 scale for each position.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mlxr.kernels.tensor import FloatArray

Offsets = npt.NDArray[np.int64]
HalfWords = npt.NDArray[np.uint16]
Bytes = npt.NDArray[np.int8]
GROUP_POSITIONS = 16


def round_to_bf16(values: FloatArray) -> HalfWords:
    """To nearest even; not-a-number stays so."""
    raw = np.ascontiguousarray(values).view(np.uint32)
    rounded = (raw.astype(np.uint64) + 0x7FFF + (raw >> 16 & 1)) >> 16
    return np.where(np.isnan(values), raw >> 16 | 0x40, rounded).astype(np.uint16)


def widen_bf16(numbers: HalfWords) -> FloatArray:
    """Widen bfloat16 words to float32, which is exact."""
    return (numbers.astype(np.uint32) << 16).view(np.float32)


def round_to_q8(values: FloatArray) -> tuple[Bytes, FloatArray]:
    """int8 numbers (..., head_dim) and their scales (...): the largest magnitude is 127, rounding to nearest even.

    The scale is NaN where a value is infinite or not a number, 0 where all are below 1e-30.
    """
    top = np.abs(values).max(axis=-1)
    finite = np.isfinite(top)
    used = finite & (top >= np.float32(1e-30))
    inverse = np.divide(np.float32(127), top, out=np.zeros_like(top), where=used)
    numbers = np.rint(np.where(used[..., None], values, np.float32(0)) * inverse[..., None])
    scales = np.where(finite, np.where(used, top, np.float32(0)) / np.float32(127), np.float32(np.nan))
    return numbers.astype(np.int8), scales.astype(np.float32)


def widen_q8(pages: Bytes, offsets: Offsets) -> FloatArray:
    """Pages (pages, kv_heads, bytes) to numbers (pages, kv_heads, page_size, head_dim)."""
    numbers = pages[:, :, offsets].astype(np.float32)
    scales = np.ascontiguousarray(pages[:, :, offsets.size :]).view(np.float32)
    widened: FloatArray = numbers * scales[..., None]
    return widened


def locate_keys(page_size: int, head_dim: int) -> Offsets:
    """Where the numbers of a page of keys lie: (page_size, head_dim) offsets."""
    position, d = np.arange(page_size)[:, None], np.arange(head_dim)[None]
    start = position // GROUP_POSITIONS * GROUP_POSITIONS
    count = np.minimum(page_size - start, GROUP_POSITIONS)
    pair, within = start * head_dim + d // 2 * 2 * count, position - start
    alone = (head_dim % 2 == 1) & (d == head_dim - 1)
    return np.where(alone, pair + within, pair + 2 * within + d % 2)


def locate_values(page_size: int, head_dim: int) -> Offsets:
    """Where the numbers of a page of values lie: (page_size, head_dim) offsets."""
    position, d = np.arange(page_size)[:, None], np.arange(head_dim)[None]
    pair = position // 2 * 2 * head_dim
    alone = (page_size % 2 == 1) & (position == page_size - 1)
    return np.where(alone, pair + d, pair + 2 * d + position % 2)
