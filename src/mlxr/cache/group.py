"""One group of layers in the cache: its arena, pager and prefix index, and the order in which its pages are evicted.

A page is free, held by tables, or cached: held by nobody, indexed, and evicted when room is needed. In the group of
the recurrent layers a page is the slot of a state, and an indexed state is a snapshot. `rank_page` decides which page
is evicted first, and a heap holds the pages that may be evicted. In a linked index these are only leaves, because a
page is never found without the pages before it. `kv_cache` brings several groups together.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Protocol

from mlxr.cache.arena import PoolSet, StateArena
from mlxr.cache.page_table import RELEASED, Pager, PageTable, StateTable
from mlxr.cache.prefix import PageKeys, PrefixEntry, PrefixIndex
from mlxr.cache.shapes import CacheShape, StatesShape
from mlxr.core.stats import EvictionCause, GroupStats

MAX_REUSE_CREDIT = 3
POPULATED_AHEAD = 3  # states: what a step writes, that at the end of a prompt, and that at the end of its answer
Rank = tuple[int, int, int]


def rank_page(last_used: int, reuses: int, depth: int, page: int, pages: int, *, passed: bool = False) -> Rank:
    """Return the rank of a cached page; the lowest is evicted first. This is the cache's eviction policy.

    The least recently used page goes first, but each reuse (at most three count) makes a page look as if it had been
    used one arena of `pages` pages later. So a page that was found again outlives any run of pages touched once that is
    no longer than the arena, yet it goes if it is not used again while a few arenas' worth of pages are. Of pages
    released together, the deeper goes first. A page that its sequence has `passed`, because it left the window, looks
    as if it had been used one arena earlier: the pages at the end of a text, where another may go on, outlive those in
    its middle.
    """
    return last_used + pages * (min(reuses, MAX_REUSE_CREDIT) - passed), -depth, page


class EvictionQueue:
    """Cached leaves by rank. Pages that are taken again stay in the heap and are skipped when they come up."""

    def __init__(self, pages: int, may_go: Callable[[PrefixEntry], bool]) -> None:
        """`may_go` returns True if an entry is indexed, cached and a leaf at this moment."""
        self._pages = pages
        self._may_go = may_go
        self._heap: list[tuple[Rank, int, PrefixEntry]] = []
        self._pushes = 0

    def push(self, entry: PrefixEntry) -> None:
        """Add `entry`, which has become a cached leaf, or whose rank has changed while it is one."""
        self._pushes += 1
        heapq.heappush(self._heap, (self._rank(entry), self._pushes, entry))
        if len(self._heap) > 4 * self._pages + 64:
            self._heap = list(
                {item[2].page: item for item in self._heap if self._is_current(item[0], item[2])}.values()
            )
            heapq.heapify(self._heap)

    def pop(self) -> PrefixEntry | None:
        """Remove and return the entry to evict next, or None if no cached leaf is left."""
        while self._heap:
            rank, _, entry = heapq.heappop(self._heap)
            if self._is_current(rank, entry):
                return entry
        return None

    def check(self, leaves: Iterable[PrefixEntry]) -> None:
        """Check that the queue has exactly the `leaves`, which are all cached ones; raises AssertionError."""
        current = {id(entry) for rank, _, entry in self._heap if self._is_current(rank, entry)}
        wanted = {id(entry): entry.page for entry in leaves}
        if current != set(wanted):
            raise AssertionError(f"pages {sorted(wanted.values())} may go, {len(current)} are queued for it")

    def _is_current(self, rank: Rank, entry: PrefixEntry) -> bool:
        return self._may_go(entry) and rank == self._rank(entry)

    def _rank(self, entry: PrefixEntry) -> Rank:
        return rank_page(entry.last_used, entry.reuses, entry.depth, entry.page, self._pages, passed=entry.passed)


Table = PageTable | StateTable


class Snapshot(Enum):
    """The lifetime of the state after a step, as a snapshot of its boundary.

    A `PASSING` one lies in the middle of a text and is among the first to be evicted; other sequences may well go on
    from a `LASTING` one. A `TRAILING` one is forgotten at the sequence's next boundary, unless another sequence has
    found it; if the sequence ends before that, it becomes lasting.
    """

    NONE = 0
    TRAILING = 1
    PASSING = 2
    LASTING = 3


class GivesUp(Protocol):
    """An object that is told before a page is evicted; `StoreWriter` implements it."""

    def evict(self, group: int, key: bytes, page: int, depth: int) -> None:
        """Copy page `page` of the group, named `key`, if it is still wanted: it is about to be overwritten."""


class CacheGroup:
    """Group number `number` of a cache: the pages of `arena`, with their pager, index and eviction queue.

    To go on from the end of a text, a group without a window needs every page of it, one with a window
    (`arena.shape.window`) the pages of the last `window - 1` positions, and the group of states the last state.
    """

    def __init__(self, arena: PoolSet, number: int = 0) -> None:
        self.arena, self.number = arena, number
        self.pager = Pager(arena.pages, arena.page_size)
        self.is_linked = arena.shape.is_linked
        self.index = PrefixIndex(linked=self.is_linked)
        # Not a method of this object: with a cycle of references the arena would outlive its engine for a while.
        self._may_go = partial(_may_go, self.index, self.pager)
        self._queue = EvictionQueue(arena.pages, self._may_go)
        self.evictions: Counter[EvictionCause] = Counter()

    @property
    def available_pages(self) -> int:
        """Pages that can be allocated: free ones within the limit, and cached ones, all of which can be evicted."""
        return self.pager.spare_pages + self.pager.cached_pages

    @property
    def written_bytes(self) -> int:
        """Bytes of memory that the pages take now."""
        return self.arena.measure(self.pager.written_pages)

    def limit(self, pages: int, writer: GivesUp | None) -> None:
        """Let at most `pages` pages take memory from now on.

        Pages beyond that are given back to the system, free ones before cached ones; held ones stay until released.
        """
        pager = self.pager
        pager.limit_pages = pages
        excess_pages = pager.written_pages - pages
        if excess_pages <= 0:
            return
        written_free = pager.free_pages - (pager.pages - pager.written_pages)
        for _ in range(min(pager.cached_pages, excess_pages - written_free)):
            self._give_up(EvictionCause.SHRINK, writer)
        self.arena.discard(pager.give_back())

    def first_needed(self, boundary: int) -> int:
        """Return the first page needed to go on after `boundary` pages; all from it to the boundary are needed."""
        return self.arena.shape.first_needed(boundary, self.arena.page_size)

    def open_table(self) -> Table:
        """Return an empty table of this group."""
        return StateTable(self.pager) if isinstance(self.arena.shape, StatesShape) else PageTable(self.pager)

    def commit(self, table: Table, tokens: int) -> None:
        """Count `tokens` more positions of `table` as written; release the previous state if it is shared or kept."""
        passed = table.commit(tokens)
        if passed:
            self.drop_holds(passed)

    def index_pages(self, table: Table, keys: PageKeys, places: range, snapshot: Snapshot) -> None:
        """Index the pages at `places` of `table`, which have become full; of states, only the last, as a `snapshot`."""
        if isinstance(table, PageTable):
            for place in places:
                self.index_page(table, keys, place)
            return
        self._forget_trail(table)
        if snapshot is not Snapshot.NONE and table.page_at(places[-1]) != RELEASED:
            self._index_state(table, keys, places[-1], snapshot)

    def index_page(self, table: Table, keys: PageKeys, place: int, *, is_brief: bool = False) -> PrefixEntry:
        """Index the full page at `place` of `table`; if its key is indexed already, the table takes that page instead.

        With `is_brief`, the clock does not advance and no reuse is counted.
        """
        key, page = keys.chain[place + 1], table.page_at(place)
        entry = self.index.get(key)
        if entry is None:
            entry = self.index.add(key, keys.chain[place], page, place, is_brief=is_brief)
            self.pager.keep(page)
        elif entry.page != page:
            self.pager.retain([entry.page])
            if not is_brief:
                self.index.reuse([entry])
            table.change_page(place, entry.page)
            self.pager.release([page])
        return entry

    def _index_state(self, table: StateTable, keys: PageKeys, place: int, snapshot: Snapshot) -> None:
        """Index the state of `table`, which is that after the page at `place`, as a snapshot."""
        known = self.index.get(keys.chain[place + 1])
        entry = self.index_page(table, keys, place, is_brief=snapshot is Snapshot.TRAILING)
        table.trail = entry
        if known is None:
            entry.passed, entry.trails = snapshot is not Snapshot.LASTING, int(snapshot is Snapshot.TRAILING)
        elif snapshot is Snapshot.TRAILING:
            entry.trails += known.trails > 0
        elif known.trails:
            self._make_lasting(known)

    def _forget_trail(self, table: StateTable) -> None:
        """Forget the trailing snapshot of `table`, now at a later boundary, unless somebody else needs it."""
        entry, table.trail = table.trail, None
        if entry is None or self.index.at(entry.page) is not entry or not entry.trails:
            return
        entry.trails -= 1
        if not entry.trails and not self.pager.count(entry.page):
            self.index.remove(entry)
            self.pager.drop(entry.page)

    def _make_lasting(self, entry: PrefixEntry) -> None:
        """Turn a trailing snapshot into a lasting one."""
        entry.trails = 0
        self.index.let_go([entry])
        self.requeue(entry)

    def credit(self, table: Table, boundary: int) -> None:
        """Count the pages needed after `boundary` pages as found once, because a sequence wanted to go on there."""
        for place, page in table.list_full(self.first_needed(boundary)):
            entry = self.index.at(page) if place < boundary else None
            if entry is not None:
                entry.reuses = max(entry.reuses, 1)

    def slide(self, table: Table) -> None:
        """Release the pages that no later position of `table` sees; if cached, they are among the first to go."""
        if isinstance(table, StateTable):
            return  # it holds nothing else
        passed = table.slide(self.first_needed(table.length_tokens // table.page_size))
        if not passed:
            return
        self.pager.release(passed)
        for page in passed:
            entry = self.index.at(page)
            if entry is not None:
                entry.passed = True
                self.requeue(entry)

    def keep_last(self, table: Table, keys: PageKeys) -> None:
        """Keep the last state of `table` at a boundary, so that a sequence with the same text can go on from there."""
        if not isinstance(table, StateTable):
            return
        boundary, rest = divmod(table.length_tokens, table.page_size)
        trail = table.trail
        if boundary and not rest:
            self._index_state(table, keys, boundary - 1, Snapshot.LASTING)
        elif trail is not None and self.index.at(trail.page) is trail:
            self._make_lasting(trail)

    def list_lasting(self, table: Table, first: int) -> list[tuple[int, int]]:
        """Return the full pages of `table` from place `first` on that are worth storing, as (place, page).

        Of states, that is at most the last snapshot, if it is not a trailing one.
        """
        pages = table.list_full(first)
        if not isinstance(table, StateTable):
            return pages
        trail = table.trail
        if trail is not None and trail.depth >= first and self.index.at(trail.page) is trail:
            pages = [(trail.depth, trail.page)]
        return [(place, page) for place, page in pages if not _is_trailing(self.index.at(page))]

    def release(self, table: Table) -> None:
        """Give all pages of `table` back; full ones stay cached."""
        entries = [entry for page in table.held_pages if (entry := self.index.at(page)) is not None]
        table.release()
        self.index.let_go(entries)
        for entry in entries:
            self.requeue(entry)

    def populate_ahead(self) -> None:
        """Take memory in the background for pages that are written next, as a rule by a conversation's next turn."""
        if isinstance(self.arena, StateArena) and self.arena.is_slow_to_populate:
            self.arena.populate(self.pager.take_ahead(POPULATED_AHEAD))

    def drop_holds(self, pages: Iterable[int]) -> None:
        """Release pages that were held for a moment, without counting that as a use."""
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
        """Evict cached pages until `wanted_pages` are free; there must be enough."""
        while self.pager.spare_pages < wanted_pages:
            self._give_up(cause, writer)

    def _give_up(self, cause: EvictionCause, writer: GivesUp | None) -> None:
        """Evict the cached page with the lowest rank."""
        entry = self._queue.pop()
        if entry is None:
            raise AssertionError(f"{self.pager.cached_pages} pages are cached and none of them may go")
        if writer is not None and not entry.trails:
            writer.evict(self.number, entry.key, entry.page, entry.depth)
        self.index.remove(entry)
        self.pager.drop(entry.page)
        self.evictions[cause] += 1
        if self.pager.notes is not None:
            self.pager.notes.evicted.append(entry.page)
        if entry.parent is not None:
            self.requeue(entry.parent)

    def stats(self) -> GroupStats:
        """Return the group's numbers at this moment."""
        shape = self.arena.shape
        paged = shape if isinstance(shape, CacheShape) else None
        return GroupStats(
            name=str(shape),
            window=None if paged is None else paged.window,
            kv_heads=None if paged is None else paged.kv_heads,
            pages=self.pager.pages,
            free_pages=self.pager.free_pages,
            held_pages=self.pager.used_pages,
            shared_pages=self.pager.shared_pages,
            cached_pages=self.pager.cached_pages,
            peak_pages=self.pager.peak_pages,
            page_bytes=self.arena.page_bytes,
            evictions={cause: self.evictions[cause] for cause in EvictionCause},
        )

    def check(self, tables: Iterable[tuple[Table, PageKeys | None]], lent: Iterable[Sequence[int]] = ()) -> None:
        """Check the group's pager, index and queue against every table that holds its pages; raises AssertionError.

        Each table comes with its keys. `lent` are pages that are held besides, each list while somebody reads it.
        """
        tables = list(tables)
        self.pager.check([*(table.held_pages for table, _ in tables), *lent])
        self.index.check()
        for entry in self.index:
            if not self.pager.is_kept(entry.page):
                raise AssertionError(f"page {entry.page} is indexed and not kept")
        kept_pages = sum(self.pager.is_kept(page) for page in range(self.pager.pages))
        if kept_pages != len(self.index):
            raise AssertionError(f"{kept_pages} pages are kept, {len(self.index)} indexed")
        self._queue.check(entry for entry in self.index if self._may_go(entry))
        trails = Counter(id(table.trail) for table, _ in tables if isinstance(table, StateTable))
        for entry in self.index:
            if entry.trails and entry.trails != trails[id(entry)]:
                raise AssertionError(f"slot {entry.page} trails {trails[id(entry)]} tables, it counts {entry.trails}")
        for table, keys in tables:
            if isinstance(table, StateTable):
                self._check_states(table, keys)
            else:
                self._check_table(table, keys)

    def _check_states(self, table: StateTable, keys: PageKeys | None) -> None:
        """Check that a table has a state if tokens are written, and that it is no snapshot of another boundary."""
        if (table.state != RELEASED) != (table.length_tokens > 0):
            raise AssertionError(f"the state after {table.length_tokens} tokens is in slot {table.state}")
        if table.spare != RELEASED and not self.pager.is_own(table.spare):
            raise AssertionError(f"slot {table.spare}, which the next step writes, is not a table's alone")
        entry = None if table.state == RELEASED else self.index.at(table.state)
        if entry is None:
            return
        boundary, rest = divmod(table.length_tokens, table.page_size)
        if keys is None or rest or entry.key != keys.chain[boundary] or entry.depth != boundary - 1:
            raise AssertionError(f"slot {table.state} is not the snapshot after {table.length_tokens} tokens")

    def _check_table(self, table: PageTable, keys: PageKeys | None) -> None:
        """Check that a table holds only the pages that are needed, and that its full pages are indexed by its keys."""
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
    """Return the page of every (group number, key)."""
    return {(group.number, entry.key): entry.page for group in groups for entry in group.index}


def _is_trailing(entry: PrefixEntry | None) -> bool:
    return entry is not None and entry.trails > 0


def _may_go(index: PrefixIndex, pager: Pager, entry: PrefixEntry) -> bool:
    """Return True if `entry` is a cached leaf now."""
    return not entry.children and index.at(entry.page) is entry and pager.count(entry.page) == 0
