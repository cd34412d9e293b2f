"""Values of a GGUF header: a cursor over the mapped bytes that never reads past the end and never trusts a count.

Knows the encoding of scalars, strings and arrays (GGUF versions 2 and 3, little endian); not which keys mean what.
Every failure is a FormatError with the file, the field being read and its offset.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Never

import numpy as np

from mlxr.core.errors import FormatError

from .mapped_file import MappedFile

MAX_ARRAY_DEPTH = 4
# Objects take more memory than the bytes they are read from, so a header may only make so many of them: strings,
# arrays and numbers in short lists. The largest vocabularies need about a quarter.
MAX_ITEMS = 1 << 22
LARGE_ARRAY = 1024  # numeric arrays of this many elements or more stay NumPy arrays


@dataclass(frozen=True, slots=True)
class ValueType:
    """A GGUF value type: its number, its name here, and for scalars the little-endian NumPy spelling."""

    id: int
    name: str
    dtype: str = ""


VALUE_TYPES: tuple[ValueType, ...] = (
    ValueType(0, "u8", "<u1"),
    ValueType(1, "i8", "<i1"),
    ValueType(2, "u16", "<u2"),
    ValueType(3, "i16", "<i2"),
    ValueType(4, "u32", "<u4"),
    ValueType(5, "i32", "<i4"),
    ValueType(6, "f32", "<f4"),
    ValueType(7, "bool", "<u1"),
    ValueType(8, "string"),
    ValueType(9, "array"),
    ValueType(10, "u64", "<u8"),
    ValueType(11, "i64", "<i8"),
    ValueType(12, "f64", "<f8"),
)
VALUE_TYPE_BY_NAME = {row.name: row for row in VALUE_TYPES}
_VALUE_TYPE_BY_ID = {row.id: row for row in VALUE_TYPES}
_SMALLEST_STRING_BYTES = 8
_SMALLEST_ARRAY_BYTES = 12


class Cursor:
    """Reads a GGUF header from the front. `offset` is the next byte; `field` names what is being read, for errors."""

    def __init__(self, file: MappedFile) -> None:
        self.path: Path = file.path
        self.offset = 0
        self.field = "header"
        self._bytes = memoryview(file.bytes.data)
        self._size = file.size_bytes
        self._items_left = MAX_ITEMS

    def fail(self, reason: str, offset: int | None = None) -> Never:
        """Raise the FormatError for the field being read."""
        raise FormatError(self.path, self.field, self.offset if offset is None else offset, reason)

    def take(self, count: int) -> memoryview:
        """Return the next `count` bytes and move past them."""
        if count > self._size - self.offset:
            self.fail(f"wants {count} bytes, the file has {self._size - self.offset} left")
        start, self.offset = self.offset, self.offset + count
        return self._bytes[start : self.offset]

    def read_u32(self) -> int:
        """Read an unsigned 32-bit integer."""
        return int(struct.unpack("<I", self.take(4))[0])

    def read_u64(self) -> int:
        """Read an unsigned 64-bit integer."""
        return int(struct.unpack("<Q", self.take(8))[0])

    def peek_u64(self) -> int:
        """Return the next unsigned 64-bit integer without moving past it."""
        value = self.read_u64()
        self.offset -= 8
        return value

    def read_count(self, what: str, smallest_bytes: int, limit: int | None = None) -> int:
        """A 64-bit count of things that take at least so many bytes each: refused when the file cannot hold them."""
        at = self.offset
        count = self.read_u64()
        if count * smallest_bytes > self._size - self.offset:
            self.fail(f"claims {count} {what}, more than fit in the file's {self._size} bytes", at)
        if limit is not None and count > limit:
            self.fail(f"claims {count} {what}; {limit} are allowed", at)
        return count

    def read_string(self) -> str:
        """A length and so many bytes of UTF-8."""
        at = self.offset
        length = self.read_count("bytes of text", 1)
        try:
            return str(self.take(length), "utf-8")
        except UnicodeDecodeError as error:
            self.fail(f"is not UTF-8 ({error.reason} in its byte {error.start})", at)

    def read_value_type(self) -> ValueType:
        """Read the number of a value type and return the type."""
        at = self.offset
        number = self.read_u32()
        if number not in _VALUE_TYPE_BY_ID:
            self.fail(f"has unknown value type {number}", at)
        return _VALUE_TYPE_BY_ID[number]

    def read_value(self, value_type: ValueType, depth: int = 0) -> tuple[object, str]:
        """A value of the given type, and the type in words (`u32`, `string`, `array[f32]`, ...)."""
        if value_type.name == "string":
            return self.read_string(), "string"
        if value_type.name == "array":
            return self._read_array(depth + 1)
        return self._read_numbers(value_type, 1)[0].item(), value_type.name

    def _spend(self, count: int, what: str) -> None:
        if count > self._items_left:
            self.fail(f"claims {count} {what}; a header may hold {MAX_ITEMS} strings, arrays and listed numbers in all")
        self._items_left -= count

    def _read_strings(self, count: int) -> list[str]:
        """As `read_string` so many times, some eight times as fast: vocabularies have half a million."""
        data, size, at, strings = self._bytes, self._size, self.offset, []
        unpack = struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                start = at + 8
                end = start + unpack(data, at)[0]
                if end > size:
                    break
                strings.append(str(data[start:end], "utf-8"))
                at = end
        except (struct.error, UnicodeDecodeError):
            pass  # said properly below
        self.offset = at
        while len(strings) < count:
            strings.append(self.read_string())
        return strings

    def _read_array(self, depth: int) -> tuple[object, str]:
        if depth > MAX_ARRAY_DEPTH:
            self.fail(f"nests arrays deeper than {MAX_ARRAY_DEPTH}")
        item_type = self.read_value_type()
        if item_type.name == "string":
            count = self.read_count("strings", _SMALLEST_STRING_BYTES)
            self._spend(count, "strings")
            return self._read_strings(count), "array[string]"
        if item_type.name == "array":
            count = self.read_count("arrays", _SMALLEST_ARRAY_BYTES)
            self._spend(count, "arrays")
            items = [self._read_array(depth + 1) for _ in range(count)]
            return [value for value, _ in items], f"array[{self._common_type([words for _, words in items])}]"
        count = self.read_count("numbers", np.dtype(item_type.dtype).itemsize)
        numbers = self._read_numbers(item_type, count)
        if count >= LARGE_ARRAY:
            return numbers, f"array[{item_type.name}]"
        self._spend(count, "numbers")
        return numbers.tolist(), f"array[{item_type.name}]"

    def _common_type(self, words: list[str]) -> str:
        kinds = sorted(set(words))
        if len(kinds) > 1:
            self.fail(f"mixes arrays of {' and '.join(kinds)}")
        return kinds[0] if kinds else "array[i32]"

    def _read_numbers(self, value_type: ValueType, count: int) -> np.ndarray[tuple[int], np.dtype[np.generic]]:
        dtype = np.dtype(value_type.dtype)
        at = self.offset
        numbers = np.frombuffer(self.take(count * dtype.itemsize), dtype)
        if value_type.name != "bool":
            return numbers.astype(dtype.newbyteorder("="))
        if (numbers > 1).any():
            self.fail("has a boolean that is neither 0 nor 1", at)
        return numbers.astype(np.bool_)
