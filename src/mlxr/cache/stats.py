"""What the cache holds and has done, as plain numbers at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from mlxr.core.counters import PrefixCounters


class EvictionCause(StrEnum):
    """Why a cached page was given up."""

    GROW = "grow"  # a sequence needed a page to write into
    RESTORE = "restore"  # pages came back from the store, or from another process
    SHRINK = "shrink"  # other models needed the memory


class StoreDrop(StrEnum):
    """Why a page is not, or no longer, in the store."""

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
    """`entries` and `bytes` are this model's pages on disk; `foreign_bytes` those of other models in the same folder.

    `drops` counts pages by cause since the store was opened. `writable` is False once writing has stopped.
    """

    folder: str
    entries: int
    bytes: int
    foreign_bytes: int
    max_bytes: int
    written_pages: int
    read_pages: int
    queued_pages: int
    drops: Mapping[StoreDrop, int]
    writable: bool


@dataclass(slots=True, kw_only=True)
class CacheTotals(PrefixCounters):
    """What the cache has done; takes no time to collect, whatever the number of pages."""

    evictions: Mapping[EvictionCause, int]  # cached pages that were given up
    store: StoreStats | None  # None without a store


@dataclass(frozen=True, slots=True)
class GroupStats:
    """The pages of one group of layers, named by the shape of their cache; of recurrent layers the slots of states.

    `kv_heads` is None for states, and cached ones are snapshots. `shared` pages are held by two or more; `cached` pages
    by nobody, but can be found; `peak` is the most ever held.
    """

    name: str
    window: int | None
    kv_heads: int | None
    pages: int
    free_pages: int
    held_pages: int
    shared_pages: int
    cached_pages: int
    peak_pages: int
    page_bytes: int
    evictions: Mapping[EvictionCause, int]

    @property
    def peak_bytes(self) -> int:
        """Bytes of the most pages ever held."""
        return self.peak_pages * self.page_bytes


@dataclass(slots=True, kw_only=True)
class CacheStats(CacheTotals):
    """What the cache has done, and the pages of all groups of layers."""

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
