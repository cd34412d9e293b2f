"""Metadata values to the bytes of a GGUF header.

Knows how scalars, strings and arrays are encoded (GGUF version 3, little endian); nothing of files or tensors. A value
is written in the type that the caller names (`u32`, `array[string]`, ... as `GGUFFile.metadata_types` has them), or
without one in the type that ggml's own tools would choose.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .gguf_values import VALUE_TYPE_BY_NAME

_ARRAY = re.compile(r"array\[(.*)\]")
_WORDS_BY_DTYPE = {
    np.dtype(row.dtype): row.name for row in VALUE_TYPE_BY_NAME.values() if row.dtype and row.name != "bool"
} | {np.dtype(np.bool_): "bool"}


def infer_type(value: object) -> str:
    """The type in words that suits a value; ValueError for what GGUF cannot hold.

    bool, string; int as u32, below zero i32, beyond these u64 or i64; float as f32; arrays of numbers in NumPy's own
    type; lists as the type that holds all items (i32 for whole numbers that fit, as ggml's tools write them).
    """
    if isinstance(value, np.ndarray | np.generic):
        words = _WORDS_BY_DTYPE.get(value.dtype.newbyteorder("<"))
        if words is None:
            raise ValueError(f"NumPy type {value.dtype} has no GGUF type")
        return f"array[{words}]" if isinstance(value, np.ndarray) else words
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return _infer_integer(value, value, "u32", "i32")
    if isinstance(value, float):
        return "f32"
    if isinstance(value, str):
        return "string"
    if isinstance(value, list | tuple):
        return f"array[{_infer_items(value)}]"
    raise ValueError(f"a {type(value).__name__} has no GGUF type")


def _infer_integer(smallest: int, largest: int, *preferred: str) -> str:
    for name in (*preferred, "i64", "u64"):
        limits = np.iinfo(VALUE_TYPE_BY_NAME[name].dtype)
        if limits.min <= smallest and largest <= limits.max:
            return name
    raise ValueError(f"{largest if largest > 0 else smallest} does not fit 64 bits")


def _infer_items(items: Sequence[object]) -> str:
    if not items:
        return "i32"
    whole = [item for item in items if isinstance(item, int) and not isinstance(item, bool)]
    if len(whole) == len(items):
        return _infer_integer(min(whole), max(whole), "i32")
    kinds = sorted({"f32" if type(item) is int else infer_type(item) for item in items})
    if len(kinds) > 1:
        raise ValueError(f"mixes {' and '.join(kinds)}")
    return kinds[0]


def pack_string(text: str) -> bytes:
    """Return a string as GGUF writes it: its length in 8 bytes, then its UTF-8."""
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def pack_typed_value(value: object, words: str) -> bytes:
    """The type's number and the value; ValueError when the value is not of that type or does not fit it."""
    item_words = _item_words(words)
    kind = "array" if item_words is not None else words
    if kind not in VALUE_TYPE_BY_NAME:
        raise ValueError(f"{words!r} is not a GGUF type")
    return struct.pack("<I", VALUE_TYPE_BY_NAME[kind].id) + _pack_value(value, words)


def _item_words(words: str) -> str | None:
    match = _ARRAY.fullmatch(words)
    return match[1] if match else None


def _pack_value(value: object, words: str) -> bytes:
    item_words = _item_words(words)
    if item_words is not None:
        return _pack_array(value, item_words)
    if words == "string":
        if not isinstance(value, str):
            raise ValueError(f"{value!r:.80} is not a string")
        return pack_string(value)
    return _pack_numbers([value], words, value)


def _pack_array(value: object, item_words: str) -> bytes:
    if not isinstance(value, list | tuple | np.ndarray):
        raise ValueError(f"{value!r:.80} is not an array")
    kind = "array" if _item_words(item_words) is not None else item_words
    if kind not in VALUE_TYPE_BY_NAME:
        raise ValueError(f"{item_words!r} is not a GGUF type")
    head = struct.pack("<IQ", VALUE_TYPE_BY_NAME[kind].id, len(value))
    if kind in ("string", "array"):
        return head + b"".join(_pack_value(item, item_words) for item in value)
    return head + _pack_numbers(value, kind, value)


def _pack_numbers(values: Sequence[object] | NDArray[np.generic], kind: str, shown: object) -> bytes:
    """Numbers one after another; `shown` is what the caller calls them."""
    given = np.asarray(values)
    if len(given) == 0:
        return b""
    target = np.dtype(np.bool_ if kind == "bool" else VALUE_TYPE_BY_NAME[kind].dtype)
    wanted_kinds = {"b": "b", "u": "iu", "i": "iu", "f": "iuf"}[target.kind]
    if given.ndim != 1 or given.dtype.kind not in wanted_kinds:
        raise ValueError(f"{shown!r:.80} is not of type {kind}")
    if target.kind in "iu":
        limits = np.iinfo(target)
        if int(given.min()) < limits.min or int(given.max()) > limits.max:
            raise ValueError(f"{shown!r:.80} does not fit {kind}")
    with np.errstate(over="ignore"):  # a float beyond float32 becomes infinity, as in any other store of a float
        return given.astype(target).tobytes()
