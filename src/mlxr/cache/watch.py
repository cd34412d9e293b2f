"""Which pages change while somebody watches: codes of all pages at the start, then those that are other than before.

The pager names the pages whose holders change and the store the keys whose place changes, both only while there is a
watch. A reading costs as much as there are such pages, however many others there are. For the engine's thread.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from mlxr.cache.arena import Arena
from mlxr.cache.page_table import PageCopy
from mlxr.cache.pager import Pager
from mlxr.cache.prefix import PrefixIndex
from mlxr.cache.store import PageStore
from mlxr.cache.store_writer import StoreWriter
from mlxr.core.live import GroupChange, GroupState, PageRecord, Run, StorePlace, make_code

MAX_LISTED = 1024  # pages given up, and copies, between two readings
GROUP = 0  # the only one there is
_EQUAL = re.compile(rb"(?s)(.)\1*")


class CacheWatch:
    """The pages of a cache, from now until `close`."""

    def __init__(
        self, arena: Arena, pager: Pager, index: PrefixIndex, store: PageStore | None, writer: StoreWriter | None
    ) -> None:
        self._arena, self._pager, self._index, self._store, self._writer = arena, pager, index, store, writer
        self._evicted: list[int] = []
        self._copied: list[tuple[int, int]] = []
        self._touched: set[int] = set()
        if store is not None:
            store.watch()
        pager.touched = self._touched
        self._codes = self._compute_codes()

    def note_eviction(self, page: int) -> None:
        """A cached page was given up."""
        if len(self._evicted) < MAX_LISTED:
            self._evicted.append(page)

    def note_copies(self, copies: Iterable[PageCopy]) -> None:
        """Pages were copied because one of their holders is about to write."""
        room = MAX_LISTED - len(self._copied)
        self._copied += [(copy.source, copy.target) for copy in copies][:room]

    def read_state(self) -> list[GroupState]:
        """All groups with the codes that their pages had when the changes were read last."""
        arena = self._arena
        return [
            GroupState(
                group=GROUP,
                name="attention",
                layers=len(arena.k_pools),
                pages=arena.pages,
                page_size=arena.page_size,
                page_bytes=arena.page_bytes,
                runs=[(run.start(), run.end() - run.start(), run[0][0]) for run in _EQUAL.finditer(self._codes)],
            )
        ]

    def read_changes(self) -> list[GroupChange]:
        """The groups in which something has changed since the last time."""
        if self._store is not None:
            entries = map(self._index.get, self._store.take_touched())
            self._touched.update(entry.page for entry in entries if entry is not None)
        changed = [
            (page, code) for page in sorted(self._touched) if (code := self._find_code(page)) != self._codes[page]
        ]
        self._touched.clear()
        for page, code in changed:
            self._codes[page] = code
        change = GroupChange(GROUP, _join_runs(changed), self._evicted, self._copied)
        self._evicted, self._copied = [], []
        return [change] if change.runs or change.evicted or change.copied else []

    def close(self) -> None:
        """End the watch; nothing is noted any more."""
        self._pager.touched = None
        if self._store is not None:
            self._store.unwatch()

    def check(self) -> None:
        """Prove that the codes are those of the pages, right after a reading; raises AssertionError."""
        for page, (known, code) in enumerate(zip(self._codes, self._compute_codes(), strict=True)):
            if known != code:
                raise AssertionError(f"page {page} has code {code}, the watch says {known}")

    def _compute_codes(self) -> bytearray:
        """The code of each page."""
        codes = self._pager.list_holders()
        if self._writer is not None:
            for entry in self._index:
                codes[entry.page] = make_code(codes[entry.page], self._writer.find_place(entry.key))
        return codes

    def _find_code(self, page: int) -> int:
        return make_code(self._pager.find_holder(page), _find_place(page, self._index, self._writer))


def describe_page(page: int, pager: Pager, index: PrefixIndex, writer: StoreWriter | None) -> PageRecord:
    """One page in full, its sequences aside."""
    entry = index.at(page)
    return PageRecord(
        holder=pager.find_holder(page).name.lower(),
        store=_find_place(page, index, writer).name.lower(),
        references=pager.count(page),
        sequences=[],
        place=None if entry is None else entry.depth,
        reuses=None if entry is None else entry.reuses,
        followers=None if entry is None else entry.children,
        age_pages=None if entry is None else index.clock - entry.last_used,
    )


def _find_place(page: int, index: PrefixIndex, writer: StoreWriter | None) -> StorePlace:
    entry = None if writer is None else index.at(page)
    return StorePlace.NONE if entry is None or writer is None else writer.find_place(entry.key)


def _join_runs(codes: Iterable[tuple[int, int]]) -> list[Run]:
    """Pages in ascending order with their codes; neighbours with one code become one run."""
    runs: list[Run] = []
    first, count, known = 0, 0, -1
    for page, code in codes:
        if code == known and page == first + count:
            count += 1
            continue
        if count:
            runs.append((first, count, known))
        first, count, known = page, 1, code
    return [*runs, (first, count, known)] if count else runs
