"""What the cache holds and has done, as plain numbers at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class EvictionCause(StrEnum):
    """Why a cached page was given up."""

    GROW = "grow"  # a sequence needed a page to write into
    RESTORE = "restore"  # pages came back from the store


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


@dataclass(frozen=True, slots=True)
class CacheTotals:
    """What the cache has done; takes no time to collect, whatever the number of pages."""

    memory_hit_tokens: int
    disk_hit_tokens: int
    missed_tokens: int
    evictions: Mapping[EvictionCause, int]
    store: StoreStats | None


@dataclass(frozen=True, slots=True)
class CacheStats:
    """`shared` pages are held by two or more; `cached` pages by nobody, but can be found.

    Tokens of prompts are counted when their tables are opened: found in memory, read back from disk, or missed.
    `store` is None when there is no store.
    """

    pages: int
    free_pages: int
    held_pages: int
    shared_pages: int
    cached_pages: int
    page_bytes: int
    memory_hit_tokens: int
    disk_hit_tokens: int
    missed_tokens: int
    evictions: Mapping[EvictionCause, int]
    store: StoreStats | None

    @property
    def hit_tokens(self) -> int:
        """Tokens that did not need to be computed."""
        return self.memory_hit_tokens + self.disk_hit_tokens
