"""The native `embed`: rows decoded straight from raw blocks, bit for bit as the `gguf` package decodes them."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from mlxr.core.tables import WEIGHT_TYPES
from mlxr.formats import by_name
from mlxr.formats.ggml_types import find_halves

native = pytest.importorskip("mlxr._native", reason="the native module is not built")

# Elements and bytes of a block, and where in it half-precision scales lie.
BLOCKS: dict[str, tuple[int, int, tuple[int, ...]]] = {
    row.name: (row.block_size, row.block_bytes, (0,) if row.name == "f16" else find_halves(row)) for row in WEIGHT_TYPES
}


def make_table(type_name: str, rows: int, columns: int) -> npt.NDArray[np.uint8]:
    """Random blocks in which every bit pattern may occur, but no infinities or NaNs as scales."""
    elements, size, halves = BLOCKS[type_name]
    rng = np.random.default_rng([rows, columns, *type_name.encode()])
    blocks = rng.integers(0, 256, (rows * columns // elements, size), dtype=np.uint8)
    for offset in halves:
        bits = blocks[:, offset : offset + 2].copy().view(np.uint16)
        bits[(bits & 0x7C00) == 0x7C00] &= 0xBFFF
        blocks[:, offset : offset + 2] = bits.view(np.uint8)
    if type_name in ("f32", "q8_k", "bf16"):
        top = 1 if type_name == "bf16" else 3
        blocks[:, top] &= 0xBF  # below 2, so neither infinite nor NaN
    if type_name.startswith("affine"):
        blocks[:, [3, 7]] &= 0xBF
    if type_name in ("f8_e4m3_128", "nvfp4_scaled"):
        blocks[:, 3] &= 0xBF
        blocks[blocks & 127 == 127] ^= 1
    if type_name == "iq1_m":
        blocks[:, 55] &= 0xBF  # the uppermost bits of the scale, which must not all be set
    return blocks.reshape(-1)


def decode(type_name: str, raw: npt.NDArray[np.uint8], rows: int, columns: int) -> npt.NDArray[np.float32]:
    if type_name == "q8_k":  # not in the gguf package: a scale, 256 bytes, 16 sums
        blocks = raw.reshape(-1, 292)
        scales = blocks[:, :4].copy().view(np.float32)
        return (scales * blocks[:, 4:260].view(np.int8).astype(np.float32)).reshape(rows, columns)
    ours = ("q1_0", "q2_0", "pq2_0", "ptq1_0", "f8_e4m3_128", "nvfp4_scaled")  # and newer ones
    if type_name.startswith("affine") or type_name in ours:
        return by_name(type_name).decode(raw.reshape(-1, BLOCKS[type_name][1])).reshape(rows, columns)
    kind = gguf.GGMLQuantizationType[type_name.upper()]
    with np.errstate(over="ignore"):  # the largest exponents of mxfp4
        decoded: npt.NDArray[np.float32] = gguf.quants.dequantize(raw.reshape(rows, -1), kind).astype(np.float32)
    return decoded.reshape(rows, columns)


@pytest.mark.parametrize("type_name", BLOCKS)
def test_rows_equal_gguf_bit_for_bit(type_name: str) -> None:
    elements = BLOCKS[type_name][0]
    for columns in (elements, 3 * elements, 2048):
        rows = 37
        raw = make_table(type_name, rows, columns)
        table = decode(type_name, raw, rows, columns)
        for threads in (1, 2):
            runtime = native.Runtime(threads, "portable")
            for ids in ([0], [36, 0, 0, 5], list(range(37)) * 2):
                out = np.full((len(ids), columns), np.nan, np.float32)
                native.embed(runtime, np.array(ids, np.int32), type_name, raw, out)
                assert out.tobytes() == table[ids].tobytes(), (columns, ids[:3])


def test_every_half_is_converted_exactly() -> None:
    halves = np.arange(1 << 16, dtype=np.uint16)
    halves = halves[~np.isnan(halves.view(np.float16))]
    raw, runtime = halves.view(np.uint8), native.Runtime(1, "portable")
    out = np.empty((1, len(halves)), np.float32)
    native.embed(runtime, np.zeros(1, np.int32), "f16", raw, out)
    assert out.tobytes() == halves.view(np.float16).astype(np.float32).tobytes()


def test_every_mxfp4_exponent_is_converted_exactly() -> None:
    raw = np.zeros((256, 17), np.uint8)
    raw[:, 0] = np.arange(256)
    raw[:, 1:] = np.arange(16) * 16 + np.arange(16)
    out = np.empty((256, 32), np.float32)
    native.embed(native.Runtime(1, "portable"), np.arange(256, dtype=np.int32), "mxfp4", raw.reshape(-1), out)
    assert out.tobytes() == decode("mxfp4", raw.reshape(-1), 256, 32).tobytes()


def refused(error: type[Exception], text: str, *arguments: Any) -> None:
    with pytest.raises(error, match=text):
        native.embed(native.Runtime(1, "portable"), *arguments)


def test_bad_calls_are_refused() -> None:
    raw, out = make_table("q4_k", 4, 256), np.zeros((2, 256), np.float32)
    ids = np.array([0, 3], np.int32)
    refused(ValueError, "token id 4 is outside the table's 4 rows", np.array([0, 4], np.int32), "q4_k", raw, out)
    refused(ValueError, "token id -1 is outside", np.array([0, -1], np.int32), "q4_k", raw, out)
    refused(ValueError, "no kernel for tensor type 'q9'", ids, "q9", raw, out)
    refused(ValueError, "bytes of data", ids, "q4_k", raw[:-1], out)
    refused(ValueError, "rows of out is 1", ids, "q4_k", raw, out[:1])
    refused(ValueError, "multiple of 256", ids, "q4_k", raw, np.empty((2, 128), np.float32))
    refused(ValueError, "multiple of 1", ids, "f32", raw, np.empty((2, 0), np.float32))
    refused(TypeError, "incompatible", ids.astype(np.int64), "q4_k", raw, out)
    refused(TypeError, "incompatible", ids, "q4_k", raw.view(np.int8), out)
    refused(TypeError, "incompatible", ids, "q4_k", raw, out.astype(np.float64))
    refused(TypeError, "incompatible", ids, "q4_k", raw, np.empty((256, 2), np.float32).T)
