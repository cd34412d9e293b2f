"""Write GGUF files: streaming, and all or nothing.

Knows the container (version 3, little endian); nothing of models. The header needs every tensor's name, type and
shape first, so a `TensorToWrite` says these and gives its bytes later, piece by piece: a conversion never holds the
model in memory. The file grows under a temporary name beside its target, is forced to disk and then renamed, so that
under the target's name there is the old file or the whole new one, never a part.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import secrets
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from mlxr.core.errors import FormatError, ModelError
from mlxr.core.frozen import frozen
from mlxr.formats.ggml_types import by_name, decode_blocks, encode_pieces
from mlxr.formats.gguf import ALIGNMENT_RULE, DEFAULT_ALIGNMENT, MAGIC, MAX_DIMENSIONS, VALUE_TYPE_BY_NAME, is_alignment
from mlxr.formats.tensor import WeightSource

_ARRAY = re.compile(r"array\[(.*)\]")
_WORDS_BY_DTYPE = {
    np.dtype(row.dtype): row.name for row in VALUE_TYPE_BY_NAME.values() if row.dtype and row.name != "bool"
} | {np.dtype(np.bool_): "bool"}


def infer_type(value: object) -> str:
    """Return the type in words that suits a value; raises ValueError if GGUF cannot hold it.

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
    """Return the type's number and the value as bytes; raises ValueError if the value is not of that type."""
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
    """Pack numbers one after another; `shown` is the value for the error."""
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
    with np.errstate(over="ignore"):  # a float beyond float32 becomes infinity, as usual
        return given.astype(target).tobytes()


LONGEST_TENSOR_NAME_BYTES = 63  # ggml keeps names in 64 bytes with a closing zero
_VERSION = 3
_CHUNK_VALUES = 1 << 22
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@frozen
class TensorToWrite:
    """A tensor of a file to be written. `chunks` gives its raw blocks in order, when their turn comes.

    type_name: ggml's spelling. shape: NumPy order, blocks along the last axis.
    """

    name: str
    type_name: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[NDArray[np.uint8]]]

    @property
    def nbytes(self) -> int:
        """The bytes of the raw blocks; raises ModelError if the last axis does not fill whole blocks."""
        return math.prod(self.shape[:-1]) * by_name(self.type_name).row_bytes(self.shape[-1])

    @classmethod
    def from_array(cls, name: str, type_name: str, values: NDArray[np.float32]) -> TensorToWrite:
        """Encode an array that is in memory."""
        return cls(name, type_name, values.shape, lambda: _encode(name, type_name, values))

    @classmethod
    def from_source(
        cls,
        source: WeightSource,
        *,
        name: str,
        type_name: str,
        row_order: NDArray[np.intp] | None = None,
        importance: NDArray[np.float32] | None = None,
    ) -> TensorToWrite:
        """Take a tensor of another file, under `name`, in type `type_name`; bytes stay unchanged if it has that type.

        row_order: for a matrix, the source's row for each row (rows,); None keeps the order. importance: (matrices,
        columns), see `encode_pieces`; a stack may have one for each of its matrices, or one for all.
        """
        return cls(name, type_name, source.shape, lambda: _convert(source, name, type_name, row_order, importance))


def _encode(
    name: str, type_name: str, values: NDArray[np.float32], importance: NDArray[np.float32] | None = None
) -> Iterator[NDArray[np.uint8]]:
    try:
        yield from encode_pieces(by_name(type_name), values, importance)
    except ModelError as error:
        raise ModelError(f"tensor {name}: {error}") from error


