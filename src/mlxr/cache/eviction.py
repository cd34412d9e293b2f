"""Which cached page is given up first. Integers only; what is cached and what is a leaf is told by the caller.

The policy is one function, `rank_page`. Around it stands a heap of the pages that may go: of a linked index leaves
only, because a page without the pages before it can never be found again.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from mlxr.cache.prefix import PrefixEntry

MAX_REUSE_CREDIT = 3
Rank = tuple[int, int, int]


def rank_page(last_used: int, reuses: int, depth: int, page: int, pages: int, *, passed: bool = False) -> Rank:
    """Order in which cached pages go, the lowest first; the policy.

    Least recently used, where each reuse (three at most count) makes a page look as if it had been used one arena of
    `pages` pages later than it was. So a page that was found again outlives any run of pages touched once that is no
    longer than the arena, and yet goes when nobody has come for it during a few arenas' worth of work. Among pages let
    go together the deeper goes first. A page that its sequence has `passed`, as it left the window, looks as if it had
    been used one arena earlier: the pages at the end of a text, where another may go on, outlive those in its middle.
    """
    return last_used + pages * (min(reuses, MAX_REUSE_CREDIT) - passed), -depth, page


class EvictionQueue:
    """Cached leaves by rank. Pages that are taken again stay in the heap until they come up, and are passed over."""

    def __init__(self, pages: int, may_go: Callable[[PrefixEntry], bool]) -> None:
        """`may_go` tells whether an entry is indexed, cached and a leaf at this moment."""
        self._pages = pages
        self._may_go = may_go
        self._heap: list[tuple[Rank, int, PrefixEntry]] = []
        self._pushes = 0

    def push(self, entry: PrefixEntry) -> None:
        """`entry` has become a cached leaf, or its rank has changed while it is one."""
        self._pushes += 1
        heapq.heappush(self._heap, (self._rank(entry), self._pushes, entry))
        if len(self._heap) > 4 * self._pages + 64:
            self._heap = list(
                {item[2].page: item for item in self._heap if self._is_current(item[0], item[2])}.values()
            )
            heapq.heapify(self._heap)

    def pop(self) -> PrefixEntry | None:
        """The page that goes next, or None when no cached leaf is left."""
        while self._heap:
            rank, _, entry = heapq.heappop(self._heap)
            if self._is_current(rank, entry):
                return entry
        return None

    def check(self, leaves: Iterable[PrefixEntry]) -> None:
        """Prove that each of `leaves`, all the cached ones, will come up; raises AssertionError."""
        current = {id(entry) for rank, _, entry in self._heap if self._is_current(rank, entry)}
        wanted = {id(entry): entry.page for entry in leaves}
        if current != set(wanted):
            raise AssertionError(f"pages {sorted(wanted.values())} may go, {len(current)} are queued for it")

    def _is_current(self, rank: Rank, entry: PrefixEntry) -> bool:
        return self._may_go(entry) and rank == self._rank(entry)

    def _rank(self, entry: PrefixEntry) -> Rank:
        return rank_page(entry.last_used, entry.reuses, entry.depth, entry.page, self._pages, passed=entry.passed)
