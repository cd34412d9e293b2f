"""GGUF files byte by byte, so that tests can lie in any field.

The pieces are honest unless told otherwise; `make_gguf` joins them. `sample_gguf` is a valid file with every kind of
metadata and several tensor types, and returns the places of all its numbers, which mutations use.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from mlxr.formats import by_name, encode_tensor

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)


def pack_text(text: str | bytes, length: int | None = None) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def pack_entry(key: str | bytes, type_id: int, payload: bytes, key_length: int | None = None) -> bytes:
    return pack_text(key, key_length) + struct.pack("<I", type_id) + payload


def pack_array(item_type: int, items: Sequence[bytes], count: int | None = None) -> bytes:
    return struct.pack("<IQ", item_type, len(items) if count is None else count) + b"".join(items)


def pack_info(
    name: str | bytes, dims: Sequence[int], type_id: int, offset: int, *, dim_count: int | None = None
) -> bytes:
    """A tensor info; dims in the file's order, columns first."""
    count = len(dims) if dim_count is None else dim_count
    return pack_text(name) + struct.pack(f"<I{len(dims)}QIQ", count, *dims, type_id, offset)


def make_gguf(
    entries: Sequence[bytes] = (),
    infos: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    tensor_count: int | None = None,
    entry_count: int | None = None,
    alignment: int = 32,
) -> bytes:
    counts = (
        len(infos) if tensor_count is None else tensor_count,
        len(entries) if entry_count is None else entry_count,
    )
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(entries) + b"".join(infos)
    return head + bytes(-len(head) % alignment) + data


def sample_gguf() -> bytes:
    """A valid file of some 2 KB."""
    numbers = [struct.pack("<f", value) for value in (0.5, -1.0, 2.0)]
    nested = [pack_array(I32, [struct.pack("<i", 1)]), pack_array(I32, [])]
    entries = [
        pack_entry("general.architecture", STRING, pack_text("llama")),
        pack_entry("u8", U8, b"\x07"),
        pack_entry("i8", I8, b"\xf9"),
        pack_entry("u16", U16, struct.pack("<H", 65000)),
        pack_entry("i16", I16, struct.pack("<h", -3)),
        pack_entry("general.alignment", U32, struct.pack("<I", 32)),
        pack_entry("i32", I32, struct.pack("<i", -70000)),
        pack_entry("f32", F32, struct.pack("<f", 1e-5)),
        pack_entry("bool", BOOL, b"\x01"),
        pack_entry("u64", U64, struct.pack("<Q", 1 << 40)),
        pack_entry("i64", I64, struct.pack("<q", -(1 << 40))),
        pack_entry("f64", F64, struct.pack("<d", 3.25)),
        pack_entry("tokens", ARRAY, pack_array(STRING, [pack_text("a"), pack_text("é"), pack_text("")])),
        pack_entry("scores", ARRAY, pack_array(F32, numbers)),
        pack_entry("flags", ARRAY, pack_array(BOOL, [b"\x00", b"\x01"])),
        pack_entry("nested", ARRAY, pack_array(ARRAY, nested)),
    ]
    values = np.linspace(-1, 1, 512, dtype=np.float32).reshape(2, 256)
    infos, data = [], b""
    for type_name in ("f32", "q4_k", "q8_0", "f16", "mxfp4"):
        infos.append(pack_info(f"{type_name}.weight", (256, 2), by_name(type_name).id, len(data)))
        blocks = encode_tensor(type_name, values).tobytes()
        data += blocks + bytes(-len(blocks) % 32)
    return make_gguf(entries, infos, data)
