"""The header of one GGUF file: metadata and tensor infos, read and checked before anything is used.

Knows the container (versions 2 and 3, little endian); not how a model is split over files, nor what keys mean to a
model. `read_header` trusts no count, length, name or offset: what it returns lies within the file and does not
overlap. Failures are FormatError(file, field, offset, reason).
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import TypeGuard

from mlxr.core.errors import FormatError, ModelError

from .ggml_types import GGMLType, by_id
from .gguf_values import Cursor
from .mapped_file import MappedFile

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
_LARGEST_ALIGNMENT = 1 << 24
ALIGNMENT_RULE = f"it must be a power of two from 8 to {_LARGEST_ALIGNMENT}"
MAX_DIMENSIONS = 4
MAX_NAME_BYTES = 65535
MAX_ENTRIES = 1 << 20  # of metadata, and of tensors: far beyond any model, and bounds what a header makes us allocate
_SMALLEST_ENTRY_BYTES = 8 + 1 + 4 + 1  # of metadata: key length, key, value type, value
_SMALLEST_INFO_BYTES = 8 + 1 + 4 + 8 + 4 + 8  # of a tensor: name length, name, dimensions, one of them, type, offset


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies: `start` counts from the start of the file, `info_offset` is where the header says so."""

    name: str
    row: GGMLType
    shape: tuple[int, ...]
    start: int
    nbytes: int
    info_offset: int


@dataclass(slots=True)
class Header:
    """What one file says. metadata_types and metadata_offsets: each key's type in words, and where its entry is."""

    version: int
    metadata: dict[str, object] = field(default_factory=dict)
    metadata_types: dict[str, str] = field(default_factory=dict)
    metadata_offsets: dict[str, int] = field(default_factory=dict)
    infos: list[TensorInfo] = field(default_factory=list)


def is_alignment(value: object) -> TypeGuard[int]:
    """Whether a value of `general.alignment` obeys ALIGNMENT_RULE."""
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
    """One tensor info, its `start` still counted from the start of the data."""
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


def _place_tensors(file: MappedFile, infos: list[TensorInfo], data_start: int) -> list[TensorInfo]:
    """Turn offsets into places in the file; refuse twins, overlaps and what lies past the end."""
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
