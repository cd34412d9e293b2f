"""The catalogue read as it lies on disk, where SQLite cannot: a folder that may only be read, a disk that is full.

A database with a write-ahead log needs files beside it even to be read, which SQLite makes there. Here both files are
read whole, and the log's finished transactions put in their places in memory.
Format of the log: https://www.sqlite.org/fileformat2.html#the_write_ahead_log
"""

from __future__ import annotations

import os
import sqlite3
import struct
from pathlib import Path

MAX_BYTES = 1 << 28
MAX_TRIES = 8
_HEADER, _FRAME = struct.Struct(">8I"), struct.Struct(">6I")
_BIG_ENDIAN_SUMS = 0x377F0683
_MAGICS = (0x377F0682, _BIG_ENDIAN_SUMS)


def open_snapshot(path: Path) -> sqlite3.Connection:
    """A database in memory with what `path` holds after the last finished transaction; changes to it go nowhere.

    Raises OSError for files that cannot be read, or change all the time.
    """
    data, log = _read_both(path)
    image = bytearray(data)
    _apply(image, log)
    image[18:20] = b"\x01\x01"  # what is in memory has no log
    db = sqlite3.connect(":memory:", isolation_level=None)
    db.deserialize(bytes(image))
    return db


def _read_both(path: Path) -> tuple[bytes, bytes]:
    """The database and its log, neither of which changed meanwhile."""
    beside = path.with_name(f"{path.name}-wal")
    for _ in range(MAX_TRIES):
        before = [_stamp(path), _stamp(beside)]
        if sum(size for size, _ in before) > MAX_BYTES:
            raise OSError(f"{path} is too large to be read into memory")
        data = path.read_bytes()
        try:
            log = beside.read_bytes()
        except FileNotFoundError:
            log = b""
        if before == [_stamp(path), _stamp(beside)]:
            return data, log
    raise OSError(f"{path} changes all the time")


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return 0, 0
    return status.st_size, status.st_mtime_ns


def _apply(image: bytearray, log: bytes) -> None:
    """Put the pages of all finished transactions in the log into the database; what follows a torn frame is old."""
    if len(log) < _HEADER.size:
        return
    magic, _, page_size, _, *salts, sum_0, sum_1 = _HEADER.unpack_from(log)
    order = ">" if magic == _BIG_ENDIAN_SUMS else "<"
    if magic not in _MAGICS or page_size < 512 or _add(log[:24], order, (0, 0)) != (sum_0, sum_1):
        return
    sums = sum_0, sum_1
    pages: dict[int, bytes] = {}
    frame_bytes = _FRAME.size + page_size
    for start in range(_HEADER.size, len(log) - frame_bytes + 1, frame_bytes):
        number, pages_after, salt_0, salt_1, *stated = _FRAME.unpack_from(log, start)
        page = log[start + _FRAME.size : start + frame_bytes]
        sums = _add(log[start : start + 8] + page, order, sums)
        if [salt_0, salt_1] != salts or list(sums) != stated:
            return
        pages[number] = page
        if pages_after:  # the transaction ends
            image.extend(bytes(max(0, pages_after * page_size - len(image))))
            for place, content in pages.items():
                image[(place - 1) * page_size : place * page_size] = content
            del image[pages_after * page_size :]
            pages.clear()


def _add(data: bytes, order: str, sums: tuple[int, int]) -> tuple[int, int]:
    """The running checksum of the log, with `data` taken in."""
    first, second = sums
    words = struct.unpack(f"{order}{len(data) // 4}I", data)
    for one, two in zip(words[::2], words[1::2], strict=True):
        first = (first + one + second) & 0xFFFFFFFF
        second = (second + two + first) & 0xFFFFFFFF
    return first, second