def _convert(
    source: WeightSource,
    name: str,
    type_name: str,
    row_order: NDArray[np.intp] | None,
    importance: NDArray[np.float32] | None,
) -> Iterator[NDArray[np.uint8]]:
    """Yield the source's rows in the order and type wanted, some at a time; of a stack one part after another."""
    if len(source.shape) > 2:
        for index in range(source.shape[0]):
            own = None if importance is None else importance[index % len(importance)][None]
            yield from _convert(source.take_matrix(index), name, type_name, row_order, own)
        return
    row = by_name(source.type_name)
    columns = source.shape[-1]
    rows = source.data.reshape(-1, row.row_bytes(columns))
    step = max(1, _CHUNK_VALUES // columns)
    for start in range(0, len(rows), step):
        piece = rows[start : start + step] if row_order is None else rows[row_order[start : start + step]]
        if type_name == source.type_name:
            yield piece.reshape(-1)
        else:
            weights = None if importance is None else importance[0]
            yield from _encode(name, type_name, decode_blocks(row, piece.reshape(-1)).reshape(-1, columns), weights)
    source.release()


def write_gguf(
    path: str | os.PathLike[str],
    metadata: Mapping[str, object],
    tensors: Iterable[TensorToWrite],
    *,
    metadata_types: Mapping[str, str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Write a GGUF file and give its size in bytes.

    metadata: as `GGUFFile.metadata` has it; a key `general.alignment` is obeyed. metadata_types: types in words for
    keys whose type matters (`GGUFFile.metadata_types`); others are inferred. progress: called with (bytes written,
    bytes in all) as the tensors go out.
    Raises FormatError for a name, shape or value that a GGUF file cannot hold, a full disk, or any other failure to
    write, ModelError for weights that the type cannot hold; no file, and no part of one, is left behind.
    """
    target = Path(path)
    wanted = list(tensors)
    alignment = _check_alignment(target, metadata)
    _check_tensors(target, wanted)
    header = _pack_header(target, metadata, metadata_types or {}, wanted, alignment)
    total = len(header) + sum(_pad(tensor.nbytes, alignment) for tensor in wanted)
    with _replace_when_whole(target, total) as file:
        file.write(header)
        written = len(header)
        for tensor in wanted:
            for chunk in _checked_chunks(target, tensor):
                file.write(chunk.data)
                written += chunk.size
                if progress is not None:
                    progress(written, total)
            gap = _pad(tensor.nbytes, alignment) - tensor.nbytes
            file.write(bytes(gap))
            written += gap
    return total


def _pad(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def _check_alignment(path: Path, metadata: Mapping[str, object]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if is_alignment(alignment):
        return alignment
    raise FormatError(path, "metadata 'general.alignment'", None, f"is {alignment!r:.80}; {ALIGNMENT_RULE}")


def _check_tensors(path: Path, tensors: list[TensorToWrite]) -> None:
    seen: set[str] = set()
    for tensor in tensors:
        length = len(tensor.name.encode())
        reason = None
        if not 1 <= length <= LONGEST_TENSOR_NAME_BYTES:
            reason = f"has a name of {length} bytes; 1 to {LONGEST_TENSOR_NAME_BYTES} are allowed"
        elif tensor.name in seen:
            reason = "is there twice"
        elif not 1 <= len(tensor.shape) <= MAX_DIMENSIONS or min(tensor.shape) < 1:
            reason = f"has shape {tensor.shape}; 1 to {MAX_DIMENSIONS} sizes, none zero, are allowed"
        elif tensor.shape[-1] % by_name(tensor.type_name).block_size:
            reason = f"has rows of {tensor.shape[-1]}; {tensor.type_name} takes {by_name(tensor.type_name).block_size}s"
        elif by_name(tensor.type_name).id is None:
            reason = f"has type {tensor.type_name}, which GGUF files cannot hold"
        if reason is not None:
            raise FormatError(path, f"tensor {tensor.name[:80]!r}", None, reason)
        seen.add(tensor.name)


def _pack_header(
    path: Path, metadata: Mapping[str, object], types: Mapping[str, str], tensors: list[TensorToWrite], alignment: int
) -> bytes:
    parts = [MAGIC, struct.pack("<IQQ", _VERSION, len(tensors), len(metadata))]
    for key, value in metadata.items():
        try:
            parts += [pack_string(key), pack_typed_value(value, types.get(key) or infer_type(value))]
        except ValueError as error:
            raise FormatError(path, f"metadata {key[:80]!r}", None, str(error)) from error
    offset = 0
    for tensor in tensors:
        shape = tuple(reversed(tensor.shape))  # the file has columns first
        type_id = by_name(tensor.type_name).id
        parts.append(pack_string(tensor.name))
        parts.append(struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, type_id, offset))
        offset += _pad(tensor.nbytes, alignment)
    header = b"".join(parts)
    return header + bytes(_pad(len(header), alignment) - len(header))


def _checked_chunks(path: Path, tensor: TensorToWrite) -> Iterator[NDArray[np.uint8]]:
    """Yield the tensor's chunks as contiguous bytes; raises FormatError if their size does not fit the shape."""
    given = 0
    for chunk in tensor.chunks():
        flat = np.ascontiguousarray(chunk).reshape(-1).view(np.uint8)
        given += flat.size
        if given > tensor.nbytes:
            break
        yield flat
    if given != tensor.nbytes:
        amount = f"more than {tensor.nbytes}" if given > tensor.nbytes else f"{given} instead of {tensor.nbytes}"
        raise FormatError(path, f"tensor {tensor.name!r}", None, f"was given {amount} bytes")


@contextlib.contextmanager
def _replace_when_whole(target: Path, total_bytes: int) -> Iterator[BinaryIO]:
    """Open a file that becomes `target` if the block succeeds, and is removed if it fails."""
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        _check_room(target, total_bytes)
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
        _sync_folder(target.parent)
    except OSError as error:
        reason = f"cannot be written: {error.strerror or error}"
        if error.errno in _FULL:
            reason = f"the disk is full or a limit is reached ({error.strerror}); {total_bytes} bytes are needed"
        raise FormatError(target, "file", None, f"{reason}; nothing was left behind") from error
    finally:
        temporary.unlink(missing_ok=True)


def _check_room(target: Path, total_bytes: int) -> None:
    """Raise an error before hours of work if the disk cannot hold the result."""
    if not hasattr(os, "statvfs"):
        return
    disk = os.statvfs(target.parent)
    if disk.f_bavail * disk.f_frsize < total_bytes:
        raise OSError(errno.ENOSPC, f"{disk.f_bavail * disk.f_frsize} bytes are free")


def _sync_folder(folder: Path) -> None:
    """Write the rename to disk; some systems cannot open a folder for that, and the file is whole either way."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
