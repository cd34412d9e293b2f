"""The file of one stored page: written so that a reader can tell whether it is whole, right and the one it wants.

Little-endian header, then the page's bytes as the arena exports them:

| bytes | field |
|---|---|
| 8 | magic `MLXRPAGE` |
| 4 | version of the format |
| 4 | reserved, zero |
| 8 | bytes of the page |
| 32 | model: hash of whatever the page's contents depend on besides tokens |
| 32 | key: chained hash of the tokens up to the page's end, and the name of the file |
| 32 | BLAKE2b-256 of all of the above and of the page's bytes |

A file is written under a temporary name and renamed when it is complete, so a process that dies leaves a temporary
file at worst. Nothing is synchronised to the disk: what a power cut leaves behind a rename is caught by the checksum.
A page that travels from one process to another has the same form. Knows no bounds, no counts and no policy.
"""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path

import numpy as np

from mlxr.cache.stats import StoreDrop
from mlxr.kernels.tensor import ByteArray

MAGIC = b"MLXRPAGE"
VERSION = 1
_FIELDS = struct.Struct("<8sIIQ32s32s")
DIGEST_BYTES = 32
HEADER_BYTES = _FIELDS.size + DIGEST_BYTES


class EntryError(Exception):
    """The file is not the page that was wanted; `cause` says in which way."""

    def __init__(self, cause: StoreDrop) -> None:
        self.cause = cause
        super().__init__(cause.value)


def write_entry(temporary: Path, path: Path, model: bytes, key: bytes, payload: ByteArray, stamp_ns: int) -> None:
    """Write a page to `temporary`, then rename it to `path`; `stamp_ns` becomes its modification time.

    Raises OSError, with the temporary file removed where the system allows it.
    """
    header = pack_header(model, key, payload)
    try:
        with temporary.open("wb", buffering=0) as file:
            _write_all(file.fileno(), memoryview(header))
            _write_all(file.fileno(), payload.data)
        os.utime(temporary, ns=(stamp_ns, stamp_ns))
        temporary.replace(path)
    except OSError:
        remove_file(temporary)
        raise


def read_entry(path: Path, model: bytes, key: bytes, payload: ByteArray) -> None:
    """Read the page of `model` named `key` into `payload`, which has its size.

    Raises EntryError when the file is not that page, whole and unharmed (`payload` is then of no use), OSError when
    the system cannot read it.
    """
    with path.open("rb", buffering=0) as file:
        header = file.read(HEADER_BYTES)
        size = os.fstat(file.fileno()).st_size
        check_version(header)
        if size != HEADER_BYTES + payload.nbytes or _read_all(file.fileno(), payload.data) != payload.nbytes:
            raise EntryError(StoreDrop.HALF_WRITTEN)
    prove_entry(header, payload)
    own_model, own_key, _ = read_header(header)
    if (own_model, own_key) != (model, key):
        raise EntryError(StoreDrop.FOREIGN)


def pack_header(model: bytes, key: bytes, payload: ByteArray) -> bytes:
    """Return the header of a page's record: model, key, size, and a digest of these and of the payload."""
    fields = _FIELDS.pack(MAGIC, VERSION, 0, payload.nbytes, model, key)
    return fields + _digest(fields, payload)


def read_header(header: bytes) -> tuple[bytes, bytes, int]:
    """The model, the key and the bytes of the page that a header speaks of, none of it proved.

    Raises EntryError unless it is a header of this version.
    """
    check_version(header)
    _, _, _, nbytes, model, key = _FIELDS.unpack(header[: _FIELDS.size])
    return model, key, nbytes


def prove_entry(header: bytes, payload: ByteArray) -> None:
    """Raise EntryError unless header and page are as they were written."""
    if _digest(header[: _FIELDS.size], payload) != header[_FIELDS.size :]:
        raise EntryError(StoreDrop.DAMAGED)


def check_version(fields: bytes) -> None:
    """Raise EntryError unless `fields`, the start of a file, is a page of this version of the format."""
    if len(fields) < _FIELDS.size:
        raise EntryError(StoreDrop.HALF_WRITTEN)
    magic, version, *_ = _FIELDS.unpack(fields[: _FIELDS.size])
    if magic != MAGIC:
        raise EntryError(StoreDrop.DAMAGED)
    if version != VERSION:
        raise EntryError(StoreDrop.VERSION)


def name_misfit(path: Path) -> StoreDrop:
    """Why a file whose size is wrong is not a page of ours: another version, or cut short, or not ours at all."""
    try:
        with path.open("rb") as file:
            check_version(file.read(_FIELDS.size))
    except EntryError as error:
        return error.cause
    except OSError:
        return StoreDrop.UNREADABLE
    return StoreDrop.HALF_WRITTEN


def remove_file(path: Path) -> bool:
    """Remove a file; whether it is gone, by us or by others."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def _digest(fields: bytes, payload: ByteArray) -> bytes:
    digest = hashlib.blake2b(fields, digest_size=DIGEST_BYTES)
    digest.update(payload.data)
    return digest.digest()


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _read_all(descriptor: int, target: memoryview) -> int:
    """Fill `target` as far as the file goes; the bytes read."""
    filled = 0
    while filled < len(target) and (count := os.readv(descriptor, [target[filled:]])):
        filled += count
    return filled


def allocate_payload(page_bytes: int) -> ByteArray:
    """Room for the bytes of one page."""
    return np.empty(page_bytes, dtype=np.uint8)
