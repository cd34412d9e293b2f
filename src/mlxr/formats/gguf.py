"""GGUF models: metadata and tensors, from one file or from all parts of a split one.

Knows how parts belong together; the inside of a part is `gguf_header`'s, and what keys mean is the models'. `open_gguf`
maps the files and gives tensors whose `data` are views of the mapping: nothing is copied.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import itertools
import math
import os
import re
import struct
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Never, TypeGuard

import numpy as np

from mlxr.core.errors import FormatError, ModelError, NotFound
from mlxr.core.frozen import frozen
from mlxr.formats.ggml_types import GGMLType, by_id, by_name
from mlxr.formats.tensor import MappedFile, TensorSource, WeightFiles

MAX_ARRAY_DEPTH = 4
# Objects take more memory than the bytes they are read from, so the number that a header may make is limited: strings,
# arrays and numbers in short lists. The largest vocabularies need about a quarter.
MAX_ITEMS = 1 << 22
LARGE_ARRAY = 1024  # numeric arrays of this many elements or more stay NumPy arrays


@frozen
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
        """Read a 64-bit count of things of at least `smallest_bytes` each; refused if the file cannot hold them."""
        at = self.offset
        count = self.read_u64()
        if count * smallest_bytes > self._size - self.offset:
            self.fail(f"claims {count} {what}, more than fit in the file's {self._size} bytes", at)
        if limit is not None and count > limit:
            self.fail(f"claims {count} {what}; {limit} are allowed", at)
        return count

    def read_string(self) -> str:
        """Read a length and so many bytes of UTF-8."""
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
        """Read a value of the given type; returns it with the type in words (`u32`, `string`, `array[f32]`, ...)."""
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
        """Read `count` strings, eight times as fast as `read_string`: vocabularies have half a million."""
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
            pass  # the loop below raises the proper error
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


MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
_LARGEST_ALIGNMENT = 1 << 24
ALIGNMENT_RULE = f"it must be a power of two from 8 to {_LARGEST_ALIGNMENT}"
MAX_DIMENSIONS = 4
MAX_NAME_BYTES = 65535
MAX_ENTRIES = 1 << 20  # of metadata, and of tensors: far beyond any model; bounds the memory that a header can take
_SMALLEST_ENTRY_BYTES = 8 + 1 + 4 + 1  # of metadata: key length, key, value type, value
_SMALLEST_INFO_BYTES = 8 + 1 + 4 + 8 + 4 + 8  # of a tensor: name length, name, dimensions, one of them, type, offset


@frozen
class TensorInfo:
    """The place of a tensor: `start` counts from the start of the file, `info_offset` is that of its header entry."""

    name: str
    row: GGMLType
    shape: tuple[int, ...]
    start: int
    nbytes: int
    info_offset: int


@dataclass(slots=True)
class Header:
    """The header of one file. metadata_types and metadata_offsets: each key's type in words, and its entry's offset."""

    version: int
    metadata: dict[str, object] = field(default_factory=dict)
    metadata_types: dict[str, str] = field(default_factory=dict)
    metadata_offsets: dict[str, int] = field(default_factory=dict)
    infos: list[TensorInfo] = field(default_factory=list)


def is_alignment(value: object) -> TypeGuard[int]:
    """Return True if a value of `general.alignment` obeys ALIGNMENT_RULE."""
    if not isinstance(value, int) or isinstance(value, bool):
        return False
    return 8 <= value <= _LARGEST_ALIGNMENT and not value & (value - 1)


def read_header(file: MappedFile) -> Header:
    """Read and check the header of a mapped file."""
    cursor = Cursor(file)
    header = Header(_read_version(cursor))
    cursor.field = "tensor count"
    tensor_count = cursor.read_count("tensors", _SMALLEST_INFO_BYTES, MAX_ENTRIES)
    cursor.field = "metadata count"
    entry_count = cursor.read_count("metadata entries", _SMALLEST_ENTRY_BYTES, MAX_ENTRIES)
    for number in range(entry_count):
        _read_entry(cursor, header, number)
    alignment = _check_alignment(file, header)
    infos = [_read_info(cursor, number, alignment) for number in range(tensor_count)]
    data_start = -(-cursor.offset // alignment) * alignment
    header.infos = _place_tensors(file, infos, data_start)
    return header


def _read_version(cursor: Cursor) -> int:
    cursor.field = "magic"
    magic = bytes(cursor.take(4))
    if magic != MAGIC:
        cursor.fail(f"is {magic!r}, not {MAGIC!r}: this is not a GGUF file", 0)
    cursor.field = "version"
    version = cursor.read_u32()
    if version & 0xFFFF == 0 and version:
        cursor.fail("is big endian; only little-endian GGUF files are supported", 4)
    if version not in VERSIONS:
        cursor.fail(f"is {version}; supported are {' and '.join(map(str, VERSIONS))}", 4)
    return version


def _read_name(cursor: Cursor, what: str, number: int) -> str:
    cursor.field, at = f"{what} {number}", cursor.offset
    length = cursor.peek_u64()
    if not 1 <= length <= MAX_NAME_BYTES:
        cursor.fail(f"has {length} bytes; 1 to {MAX_NAME_BYTES} are allowed", at)
    return cursor.read_string()


def _read_entry(cursor: Cursor, header: Header, number: int) -> None:
    at = cursor.offset
    key = _read_name(cursor, "metadata key", number)
    cursor.field = f"metadata {key[:80]!r}"
    if key in header.metadata:
        cursor.fail("is there twice", at)
    header.metadata_offsets[key] = at
    header.metadata[key], header.metadata_types[key] = cursor.read_value(cursor.read_value_type())


def _check_alignment(file: MappedFile, header: Header) -> int:
    key = "general.alignment"
    alignment = header.metadata.get(key, DEFAULT_ALIGNMENT)
    if is_alignment(alignment):
        return alignment
    reason = f"is {str(alignment)[:80]}; {ALIGNMENT_RULE}"
    raise FormatError(file.path, f"metadata {key!r}", header.metadata_offsets[key], reason)


def _read_info(cursor: Cursor, number: int, alignment: int) -> TensorInfo:
    """Read one tensor info, its `start` still counted from the start of the data."""
    info_offset = cursor.offset
    name = _read_name(cursor, "tensor name", number)
    cursor.field = f"dimensions of tensor {name[:80]!r}"
    at = cursor.offset
    dimensions = cursor.read_u32()
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        cursor.fail(f"are {dimensions} in number; 1 to {MAX_DIMENSIONS} are allowed", at)
    at = cursor.offset
    shape = tuple(reversed([cursor.read_u64() for _ in range(dimensions)]))  # the file has columns first
    if 0 in shape:
        cursor.fail(f"are {shape}; none may be zero", at)
    cursor.field = f"type of tensor {name[:80]!r}"
    at = cursor.offset
    try:
        row = by_id(cursor.read_u32())
        nbytes = math.prod(shape[:-1]) * row.row_bytes(shape[-1])
    except ModelError as error:
        cursor.fail(str(error), at)
    cursor.field = f"offset of tensor {name[:80]!r}"
    at = cursor.offset
    start = cursor.read_u64()
    if start % alignment:
        cursor.fail(f"is {start}, no multiple of the alignment {alignment}", at)
    return TensorInfo(name, row, shape, start, nbytes, info_offset)


def _tell_blocks(infos: list[TensorInfo], data_bytes: int) -> list[TensorInfo]:
    """Tell the two meanings of Q2_0 apart: blocks of 64 columns or, in PrismML's first files, of 128 (PQ2_0).

    The larger blocks take fewer bytes: they are meant if the others would overlap and all of the larger ones fit.
    """
    wide, narrow = by_name("pq2_0"), [info for info in infos if info.row.name == "q2_0"]
    starts = sorted({info.start for info in infos} | {data_bytes})
    ends = {info.name: next((at for at in starts if at > info.start), info.start) for info in narrow}
    if all(info.start + info.nbytes <= ends[info.name] for info in narrow):
        return infos
    sizes = {info.name: info.nbytes * wide.type_size // (2 * info.row.type_size) for info in narrow}
    if any(info.shape[-1] % wide.block_size or info.start + sizes[info.name] > ends[info.name] for info in narrow):
        return infos
    return [replace(info, row=wide, nbytes=sizes[info.name]) if info.name in sizes else info for info in infos]


def _place_tensors(file: MappedFile, infos: list[TensorInfo], data_start: int) -> list[TensorInfo]:
    """Turn offsets into places in the file; refuse twins, overlaps and tensors past the end."""
    infos = _tell_blocks(infos, file.size_bytes - data_start)
    placed: dict[str, TensorInfo] = {}
    for info in infos:
        where = f"tensor {info.name[:80]!r}"
        if info.name in placed:
            raise FormatError(file.path, where, info.info_offset, "is there twice")
        start = data_start + info.start
        if start + info.nbytes > file.size_bytes:
            reason = f"takes bytes {start} to {start + info.nbytes}, the file ends at {file.size_bytes}"
            raise FormatError(file.path, where, info.info_offset, f"{reason}; is it truncated?")
        placed[info.name] = TensorInfo(info.name, info.row, info.shape, start, info.nbytes, info.info_offset)
    for before, after in itertools.pairwise(sorted(placed.values(), key=lambda info: info.start)):
        if before.start + before.nbytes > after.start:
            reason = f"overlaps {before.name[:80]!r}, which ends at {before.start + before.nbytes}"
            raise FormatError(file.path, f"tensor {after.name[:80]!r}", after.info_offset, reason)
    return list(placed.values())


SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")
_SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


class _Part:
    """One file of a model, mapped, its header read and checked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = MappedFile(path)
        self.header: Header = read_header(self.file)

    def read_split_key(self, key: str, default: int) -> int:
        """One of SPLIT_KEYS as an integer."""
        value = self.header.metadata.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.complain(key, f"is {str(value)[:80]}, not a count")
        return value

    def complain(self, key: str, reason: str) -> FormatError:
        """The error for a bad metadata entry of this part."""
        return FormatError(self.path, f"metadata {key!r}", self.header.metadata_offsets.get(key), reason)


