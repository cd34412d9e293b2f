"""Thousands of mutated files: every one is opened, or refused with a FormatError; nothing else ever happens.

Mutations know the fields: besides flipped, cut, doubled and swapped bytes, any 1, 4 or 8 bytes may become a number that
breaks naive arithmetic. What opens nevertheless must be whole: every tensor within the file and decodable.
"""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from amounts import choose_amount
from gguf_bytes import sample_gguf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from mlxr.core.errors import FormatError
from mlxr.formats import GGUFFile, SafetensorsFolder, open_gguf, open_safetensors

GGUF = sample_gguf()
GGUF_HEADER_BYTES = GGUF.index(b"mxfp4.weight") + 48
SAFETENSORS = save(
    {
        "a.weight": np.arange(64, dtype=np.float32).reshape(4, 16),
        "b.weight": np.ones((2, 3), np.float16),
        "ids": np.arange(4),
    }
)
SAFETENSORS_HEADER_BYTES = 8 + struct.unpack("<Q", SAFETENSORS[:8])[0]

NASTY = sorted(
    {
        (sign * (1 << power) + step) % (1 << 64)
        for power in (0, 1, 5, 7, 8, 15, 16, 24, 31, 32, 40, 61, 62, 63)
        for step in (-1, 0, 1)
        for sign in (1, -1)
    }
)
Mutation = Callable[[bytes], bytes]


def put(at: int, piece: bytes) -> Mutation:
    return lambda content: content[: at % len(content)] + piece + content[at % len(content) + len(piece) :]


def flip(at: int, mask: int) -> Mutation:
    return lambda content: put(at, bytes([content[at % len(content)] ^ mask]))(content)


def cut(at: int) -> Mutation:
    return lambda content: content[: at % len(content)] or content[:1]


def remove(at: int, size: int) -> Mutation:
    return lambda content: (content[: at % len(content)] + content[at % len(content) + size :]) or content[:1]


def double(at: int, size: int) -> Mutation:
    def apply(content: bytes) -> bytes:
        start = at % len(content)
        return content[: start + size] + content[start : start + size] + content[start + size :]

    return apply


def mutations(
    header_bytes: int, total_bytes: int, pieces: st.SearchStrategy[bytes]
) -> st.SearchStrategy[list[Mutation]]:
    """One to four mutations, most of them in the header."""
    places = st.integers(0, header_bytes - 1) | st.integers(0, header_bytes - 1) | st.integers(0, total_bytes - 1)
    numbers = st.builds(
        lambda value, size: value.to_bytes(8, "little")[:size], st.sampled_from(NASTY), st.sampled_from([1, 4, 8])
    )
    one = (
        st.builds(flip, places, st.integers(1, 255))
        | st.builds(put, places, numbers)
        | st.builds(put, places, pieces)
        | st.builds(cut, st.integers(1, total_bytes))
        | st.builds(remove, places, st.integers(1, 40))
        | st.builds(double, places, st.integers(1, 80))
    )
    return st.lists(one, min_size=1, max_size=4)


def check(path: Path, content: bytes, open_file: Callable[[Path], GGUFFile | SafetensorsFolder]) -> bool:
    """Return True if the file opened. Fails on any other error, on tensors that are not whole, and on use of memory."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    refusal: FormatError | None = None
    tracemalloc.start()
    try:
        with open_file(path) as file, np.errstate(all="ignore"):
            assert sum(source.nbytes for source in file.tensors.values()) <= len(content)
            for source in file.tensors.values():
                assert source.to_float32().size == np.prod(source.shape)
    except FormatError as error:
        refusal = error
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < (8 << 20)
    if refusal is not None:
        assert (refusal.path, refusal.field != "", "\n" in str(refusal)) == (str(path), True, False)
    return refusal is None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mutations")


def test_the_samples_are_sound(folder: Path) -> None:
    assert check(folder / "sound.gguf", GGUF, open_gguf)
    assert check(folder / "sound.safetensors", SAFETENSORS, open_safetensors)


@settings(max_examples=choose_amount(2500), deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(changes=mutations(GGUF_HEADER_BYTES, len(GGUF), st.sampled_from([b"GGUF", b"\xff\xfe", b"u8", b"f16.weight"])))
def test_mutated_gguf(folder: Path, changes: list[Mutation]) -> None:
    content = GGUF
    for change in changes:
        content = change(content)
    check(folder / "model.gguf", content, open_gguf)


JSON_PIECES = [
    "[[[[",
    "{}",
    '"F8_E4M3"',
    "1e999",
    "-1",
    "true",
    "NaN",
    '"a.weight":',
    "\\ud800",
    "null",
    "[]",
    "9" * 30,
]


@settings(max_examples=choose_amount(1000), deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    changes=mutations(
        SAFETENSORS_HEADER_BYTES, len(SAFETENSORS), st.sampled_from([piece.encode() for piece in JSON_PIECES])
    )
)
def test_mutated_safetensors(folder: Path, changes: list[Mutation]) -> None:
    content = SAFETENSORS
    for change in changes:
        content = change(content)
    check(folder / "model.safetensors", content, open_safetensors)


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from([*NASTY, -1, 0.5, 4, 16])
    | st.sampled_from(["F32", "F16", "F8_E5M2", ""]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["dtype", "shape"]), inner, max_size=2),
    max_leaves=6,
)


@settings(max_examples=choose_amount(500), deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(value=JSON_VALUES, key=st.sampled_from(["dtype", "shape", "data_offsets", None]), name=st.sampled_from("ab"))
def test_safetensors_entries_that_are_anything(folder: Path, value: object, key: str | None, name: str) -> None:
    """The header is sound JSON, but a part of it is not what the format says."""
    header = json.loads(SAFETENSORS[8:SAFETENSORS_HEADER_BYTES])
    if key is None:
        header[f"{name}.weight"] = value
    else:
        header[f"{name}.weight"][key] = value
    text = json.dumps(header).encode()
    content = struct.pack("<Q", len(text)) + text + SAFETENSORS[SAFETENSORS_HEADER_BYTES:]
    check(folder / "model.safetensors", content, open_safetensors)
