"""Pages on disk: content-addressed files in a folder, bounded in bytes, for this process and those that come later.

Each model has its own folder inside the store's folder. Each page is a file named by its key and, if the model has
several groups of layers, by its group. `store_writer` decides when to write. A page that is not right in every bit is
dropped, counted and never used. If the system refuses to write, writing stops for good with one warning, and everything
else goes on. Several processes may share a folder: each bounds it by what it sees, and looks again before it removes
anything. The least recently used files of all models in the folder are removed first, by modification time: a process
that writes or uses a page sets that to the time less the page's depth in microseconds, so deeper pages go first.

The file of a page has a little-endian header, then the page's bytes as the arena exports them:

| bytes | field |
|---|---|
| 8 | magic `MLXRPAGE` |
| 4 | version of the format |
| 4 | reserved, zero |
| 8 | bytes of the page |
| 32 | model: hash of everything that the page's contents depend on besides tokens |
| 32 | key: chained hash of the tokens up to the page's end, and the name of the file |
| 32 | BLAKE2b-256 of all of the above and of the page's bytes |

It is written under a temporary name and renamed when it is complete, so a process that dies leaves a temporary file at
worst. Nothing is synchronised to the disk: the checksum finds a file that a power cut has left incomplete. A page that
is sent from one process to another has the same format.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock

import numpy as np

from mlxr.cache.prefix import hash_fields
from mlxr.core.frozen import frozen
from mlxr.core.stats import StoreDrop, StoreStats
from mlxr.kernels.tensor import ByteArray

MAGIC = b"MLXRPAGE"
VERSION = 1
_FIELDS = struct.Struct("<8sIIQ32s32s")
DIGEST_BYTES = 32
HEADER_BYTES = _FIELDS.size + DIGEST_BYTES


class EntryError(Exception):
    """The file is not the page that was wanted, for the reason `cause`."""

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
    """Return the model, the key and the number of payload bytes that a header names, unverified.

    Raises EntryError unless it is a header of this version.
    """
    check_version(header)
    _, _, _, nbytes, model, key = _FIELDS.unpack(header[: _FIELDS.size])
    return model, key, nbytes


def prove_entry(header: bytes, payload: ByteArray) -> None:
    """Raise EntryError unless the digest in the header is that of header and page."""
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
    """Return why a file of the wrong size is no page of ours: another version, half-written, damaged or unreadable."""
    try:
        with path.open("rb") as file:
            check_version(file.read(_FIELDS.size))
    except EntryError as error:
        return error.cause
    except OSError:
        return StoreDrop.UNREADABLE
    return StoreDrop.HALF_WRITTEN


def remove_file(path: Path) -> bool:
    """Remove a file; return True if it is gone, even if another process removed it."""
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
    """Fill `target` as far as the file goes; return the number of bytes read."""
    filled = 0
    while filled < len(target) and (count := os.readv(descriptor, [target[filled:]])):
        filled += count
    return filled


def allocate_payload(page_bytes: int) -> ByteArray:
    """Return an array for the bytes of one page."""
    return np.empty(page_bytes, dtype=np.uint8)


logger = logging.getLogger(__name__)

SUFFIX = ".page"
TEMPORARY_SUFFIX = ".part"
PAGE_NAME = re.compile(r"([0-9a-f]{64})(?:-([1-9][0-9]{0,3}))?\.page")
PageName = tuple[int, bytes]  # the number of a group, and a key
FOLDER_NAME = re.compile(r"[0-9a-f]{32}")
ROOM_SHARE = 1 / 16  # share of the bound that is freed at a time, so that the folder is not scanned for every page


@frozen
class _File:
    """A file in the store as the folder shows it."""

    path: Path
    size_bytes: int
    stamp_ns: int


def name_groups(model: bytes, groups: int) -> tuple[bytes, ...]:
    """Name each group of `model` by 32 bytes that its pages carry; the first one has the name of the model."""
    return tuple(hash_fields(model, group.to_bytes(4)) if group else model for group in range(groups))


class PageStore:
    """Pages of one model in `folder`, at most `max_bytes` together with those of other models there.

    Only `open`, which names the model, touches the disk. One thread may read while another writes.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        if max_bytes < 1:
            raise ValueError(f"a store needs room for bytes, got {max_bytes}; for none, have no store")
        self.folder, self.max_bytes = Path(folder), max_bytes
        self._own = self.folder  # this model's folder, once open
        self._models: tuple[bytes, ...] = ()  # the model's name in the files of each group
        self._entry_bytes: tuple[int, ...] = ()
        self._payloads: tuple[ByteArray, ...] = ()
        self._names: set[PageName] = set()
        self._own_bytes = 0
        self._foreign_bytes = 0
        self._drops: Counter[StoreDrop] = Counter()
        self._written_pages = self._read_pages = 0
        self._warned: set[StoreDrop] = set()
        self._writable = False
        self.touched: set[PageName] | None = None  # pages whose place may have changed, while somebody watches
        self._lock = Lock()  # for the fields, never held while the disk works

    @property
    def writable(self) -> bool:
        """True while pages can be written."""
        return self._writable

    def open(self, model: bytes, payload_bytes: Sequence[int]) -> None:
        """Find the pages of `model` (32 bytes); `payload_bytes` are the bytes of a page of each group.

        Leftovers of processes that died and files of a wrong size are removed. Errors of the disk are not raised:
        writing stops.
        """
        self._models = name_groups(model, len(payload_bytes))
        self._entry_bytes = tuple(HEADER_BYTES + size_bytes for size_bytes in payload_bytes)
        self._payloads = tuple(map(allocate_payload, payload_bytes))
        self._own = self.folder / model.hex()[:32]
        try:
            is_new = not self._own.is_dir()
            self._own.mkdir(parents=True, exist_ok=True)
            effective = os.access in os.supports_effective_ids
            self._writable = os.access(self._own, os.W_OK | os.X_OK, effective_ids=effective)
            self._remove_leftovers()
            self._adopt(list(self._scan_own()))
            foreign = list(self._scan_others())
            self._foreign_bytes = sum(file.size_bytes for file in foreign)
            if self._writable and self._total_bytes > self.max_bytes:
                self._make_room()
        except OSError as error:
            self._stop_writing(error)
            return
        if not self._writable:
            self._stop_writing(PermissionError("no permission to write"))
        elif self.max_bytes < sum(self._entry_bytes):
            self._stop_writing(ValueError(f"{self.max_bytes} bytes hold no page of {sum(self._entry_bytes)}"))
        elif is_new and foreign:
            self._warn(
                StoreDrop.FOREIGN,
                f"the page store {self.folder} was made by another model: its {len(foreign)} pages are not used, and "
                "are removed when room is needed",
            )

    def contains(self, name: PageName) -> bool:
        """Return True if a page of that name is known; its file is not read."""
        return name in self._names

    def read(self, name: PageName) -> ByteArray | None:
        """Return the verified bytes of the page of that name, valid until the next `read`; None if it is not there."""
        payload = self._payloads[name[0]] if name in self._names else None
        return payload if payload is not None and self.read_into(name, payload) else None

    def read_into(self, name: PageName, payload: ByteArray) -> bool:
        """Read the page of that name into `payload`, which has its size; return True if it is there and verified.

        Any thread may call this.
        """
        if name not in self._names:
            return False
        group, key = name
        try:
            read_entry(self._path(name), self._models[group], key, payload)
        except FileNotFoundError:  # removed by another process
            self._forget(name)
            return False
        except EntryError as error:
            self._drop(name, error.cause)
            return False
        except OSError:
            self._drop(name, StoreDrop.UNREADABLE)
            return False
        with self._lock:
            self._read_pages += 1
        return True

    def write(self, name: PageName, payload: ByteArray, stamp_ns: int) -> bool:
        """Store a page, removing others if the bound demands it; return True if it was written."""
        if not self._writable:
            self.count_drop(StoreDrop.UNWRITABLE)
            return False
        group, key = name
        path = self._path(name)
        temporary = self._own / f"{os.getpid()}-{path.stem}{TEMPORARY_SUFFIX}"
        try:
            self._restore_folder()
            self._make_room(self._entry_bytes[group])
            write_entry(temporary, path, self._models[group], key, payload, stamp_ns)
        except OSError as error:
            self.count_drop(StoreDrop.UNWRITABLE)
            if not isinstance(error, FileNotFoundError):  # else: another process removed the folder meanwhile
                self._stop_writing(error)
            return False
        with self._lock:
            if name not in self._names:
                self._names.add(name)
                self._own_bytes += self._entry_bytes[group]
            self._written_pages += 1
        return True

    def touch(self, name: PageName, stamp_ns: int) -> None:
        """Note that the page of that name was used; if its file is gone, forget it."""
        try:
            os.utime(self._path(name), ns=(stamp_ns, stamp_ns))
        except FileNotFoundError:
            self._forget(name)
        except OSError as error:
            self._stop_writing(error)

    def note(self, *names: PageName) -> None:
        """Note that the places of pages may have changed, if somebody watches."""
        touched = self.touched
        if touched is not None:
            touched.update(names)

    def count_drop(self, cause: StoreDrop) -> None:
        """Count a page that did not reach the store, or left it."""
        with self._lock:
            self._drops[cause] += 1

    def stats(self, queued_pages: int = 0) -> StoreStats:
        """Return the store's numbers at this moment."""
        with self._lock:
            return StoreStats(
                folder=str(self.folder),
                entries=len(self._names),
                bytes=self._own_bytes,
                foreign_bytes=self._foreign_bytes,
                max_bytes=self.max_bytes,
                written_pages=self._written_pages,
                read_pages=self._read_pages,
                queued_pages=queued_pages,
                drops={cause: self._drops[cause] for cause in StoreDrop},
                writable=self._writable,
            )

    def check(self) -> None:
        """Check that the known pages are within the bound; raises AssertionError."""
        if self._writable and self._total_bytes > self.max_bytes:
            raise AssertionError(f"{self._total_bytes} bytes are stored, {self.max_bytes} may be")
        if self._own_bytes != sum(self._entry_bytes[group] for group, _ in self._names):
            raise AssertionError(f"{len(self._names)} pages are stored, in {self._own_bytes} bytes")

    @property
    def _total_bytes(self) -> int:
        return self._own_bytes + self._foreign_bytes

    def _path(self, name: PageName) -> Path:
        group, key = name
        return self._own / (key.hex() + (f"-{group}" if group else "") + SUFFIX)

    def _forget(self, name: PageName) -> None:
        """Forget a page whose file is gone."""
        with self._lock:
            if name in self._names:
                self._names.discard(name)
                self._own_bytes -= self._entry_bytes[name[0]]
        self.note(name)

    def _remove_leftovers(self) -> None:
        """Remove and count the half-written files of processes that died.

        A process that is writing right now only loses that page: it notices, and goes on.
        """
        for file in _scan_folder(self._own):
            if file.path.suffix == TEMPORARY_SUFFIX and remove_file(file.path):
                self.count_drop(StoreDrop.HALF_WRITTEN)

    def _scan_own(self) -> Iterator[_File]:
        """Yield the pages of this model with a valid name and size; remove and count others."""
        for file in _scan_folder(self._own):
            if file.path.suffix != SUFFIX:
                continue
            name = self._parse_name(file.path.name)
            if name is not None and file.size_bytes == self._entry_bytes[name[0]]:
                yield file
                continue
            cause = name_misfit(file.path)
            if remove_file(file.path):
                self.count_drop(cause)

    def _scan_others(self) -> Iterator[_File]:
        """Yield the files of other models; folders that are not named like a model's are left alone."""
        for name in os.listdir(self.folder):
            if FOLDER_NAME.fullmatch(name) and name != self._own.name:
                with suppress(OSError):  # a folder that may not be read counts as empty
                    yield from _scan_folder(self.folder / name)

    def _parse_name(self, file_name: str) -> PageName | None:
        """Return the name of the page in a file, if it can be one of this model's."""
        match = PAGE_NAME.fullmatch(file_name)
        if match is None or (group := int(match[2] or 0)) >= len(self._entry_bytes):
            return None
        return group, bytes.fromhex(match[1])

    def _adopt(self, files: list[_File]) -> None:
        """Set the known pages to those of `files`."""
        names = {name for file in files if (name := self._parse_name(file.path.name)) is not None}
        with self._lock:
            self.note(*(self._names ^ names))
            self._names = names
            self._own_bytes = sum(self._entry_bytes[group] for group, _ in names)

    def _make_room(self, more_bytes: int = 0) -> None:
        """Remove files until `more_bytes` more fit within the bound; raises OSError."""
        if self._total_bytes + more_bytes <= self.max_bytes:
            return
        own, others = list(self._scan_own()), list(self._scan_others())
        excess_bytes = sum(file.size_bytes for file in (*own, *others)) - min(
            int(self.max_bytes * (1 - ROOM_SHARE)), self.max_bytes - max(self._entry_bytes)
        )
        for file in sorted((*own, *others), key=lambda file: file.stamp_ns):
            if excess_bytes <= 0:
                break
            if remove_file(file.path):
                excess_bytes -= file.size_bytes
                self.count_drop(StoreDrop.ROOM)
        self._adopt([file for file in own if file.path.exists()])
        with self._lock:
            self._foreign_bytes = sum(file.size_bytes for file in others if file.path.exists())

    def _restore_folder(self) -> None:
        """Make the folder again, empty, if it has been removed; raises OSError if it cannot be made."""
        if not self._own.is_dir():
            self._own.mkdir(parents=True, exist_ok=True)
            self._adopt([])
            with self._lock:
                self._foreign_bytes = 0

    def _drop(self, name: PageName, cause: StoreDrop) -> None:
        """Forget and remove a page that must not be used; log a warning for the first of each cause."""
        removed = remove_file(self._path(name))
        self._forget(name)
        self.count_drop(cause)
        self._warn(
            cause,
            f"a page in the store {self.folder} is {cause.value.replace('_', ' ')}"
            f"{'' if removed else ' and cannot be removed'}: it is computed again, others like it are only counted",
        )

    def _stop_writing(self, error: Exception) -> None:
        """Write no more pages, and log that once."""
        self._writable = False
        self._warn(
            StoreDrop.UNWRITABLE, f"pages are no longer stored in {self.folder}: {error}; answers are not affected"
        )

    def _warn(self, cause: StoreDrop, text: str) -> None:
        """Log `text`, unless something of the same cause was logged before."""
        with self._lock:
            is_first = cause not in self._warned
            self._warned.add(cause)
        if is_first:
            logger.warning("%s", text)


def _scan_folder(folder: Path) -> Iterator[_File]:
    """Yield files in `folder` named like pages or half-written pages, without those that vanish meanwhile."""
    with os.scandir(folder) as items:
        for item in items:
            if item.name.endswith((SUFFIX, TEMPORARY_SUFFIX)) and item.is_file(follow_symlinks=False):
                with suppress(FileNotFoundError):
                    status = item.stat(follow_symlinks=False)
                    yield _File(Path(item.path), status.st_size, status.st_mtime_ns)
