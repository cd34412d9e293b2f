"""What the cache holds and has done, as plain numbers at one moment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from mlxr.core.stats import PrefixCounters


class EvictionCause(StrEnum):
    """Says why a cached page was given up."""

    GROW = "grow"  # a sequence needed a page to write into
    RESTORE = "restore"  # pages came back from the store, or from another process
    SHRINK = "shrink"  # other models needed the memory


class StoreDrop(StrEnum):
    """Says why a page is not, or no longer, in the store."""

    ROOM = "room"  # the least recently used made room for others
    DAMAGED = "damaged"  # its checksum is wrong
    HALF_WRITTEN = "half_written"  # it is shorter or longer than a page, or was never finished
    VERSION = "version"  # another version of the format
    FOREIGN = "foreign"  # it belongs to another model, or lies under another page's name
    UNREADABLE = "unreadable"  # the system could not read it
    UNWRITABLE = "unwritable"  # the system could not write it
    QUEUE_FULL = "queue_full"  # too many pages were waiting to be written
    EVICTED = "evicted"  # it left the arena before it could be written
    CLOSED = "closed"  # the cache was closed before it could be written


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Holds the numbers of a store: what is in it now, and what it has done since it was opened."""

    folder: str
    entries: int  # this model's pages on disk
    bytes: int  # of these
    foreign_bytes: int  # of other models' pages in the same folder
    max_bytes: int
    written_pages: int
    read_pages: int
    queued_pages: int  # that wait to be written
    drops: Mapping[StoreDrop, int]  # pages by cause
    writable: bool  # False once writing has stopped


@dataclass(frozen=True, slots=True)
class GroupStats:
    """Counts the pages of one group of layers; of recurrent layers the slots of states."""

    name: str  # of the shape of their cache
    window: int | None
    kv_heads: int | None  # None for states
    pages: int
    free_pages: int
    held_pages: int
    shared_pages: int  # held by two or more
    cached_pages: int  # held by nobody, but can be found; of states, snapshots
    peak_pages: int  # the most ever held
    page_bytes: int
    evictions: Mapping[EvictionCause, int]

    @property
    def peak_bytes(self) -> int:
        """Bytes of the most pages ever held."""
        return self.peak_pages * self.page_bytes


class GroupSum:
    """A number of the class that has it: the sum of what is counted for each of its `groups`."""

    def __init__(self, count: Callable[[GroupStats], int]) -> None:
        self._count = count

    def __get__(self, stats: Any, owner: object = None) -> int:
        return sum(map(self._count, stats.groups))


class PageSums:
    """Sums over the groups of layers. A page is used (some request holds it), cached (found, not held) or free."""

    __slots__ = ()

    pages = GroupSum(lambda group: group.pages)
    used_pages = GroupSum(lambda group: group.held_pages)
    shared_pages = GroupSum(lambda group: group.shared_pages)  # of these, those that several requests hold
    cached_pages = GroupSum(lambda group: group.cached_pages)
    free_pages = GroupSum(lambda group: group.free_pages)
    peak_pages = GroupSum(lambda group: group.peak_pages)  # the most ever used at once, group by group
    page_bytes = GroupSum(lambda group: 0 if group.kv_heads is None else group.page_bytes)  # of a page of tokens
    used_bytes = GroupSum(lambda group: group.held_pages * group.page_bytes)
    shared_bytes = GroupSum(lambda group: group.shared_pages * group.page_bytes)
    cached_bytes = GroupSum(lambda group: group.cached_pages * group.page_bytes)
    peak_bytes = GroupSum(lambda group: group.peak_bytes)


@dataclass(slots=True, kw_only=True)
class CacheStats(PageSums, PrefixCounters):
    """Says what the cache has done, and the pages of all groups of layers."""

    evictions: Mapping[EvictionCause, int]  # cached pages that were given up
    store: StoreStats | None  # None without a store
    groups: tuple[GroupStats, ...]
    short_tokens: Mapping[str, int]  # by a group's name, the missed tokens that another group had and this one had not
