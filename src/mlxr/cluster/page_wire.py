"""How one replica asks another for pages, and how these travel: bytes in, bytes out, nothing taken on anybody's word.

An ask is little-endian: magic `MLXRWANT`, version, groups of the model, names, names known up to a boundary, most bytes
wanted; then what the pages of each group belong to (32 bytes each), the names (32 bytes each), and for each group a bit
for each name that is there already, the first in the lowest bit. The reply is pages one after the other in the form
that they have on disk (`cache/store_file`). Who reads it allocates what it knows a page to take, for names that it
asked for, once each, within the bytes that it reserved; each page is proved by its checksum before it counts.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from mlxr.cache.exchange import Here, Lack
from mlxr.cache.inbox import Delivery
from mlxr.cache.prefix import KEY_BYTES
from mlxr.cache.store import PageName
from mlxr.cache.store_file import HEADER_BYTES, EntryError, allocate_payload, prove_entry, read_header

MAGIC, VERSION = b"MLXRWANT", 1
MAX_NAMES, MAX_GROUPS = 65_536, 64
_HEAD = struct.Struct("<8sIIIIQ")
MAX_ASK_BYTES = _HEAD.size + MAX_GROUPS * KEY_BYTES + MAX_NAMES * KEY_BYTES + MAX_GROUPS * MAX_NAMES // 8

ReadInto = Callable[[memoryview], int]  # fills a part of what it is given; how much, 0 at the end


class Refusal(StrEnum):
    """Why pages did not come, or not all of them."""

    UNREACHABLE = "unreachable"  # no connection, or it broke
    LATE = "late"  # the time was up
    AVOIDED = "avoided"  # it was unreachable or late a moment ago, so it was not asked
    BUSY = "busy"  # here or there, too many fetch already
    FORBIDDEN = "forbidden"  # the other one does not know our token
    MODEL = "model"  # the other one has another model, or pages of another form
    FAILED = "failed"  # any other refusal
    HALF_SENT = "half_sent"  # the stream ended within a page
    NOT_ASKED = "not_asked"  # a page that was not asked for, twice, too large, or beyond the bytes that were wanted
    DAMAGED = "damaged"  # a page whose checksum is wrong, or something else in its place


class Refused(Exception):  # caught where pages are fetched: they are computed then
    """No further page is taken; `cause` says why."""

    def __init__(self, cause: Refusal) -> None:
        self.cause = cause
        super().__init__(cause.value)


@dataclass(frozen=True, slots=True)
class Ask:
    """What is asked for: the pages `names` of `models`, but for those that `lack` says are there."""

    models: tuple[bytes, ...]
    names: list[bytes]
    lack: Lack
    max_bytes: int

    def pack(self) -> bytes:
        """The ask as bytes."""
        head = _HEAD.pack(MAGIC, VERSION, len(self.models), len(self.names), self.lack.pages, self.max_bytes)
        here = (np.packbits(np.array(row, dtype=bool), bitorder="little").tobytes() for row in self.lack.here)
        return b"".join((head, *self.models, *self.names, *here))

    @classmethod
    def parse(cls, data: bytes) -> Ask:
        """Reverses `pack`; raises ValueError saying what is wrong."""
        if len(data) < _HEAD.size:
            raise ValueError(f"an ask has at least {_HEAD.size} bytes, not {len(data)}")
        magic, version, groups, names, pages, max_bytes = _HEAD.unpack(data[: _HEAD.size])
        if magic != MAGIC or version != VERSION:
            raise ValueError("not an ask of this version")
        if not 1 <= groups <= MAX_GROUPS or names > MAX_NAMES or pages > names:
            raise ValueError(f"{groups} groups, {names} names and {pages} pages are no ask")
        row_bytes = (names + 7) // 8
        if len(data) != _HEAD.size + (groups + names) * KEY_BYTES + groups * row_bytes:
            raise ValueError(f"{groups} groups and {names} names are not {len(data)} bytes")
        keys = [data[at : at + KEY_BYTES] for at in range(_HEAD.size, len(data) - groups * row_bytes, KEY_BYTES)]
        rows = np.frombuffer(data[len(data) - groups * row_bytes :], dtype=np.uint8).reshape(groups, row_bytes)
        here: Here = np.unpackbits(rows, axis=1, count=names, bitorder="little").astype(bool).tolist()
        return cls(tuple(keys[:groups]), keys[groups:], Lack(pages, here), max_bytes)

    def list_wanted(self) -> set[PageName]:
        """Everything that may be sent."""
        return {
            (group, name)
            for group, row in enumerate(self.lack.here)
            for name, is_here in zip(self.names, row, strict=True)
            if not is_here
        }


def take_pages(read_into: ReadInto, ask: Ask, page_bytes: Sequence[int], delivery: Delivery) -> int:
    """Read pages to the end of the stream, and put each into `delivery` as soon as it is proved; how many there were.

    Raises Refused at the first one that is not as it must be; those before it stay.
    """
    wanted, header = ask.list_wanted(), bytearray(HEADER_BYTES)
    pages = 0
    while _fill(read_into, memoryview(header)):
        try:
            model, key, nbytes = read_header(bytes(header))
            group = ask.models.index(model)
        except (EntryError, ValueError):
            raise Refused(Refusal.DAMAGED) from None
        name = group, key
        if name not in wanted or nbytes != page_bytes[group]:
            raise Refused(Refusal.NOT_ASKED)
        wanted.remove(name)
        payload = allocate_payload(page_bytes[group])
        if not _fill(read_into, payload.data):
            raise Refused(Refusal.HALF_SENT)
        try:
            prove_entry(bytes(header), payload)
        except EntryError:
            raise Refused(Refusal.DAMAGED) from None
        if not delivery.put(name, payload):
            raise Refused(Refusal.NOT_ASKED)
        pages += 1
    return pages


def _fill(read_into: ReadInto, target: memoryview) -> bool:
    """Fill `target`; False where the stream has ended, Refused where it ends within."""
    filled = 0
    while filled < len(target):
        count = read_into(target[filled:])
        if not count:
            if filled:
                raise Refused(Refusal.HALF_SENT)
            return False
        filled += count
    return True
