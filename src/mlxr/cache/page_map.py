"""The map of a cache's pages while somebody watches: who holds each, and how far it is on its way to disk.

The pager names the pages whose holders change and the store the keys whose place changes, both only while there is a
watch. A reading looks at these pages alone, however many others there are. For the engine's thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mlxr.cache.group import CacheGroup
from mlxr.cache.page_table import PageCopy
from mlxr.cache.shapes import CacheShape
from mlxr.cache.store import PageStore
from mlxr.cache.store_writer import StoreWriter
from mlxr.core.stats import PageMap, PageRecord, StorePlace, make_code

MAX_LISTED = 1024  # copies in a group between two readings


class CacheWatch:
    """The pages of a cache, from now until `close`. `short_tokens` counts, by group, as `PageMap` says."""

    def __init__(
        self,
        groups: Iterable[CacheGroup],
        store: PageStore | None,
        writer: StoreWriter | None,
        short_tokens: Mapping[int, int],
    ) -> None:
        self._store = store
        if store is not None:
            store.watch()
        self._groups = [_GroupWatch(group, writer, short_tokens) for group in groups]

    def note_copies(self, copies: Iterable[PageCopy]) -> None:
        """Pages were copied because one of their holders is about to write."""
        for copy in copies:
            self._groups[copy.group].note_copy(copy)

    def read(self) -> list[PageMap]:
        """The maps of all groups, with what happened since the last time."""
        if self._store is not None:
            for group, key in self._store.take_touched():
                self._groups[group].note_key(key)
        return [watch.read() for watch in self._groups]

    def close(self) -> None:
        """End the watch; nothing is noted any more."""
        for watch in self._groups:
            watch.close()
        if self._store is not None:
            self._store.unwatch()

    def check(self) -> None:
        """Prove that the codes are those of the pages, right after a reading; raises AssertionError."""
        for watch in self._groups:
            watch.check()


class _GroupWatch:
    """The pages of one group."""

    def __init__(self, group: CacheGroup, writer: StoreWriter | None, short_tokens: Mapping[int, int]) -> None:
        self._group, self._writer = group, writer
        self._short_tokens = short_tokens
        self._copied: list[tuple[int, int]] = []
        self._touched: set[int] = set()
        group.pager.touched = self._touched
        group.given_up = []
        self._codes = self._compute_codes()
        self._told: bytes | None = None  # the codes as they were told last, if nothing has changed since

    def note_copy(self, copy: PageCopy) -> None:
        """A page was copied."""
        if len(self._copied) < MAX_LISTED:
            self._copied.append((copy.source, copy.target))

    def note_key(self, key: bytes) -> None:
        """A page has come to disk or gone from there."""
        entry = self._group.index.get(key)
        if entry is not None:
            self._touched.add(entry.page)

    def read(self) -> PageMap:
        """The map of the group, with what happened since the last time."""
        for page in self._touched:
            code = self._find_code(page)
            if code != self._codes[page]:
                self._codes[page] = code
                self._told = None
        self._touched.clear()
        self._told = bytes(self._codes) if self._told is None else self._told
        evicted, copied = self._group.given_up or [], self._copied
        self._group.given_up, self._copied = [], []
        arena, number = self._group.arena, self._group.number
        return PageMap(
            group=number,
            name=str(arena.shape),
            layers=arena.layers,
            page_size=arena.page_size,
            page_bytes=arena.page_bytes,
            holds="pages" if isinstance(arena.shape, CacheShape) else "states",
            short_tokens=self._short_tokens.get(number, 0),
            codes=self._told,
            evicted=evicted,
            copied=copied,
        )

    def close(self) -> None:
        """Note nothing any more."""
        self._group.pager.touched = self._group.given_up = None

    def check(self) -> None:
        """Prove that the codes are those of the pages, right after a reading; raises AssertionError."""
        for page, (known, code) in enumerate(zip(self._codes, self._compute_codes(), strict=True)):
            if known != code:
                raise AssertionError(f"page {page} has code {code}, the watch says {known}")

    def _compute_codes(self) -> bytearray:
        """The code of each page."""
        codes = self._group.pager.list_holders()
        if self._writer is not None:
            for entry in self._group.index:
                place = self._writer.find_place((self._group.number, entry.key))
                codes[entry.page] = make_code(codes[entry.page], place)
        return codes

    def _find_code(self, page: int) -> int:
        return make_code(self._group.pager.find_holder(page), _find_place(page, self._group, self._writer))


def describe_page(page: int, group: CacheGroup, writer: StoreWriter | None) -> PageRecord:
    """One page in full, its sequences aside."""
    entry = group.index.at(page)
    return PageRecord(
        holder=group.pager.find_holder(page).name.lower(),
        store=_find_place(page, group, writer).name.lower(),
        references=group.pager.count(page),
        sequences=[],
        place=None if entry is None else entry.depth,
        reuses=None if entry is None else entry.reuses,
        followers=None if entry is None else entry.children,
        age_pages=None if entry is None else group.index.clock - entry.last_used,
    )


def _find_place(page: int, group: CacheGroup, writer: StoreWriter | None) -> StorePlace:
    entry = None if writer is None else group.index.at(page)
    return StorePlace.NONE if entry is None or writer is None else writer.find_place((group.number, entry.key))
