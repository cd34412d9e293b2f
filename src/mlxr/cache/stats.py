"""What the cache holds and has done, as plain numbers at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

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


@dataclass(slots=True, kw_only=True)
class CacheTotals(PrefixCounters):
    """Says what the cache has done; takes no time to collect, whatever the number of pages."""

    evictions: Mapping[EvictionCause, int]  # cached pages that were given up
    store: StoreStats | None  # None without a store


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


@dataclass(slots=True, kw_only=True)
class CacheStats(CacheTotals):
    """Says what the cache has done, and the pages of all groups of layers."""

    groups: tuple[GroupStats, ...]
    short_tokens: Mapping[str, int]  # by a group's name, the missed tokens that another group had and this one had not

    @property
    def pages(self) -> int:
        """Pages of all groups."""
        return sum(group.pages for group in self.groups)

    @property
    def free_pages(self) -> int:
        """Pages that nobody holds and that have no contents to be found."""
        return sum(group.free_pages for group in self.groups)

    @property
    def held_pages(self) -> int:
        """Pages that sequences hold."""
        return sum(group.held_pages for group in self.groups)

    @property
    def shared_pages(self) -> int:
        """Pages that two sequences or more hold."""
        return sum(group.shared_pages for group in self.groups)

    @property
    def cached_pages(self) -> int:
        """Pages that nobody holds and that can be found."""
        return sum(group.cached_pages for group in self.groups)