class GGUFFile(WeightFiles):
    """An open GGUF model.

    metadata: key to int, float, bool, str, list (of the same; arrays may nest), or NumPy array for long numeric ones.
    metadata_types: key to its type in words (`u32`, `array[string]`), for a writer that wants to keep them.
    tensors: name to TensorSource, in file order. paths: the files, in order. The metadata leaves out the keys that
    describe the split, as all parts are here.
    """

    def __init__(self, parts: list[_Part]) -> None:
        super().__init__([part.file for part in parts])
        first = parts[0].header
        self.version = first.version
        self.metadata = {key: value for key, value in first.metadata.items() if key not in SPLIT_KEYS}
        self.metadata_types = {key: first.metadata_types[key] for key in self.metadata}
        for part in parts:
            for info in part.header.infos:
                if info.name in self.tensors:
                    reason = "is in an earlier part too"
                    raise FormatError(part.path, f"tensor {info.name[:80]!r}", info.info_offset, reason)
                data = part.file.bytes[info.start : info.start + info.nbytes]
                self.tensors[info.name] = TensorSource(info.name, info.row.name, info.shape, data, part.file)


def open_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Open a GGUF file, or all parts of a split one given any of them (`model-00001-of-00003.gguf`).

    Raises NotFound if the file or a part is missing, FormatError if a file is broken, of another kind, or holds a type
    that is not supported.
    """
    opened = _Part(Path(path))
    count = opened.read_split_key("split.count", 1)
    if count <= 1:
        return GGUFFile([opened])
    parts = []
    for number, part_path in enumerate(_name_parts(opened, count)):
        part = opened if part_path == opened.path else _Part(part_path)
        if part.read_split_key("split.count", 1) != count:
            raise part.complain("split.count", f"differs from the {count} of {opened.path.name}")
        if part.read_split_key("split.no", 0) != number:
            raise part.complain("split.no", f"is not {number}, as the file's name has it")
        parts.append(part)
    _check_total(parts)
    return GGUFFile(parts)


def _name_parts(opened: _Part, count: int) -> list[Path]:
    match = _SPLIT_NAME.fullmatch(opened.path.name)
    if match is None or int(match["count"]) != count:
        reason = f"is {count}, but the file name does not end in -00001-of-{count:05d}.gguf; give it its own name back"
        raise opened.complain("split.count", reason)
    paths = []
    for number in range(1, count + 1):
        path = opened.path.with_name(f"{match['stem']}-{number:05d}-of-{count:05d}.gguf")
        if not path.exists():
            raise NotFound(f"{path}: part {number} of {count} is missing; all parts belong in one folder")
        paths.append(path)
    return paths


def _check_total(parts: list[_Part]) -> None:
    found = sum(len(part.header.infos) for part in parts)
    stated = parts[0].read_split_key("split.tensors.count", found)
    if stated != found:
        raise parts[0].complain("split.tensors.count", f"is {stated}, the parts hold {found} tensors")
