"""The map of a cache's pages while somebody watches: who holds each page, and whether it is on disk yet.

While there is a map, each group notes the pages that change (`PageNotes`), and the store the names of pages whose place
changes. A reading looks at these pages only. Only the engine's thread uses this module.
"""

from __future__ import annotations

from mlxr.cache.group import CacheGroup
from mlxr.cache.kv_cache import KVCache
from mlxr.cache.page_table import PageNotes
from mlxr.cache.shapes import CacheShape
from mlxr.core.stats import PageMap, PageRecord, StorePlace, make_code


class CacheMap:
    """The map of a cache's pages, kept up to date until `close`; a cache has one map at most."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        if cache.store is not None:
            cache.store.touched = set()
        for group in cache.groups:
            group.pager.notes = PageNotes()
        self._codes = [self._compute_codes(group) for group in cache.groups]
        self._told: list[bytes | None] = [None] * len(cache.groups)  # the codes last returned; None if they changed

    def read(self) -> list[PageMap]:
        """Return the maps of all groups, with the evictions and copies since the last reading."""
        names = None if self._cache.store is None else self._cache.store.touched
        while names:
            number, key = names.pop()  # the writer's thread adds more
            entry, notes = self._cache.groups[number].index.get(key), self._cache.groups[number].pager.notes
            if entry is not None and notes is not None:
                notes.touched.add(entry.page)
        return [self._read_group(group) for group in self._cache.groups]

    def close(self) -> None:
        """End the map; changes are no longer noted."""
        for group in self._cache.groups:
            group.pager.notes = None
        if self._cache.store is not None:
            self._cache.store.touched = None

    def check(self) -> None:
        """Check, right after a reading, that the codes are those of the pages; raises AssertionError."""
        for group, codes in zip(self._cache.groups, self._codes, strict=True):
            for page, (known, code) in enumerate(zip(codes, self._compute_codes(group), strict=True)):
                if known != code:
                    raise AssertionError(f"page {page} has code {code}, the map says {known}")

    def _read_group(self, group: CacheGroup) -> PageMap:
        number, notes, codes = group.number, group.pager.notes or PageNotes(), self._codes[group.number]
        group.pager.notes = PageNotes()
        for page in notes.touched:
            code = make_code(group.pager.find_holder(page), _find_place(self._cache, group, page))
            if code != codes[page]:
                codes[page], self._told[number] = code, None
        told = self._told[number] = self._told[number] or bytes(codes)
        return PageMap(
            group=number,
            name=str(group.arena.shape),
            layers=group.arena.layers,
            page_size=group.arena.page_size,
            page_bytes=group.arena.page_bytes,
            holds="pages" if isinstance(group.arena.shape, CacheShape) else "states",
            short_tokens=self._cache.short_tokens[number],
            codes=told,
            evicted=list(notes.evicted),
            copied=list(notes.copied),
        )

    def _compute_codes(self, group: CacheGroup) -> bytearray:
        """Return the code of each page."""
        codes = group.pager.list_holders()
        for entry in group.index:
            codes[entry.page] = make_code(codes[entry.page], _find_place(self._cache, group, entry.page))
        return codes


def describe_page(cache: KVCache, number: int, page: int) -> PageRecord | None:
    """Return all that is known of one page of a group, except its sequences; None if there is no such page."""
    if not (0 <= number < len(cache.groups) and 0 <= page < cache.groups[number].pager.pages):
        return None
    group = cache.groups[number]
    entry = group.index.at(page)
    return PageRecord(
        holder=group.pager.find_holder(page).name.lower(),
        store=_find_place(cache, group, page).name.lower(),
        references=group.pager.count(page),
        sequences=[],
        place=None if entry is None else entry.depth,
        reuses=None if entry is None else entry.reuses,
        followers=None if entry is None else entry.children,
        age_pages=None if entry is None else group.index.clock - entry.last_used,
    )


def _find_place(cache: KVCache, group: CacheGroup, page: int) -> StorePlace:
    entry = None if cache.writer is None else group.index.at(page)
    if entry is None or cache.writer is None:
        return StorePlace.NONE
    return cache.writer.find_place((group.number, entry.key))
