"""One group of layers in the cache: its pages, who holds them, which tokens they have, and which of them goes first.

A page is free; or held by tables; or cached: held by nobody, indexed, and given up when room is needed. Knows one
group; what must be there in all groups at once is `kv_cache`'s matter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Protocol

from mlxr.cache.arena import Arena
from mlxr.cache.eviction import EvictionQueue
from mlxr.cache.page_table import PageTable
from mlxr.cache.pager import Pager
from mlxr.cache.prefix import PageKeys, PrefixEntry, PrefixIndex
from mlxr.cache.stats import EvictionCause, GroupStats

MAX_GIVEN_UP = 1024  # pages in the list for who watches, between two readings


class GivesUp(Protocol):
    """Who is told before a page is given up: the writer of the store."""

    def evict(self, group: int, key: bytes, page: int, depth: int) -> None:
        """Page `page` of the group, named `key`, is about to be overwritten."""


class CacheGroup:
    """The pages of `arena` and their books, as group number `number` of a cache.

    Of a group whose positions see all before them, every page of a text is needed to go on from its end. With a window
    (`arena.shape.window`), those within the last `window - 1` positions are. While somebody watches, `given_up` has the
    pages that were evicted; otherwise it is None.
    """

    def __init__(self, arena: Arena, number: int = 0) -> None:
        self.arena, self.number = arena, number
        self.pager = Pager(arena.pages, arena.page_size)
        self.is_linked = arena.shape.window is None
        self.index = PrefixIndex(linked=self.is_linked)
        # Not a method of this object: with a cycle of references the arena would outlive its engine for a while.
        self._may_go = partial(_may_go, self.index, self.pager)
        self._queue = EvictionQueue(arena.pages, self._may_go)
        self.evictions: Counter[EvictionCause] = Counter()
        self.given_up: list[int] | None = None

    @property
    def available_pages(self) -> int:
        """Pages that can be had: free ones, and cached ones, all of which can be given up."""
        return self.pager.free_pages + self.pager.cached_pages

    def first_needed(self, boundary: int) -> int:
        """The first page that must be there to go on after `boundary` pages; the others up to there must be, too."""
        return self.arena.shape.first_needed(boundary, self.arena.page_size)

    def open_table(self) -> PageTable:
        """An empty table of this group."""
        return PageTable(self.pager)

    def index_page(self, table: PageTable, keys: PageKeys, place: int) -> None:
        """Page number `place` of `table` has become full. If another page holds the same, the table takes that one."""
        key, page = keys.chain[place + 1], table.pages[place]
        entry = self.index.get(key)
        if entry is None:
            self.index.add(key, keys.chain[place], page, place)
            self.pager.keep(page)
        elif entry.page != page:
            self.pager.retain([entry.page])
            self.index.reuse([entry])
            table.pages[place] = entry.page
            self.pager.release([page])

    def credit(self, table: PageTable, boundary: int) -> None:
        """Note that somebody will want to go on after `boundary` pages: the pages needed there count as found once."""
        for page in table.pages[max(table.first, self.first_needed(boundary)) : boundary]:
            entry = self.index.at(page)
            if entry is not None:
                entry.reuses = max(entry.reuses, 1)

    def slide(self, table: PageTable) -> None:
        """Let go of what no later position of `table` sees. It may stay cached, and then is among the first to go."""
        passed = table.slide(self.first_needed(table.length_tokens // table.page_size))
        if not passed:
            return
        self.pager.release(passed)
        for page in passed:
            entry = self.index.at(page)
            if entry is not None:
                entry.passed = True
                self.requeue(entry)

    def release(self, table: PageTable) -> None:
        """Give all pages of `table` back; full ones stay cached."""
        entries = [entry for page in table.held_pages if (entry := self.index.at(page)) is not None]
        table.release()
        self.index.let_go(entries)
        for entry in entries:
            self.requeue(entry)

    def drop_holds(self, pages: Iterable[int]) -> None:
        """Let go of pages that were held for a moment; when they were last used stays as it was."""
        pages = list(pages)
        self.pager.release(pages)
        for page in pages:
            entry = self.index.at(page)
            if entry is not None:
                self.requeue(entry)

    def requeue(self, entry: PrefixEntry) -> None:
        """Queue the page of `entry` for eviction if nobody holds it."""
        if self._may_go(entry):
            self._queue.push(entry)

    def evict(self, wanted_pages: int, cause: EvictionCause, writer: GivesUp | None) -> None:
        """Give up cached pages until `wanted_pages` are free; there must be enough."""
        while self.pager.free_pages < wanted_pages:
            entry = self._queue.pop()
            if entry is None:
                raise AssertionError(f"{self.pager.cached_pages} pages are cached and none of them may go")
            if writer is not None:
                writer.evict(self.number, entry.key, entry.page, entry.depth)
            self.index.remove(entry)
            self.pager.drop(entry.page)
            self.evictions[cause] += 1
            if self.given_up is not None and len(self.given_up) < MAX_GIVEN_UP:
                self.given_up.append(entry.page)
            if entry.parent is not None:
                self.requeue(entry.parent)

    def stats(self) -> GroupStats:
        """The group's numbers at this moment."""
        return GroupStats(
            name=str(self.arena.shape),
            window=self.arena.shape.window,
            kv_heads=self.arena.shape.kv_heads,
            pages=self.pager.pages,
            free_pages=self.pager.free_pages,
            held_pages=self.pager.used_pages,
            shared_pages=self.pager.shared_pages,
            cached_pages=self.pager.cached_pages,
            peak_pages=self.pager.peak_pages,
            page_bytes=self.arena.page_bytes,
            evictions={cause: self.evictions[cause] for cause in EvictionCause},
        )

    def check(self, tables: Iterable[tuple[PageTable, PageKeys | None]]) -> None:
        """Prove all books of the group, given every table that holds its pages, with its keys; else AssertionError."""
        tables = list(tables)
        self.pager.check(table.held_pages for table, _ in tables)
        self.index.check()
        for entry in self.index:
            if not self.pager.is_kept(entry.page):
                raise AssertionError(f"page {entry.page} is indexed and not kept")
        kept_pages = sum(self.pager.is_kept(page) for page in range(self.pager.pages))
        if kept_pages != len(self.index):
            raise AssertionError(f"{kept_pages} pages are kept, {len(self.index)} indexed")
        self._queue.check(entry for entry in self.index if self._may_go(entry))
        for table, keys in tables:
            self._check_table(table, keys)

    def _check_table(self, table: PageTable, keys: PageKeys | None) -> None:
        """A table holds what is needed and nothing before it; its full pages are those indexed under its keys."""
        full_pages = table.length_tokens // table.page_size
        if self.pager.pages_for(table.length_tokens) > len(table.pages):
            raise AssertionError(f"{table.length_tokens} tokens are in {len(table.pages)} pages")
        if table.first != self.first_needed(full_pages) or any(page >= 0 for page in table.pages[: table.first]):
            raise AssertionError(f"a table of {table.length_tokens} tokens has released {table.first} pages")
        if keys is None:
            if any(map(self.pager.is_kept, table.held_pages)):
                raise AssertionError(f"a table without keys holds indexed pages: {table.held_pages}")
            return
        for place in range(table.first, full_pages):
            entry = self.index.get(keys.chain[place + 1])
            if entry is None or entry.page != table.pages[place] or entry.depth != place:
                raise AssertionError(f"page {table.pages[place]} at place {place} of a table is not indexed as such")


def indexed_pages(groups: Iterable[CacheGroup]) -> Mapping[tuple[int, bytes], int]:
    """The page of every key, by the number of its group."""
    return {(group.number, entry.key): entry.page for group in groups for entry in group.index}


def _may_go(index: PrefixIndex, pager: Pager, entry: PrefixEntry) -> bool:
    """Whether `entry` is a cached leaf now."""
    return not entry.children and index.at(entry.page) is entry and pager.count(entry.page) == 0
