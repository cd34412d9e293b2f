"""Every decoder against the `gguf` package, bit for bit, on random bytes: all codes and scales, NaN too."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from mlxr.core.errors import ModelError
from mlxr.formats.ggml_types import GGML_TYPES, UNSUPPORTED_TYPES, GGMLType, by_id, by_name, decode_blocks

BLOCKS = 500
PLAIN = {"i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64, "f64": np.float64}
NEWER = {"q1_0", "q2_0", "pq2_0", "ptq1_0"}  # than what the package decodes
COMPARED = [row for row in GGML_TYPES if row.name not in PLAIN and row.name not in {"q8_k", *NEWER}]


def random_blocks(row: GGMLType, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, BLOCKS * row.type_size, dtype=np.uint8)


def assert_same_bits(got: NDArray[np.float32], wanted: NDArray[np.float32]) -> None:
    """Equal bits, where any NaN equals any other: its sign and payload are the processor's business."""
    assert got.dtype == wanted.dtype == np.float32
    both_nan = np.isnan(got) & np.isnan(wanted)
    different = (got.view(np.uint32) != wanted.view(np.uint32)) & ~both_nan
    assert not different.any(), f"{different.sum()} of {different.size} values differ, first at {different.argmax()}"


@pytest.mark.parametrize("row", COMPARED, ids=lambda row: row.name)
def test_decoder_equals_gguf(row: GGMLType) -> None:
    raw = random_blocks(row)
    kind = gguf.GGMLQuantizationType[row.name.upper()]
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        wanted = gguf.quants.dequantize(raw.reshape(BLOCKS, row.type_size), kind)
    assert_same_bits(decode_blocks(row, raw), wanted.reshape(-1))


@pytest.mark.parametrize("name", PLAIN)
def test_plain_numbers(name: str) -> None:
    row = by_name(name)
    raw = random_blocks(row)
    with np.errstate(all="ignore"):
        assert_same_bits(decode_blocks(row, raw), raw.view(PLAIN[name]).astype(np.float32))


def test_ternary_types_by_their_definition() -> None:
    """As ggml-quants.c of llama.cpp and PrismML: bits, codes of two bits, and digits of base 3 in stages of bytes."""
    stages = ((0, 16, 5), (16, 24, 5), (24, 26, 4))
    readings: dict[str, Callable[[NDArray[np.uint8]], list[int]]] = {
        "q1_0": lambda block: [2 * int(block[2 + j // 8] >> j % 8 & 1) - 1 for j in range(128)],
        "q2_0": lambda block: [int(block[2 + j // 4] >> 2 * (j % 4) & 3) - 1 for j in range(64)],
        "pq2_0": lambda block: [int(block[2 + j // 4] >> 2 * (j % 4) & 3) - 1 for j in range(128)],
        "ptq1_0": lambda block: [
            ((int(byte) * 3**n % 256) * 3 >> 8) - 1
            for start, stop, digits in stages
            for n in range(digits)
            for byte in block[start:stop]
        ],
    }
    assert readings.keys() == NEWER
    for name, read in readings.items():
        row = by_name(name)
        raw = random_blocks(row).reshape(BLOCKS, row.type_size)[:50].copy()
        scale = 26 if name == "ptq1_0" else 0
        raw[:, scale : scale + 2] = np.linspace(-3, 3, 50).astype("<f2").view(np.uint8).reshape(50, 2)
        wanted = np.array([read(block) for block in raw], np.float32) * np.linspace(-3, 3, 50).astype("<f2")[:, None]
        assert np.array_equal(decode_blocks(row, raw.reshape(-1)), wanted.astype(np.float32).reshape(-1))


def test_q8_k() -> None:
    row = by_name("q8_k")
    raw = random_blocks(row).reshape(BLOCKS, row.type_size)
    raw[:, :4] = np.random.default_rng(1).standard_normal(BLOCKS).astype("<f4").view(np.uint8).reshape(BLOCKS, 4)
    wanted = [
        np.frombuffer(block[:4].tobytes(), "<f4")[0] * np.float32(np.int8(code))
        for block in raw
        for code in block[4:260].view(np.int8)
    ]
    assert_same_bits(decode_blocks(row, raw.reshape(-1)), np.array(wanted, np.float32))


def test_table_agrees_with_gguf() -> None:
    for row in GGML_TYPES:
        if row.name in NEWER - {"q1_0"}:
            continue
        kind = gguf.GGMLQuantizationType[row.name.upper()]
        assert (row.id, row.block_size, row.type_size) == (kind.value, *gguf.GGML_QUANT_SIZES[kind])
    known = {row.id for row in GGML_TYPES} | set(UNSUPPORTED_TYPES)
    assert {kind.value for kind in gguf.GGMLQuantizationType} <= known
    assert len(known) == len(GGML_TYPES) + len(UNSUPPORTED_TYPES)


def test_every_weight_type_but_those_of_grids_has_an_encoder() -> None:
    read_only = ("iq", "tq", "nvfp4", *NEWER)
    unwritten = {row.name for row in GGML_TYPES if row.encode is None and not row.name.startswith(read_only)}
    assert unwritten == {*PLAIN, "q8_k"}


def test_decoding_many_pieces_equals_decoding_one() -> None:
    row = by_name("q4_k")
    raw = np.tile(random_blocks(row), 5)  # 640,000 values: three pieces
    assert_same_bits(decode_blocks(row, raw), np.tile(decode_blocks(row, random_blocks(row)), 5))


def test_unsupported_types_are_refused_by_name() -> None:
    for type_id, name in UNSUPPORTED_TYPES.items():
        with pytest.raises(ModelError, match=name.split()[0]):
            by_id(type_id)
    with pytest.raises(ModelError, match="type number 99 is not a ggml type"):
        by_id(99)
    with pytest.raises(ModelError, match="type q8_1 is not supported; supported are f32, f16"):
        by_name("q8_1")


def test_rows_must_fill_blocks() -> None:
    assert by_name("q4_k").row_bytes(512) == 288
    with pytest.raises(ModelError, match="q4_k needs rows of a multiple of 256 values, not 320"):
        by_name("q4_k").row_bytes(320)
