"""The KV cache as the engine sees it: page tables that start with cached pages and leave theirs in the cache.

It joins the groups of layers (pages in memory), the store (pages on disk) and the peers (pages that another process has
sent). Full pages are indexed as soon as they are written, so requests share them while they run; indexed pages are
never written again. Every group names its pages by the same keys, so each can be asked what it has at a boundary
between two pages. A text is found up to the longest boundary at which every group has what it needs: a group without a
window needs all pages before it, one with a window the last pages, and the recurrent layers a snapshot of their state.

Keys, values and states depend only on the tokens before them, to the bit, so a cached page is as good as a computed
one. The cache is used by one thread, except that the store's writer copies indexed pages on its own.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from typing import Protocol

from mlxr.cache.group import CacheGroup, Snapshot, indexed_pages
from mlxr.cache.page_table import PageCopy, SequenceTable
from mlxr.cache.prefix import Boundary, NameChanges, PageKeys, PrefixEntry, find_boundary, hash_fields
from mlxr.cache.store import PageName, PageStore
from mlxr.cache.store_writer import StoreWriter
from mlxr.core.errors import OutOfPages
from mlxr.core.stats import CacheStats, EvictionCause, PrefixCounters, StoreStats
from mlxr.kernels.tensor import ByteArray

CLOSE_TIMEOUT_S = 10.0


class Peers(Protocol):
    """Other processes with the same model: pages that they have sent to a cache, and pages that it lends to them."""

    def contains(self, name: PageName) -> bool:
        """Return True if a page of that name was sent and has not been taken yet."""

    def take(self, name: PageName) -> ByteArray | None:
        """Remove a page that was sent and return its bytes; None if there is none of that name."""

    def list_lent(self, group: int) -> Iterable[Sequence[int]]:
        """List the pages of a group that are held while other processes read them."""

    def check(self) -> None:
        """Check that the records of pages that were sent agree; raises AssertionError."""


class KVCache:
    """The cache of one engine. `fingerprint` must differ whenever the same tokens may give other keys and values.

    With `sharing` False it is a plain allocator: nothing is indexed, nothing is found, and there can be no store.
    If it `is_shared`, pages may also come from `peers`, which a cluster sets.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        *,
        fingerprint: bytes,
        store: PageStore | None = None,
        sharing: bool = True,
    ) -> None:
        if [group.number for group in groups] != list(range(len(groups))) or not groups:
            raise ValueError(f"a cache needs groups numbered from 0, got {[group.number for group in groups]}")
        if len({group.arena.page_size for group in groups}) > 1:
            raise ValueError("all groups of a cache must have the same page size")
        if store is not None and not sharing:
            raise ValueError("a cache that does not share pages cannot have a store")
        self.groups = tuple(groups)
        self.page_size = groups[0].arena.page_size
        self._sharing, self._fingerprint = sharing, fingerprint
        self._layout = "+".join(group.arena.layout for group in groups).encode()
        self.found = PrefixCounters()
        self.short_tokens: Counter[int] = Counter()
        self.store, self.writer = store, None
        self.peers: Peers | None = None
        self.model = hash_fields(b"model", fingerprint, self._layout)
        if store is not None:
            store.open(self.model, [group.arena.page_bytes for group in groups])
            self.writer = StoreWriter(store, [group.arena for group in groups])

    @property
    def is_shared(self) -> bool:
        """True if other processes can use these pages."""
        return self._sharing and bool(self._fingerprint)

    @property
    def available_pages(self) -> tuple[int, ...]:
        """Pages of each group that `prepare` can use: free ones, and cached ones, all of which can be evicted."""
        return tuple(group.available_pages for group in self.groups)

    def start_keys(self, namespace: bytes = b"", extra: Callable[[int, int], bytes] | None = None) -> PageKeys:
        """Return keys for the pages of a new sequence, which keeps them, so that each is computed once.

        `namespace` must differ if the same tokens are computed differently, such as by an adapter; `extra` identifies
        what single pages have besides their tokens, see `PageKeys`.
        """
        return PageKeys(hash_fields(self._fingerprint, namespace, self._layout), self.page_size, extra)

    def open_table(self, tokens: Sequence[int], keys: PageKeys, *, limit_tokens: int) -> SequenceTable:
        """Return a table that holds what is cached of tokens[:limit_tokens], from memory, from disk and from peers.

        Its `length_tokens` is the number of cached tokens. Pages that are not in memory take pages of the arena, which
        may evict others.
        """
        table = self.open_private_table()
        if not self._sharing:
            return table
        table.keys = keys
        names = self._name_pages(tokens, keys, limit_tokens)
        sought = self._find(names, len(names))
        restored, brought = self._fill(table, names, sought.pages)
        if table.full_pages < sought.sought_pages:
            table.sought_pages = sought.sought_pages
        if self.writer is not None:
            table.opened_ns = time.time_ns()
            self.writer.offer(self._describe(table), table.opened_ns)
        if sought.short_group is not None:
            self.short_tokens[sought.short_group] += (sought.sought_pages - sought.pages) * self.page_size
        self.found.disk_hit_tokens += restored * self.page_size
        self.found.peer_hit_tokens += brought * self.page_size
        self.found.memory_hit_tokens += table.length_tokens - (restored + brought) * self.page_size
        self.found.missed_tokens += max(0, min(limit_tokens, len(tokens)) - table.length_tokens)
        return table

    def open_private_table(self) -> SequenceTable:
        """Return an empty table whose pages are never indexed, and become free when it is released."""
        return SequenceTable([group.open_table() for group in self.groups])

    def lookup(self, tokens: Sequence[int], keys: PageKeys, *, limit_tokens: int) -> int:
        """Return the number of tokens that `open_table` would find, without taking or counting anything."""
        if not self._sharing:
            return 0
        names = self._name_pages(tokens, keys, limit_tokens)
        return self._find(names, len(names)).pages * self.page_size

    def check_room(self, tokens: int, chunk_tokens: int) -> None:
        """Raise OutOfPages unless an empty table could grow to `tokens` tokens now, `chunk_tokens` in one step."""
        for group in self.groups:
            needed_pages = group.arena.shape.count_peak(tokens, chunk_tokens, self.page_size)
            if needed_pages > group.available_pages:
                raise OutOfPages(needed_pages, group.available_pages, self.page_size)

    def prepare(self, table: SequenceTable, tokens: int) -> list[PageCopy]:
        """Make room in `table` for `tokens` more positions, evicting cached pages as needed.

        The returned copies must be made before anything else is written or prepared. A second call does nothing. Raises
        OutOfPages, with nothing changed, if the free and cached pages do not suffice.
        """
        if tokens > 0 and table.has_room(tokens):
            return []
        missing = [own.missing_pages(tokens) for own in table.groups]
        for group, missing_pages in zip(self.groups, missing, strict=True):
            if missing_pages > group.available_pages:
                raise OutOfPages(missing_pages, group.available_pages, self.page_size)
        copies = []
        for group, own, missing_pages in zip(self.groups, table.groups, missing, strict=True):
            group.evict(missing_pages, EvictionCause.GROW, self.writer)
            for copy in own.prepare(tokens):  # its source is released, and may be indexed: another table filled it
                copies.append(replace(copy, group=group.number))
                if group.pager.notes is not None:
                    group.pager.notes.copied.append((copy.source, copy.target))
                entry = group.index.at(copy.source)
                if entry is not None:
                    group.requeue(entry)
        return copies

    def commit(
        self, table: SequenceTable, token_ids: Sequence[int], tokens: int, snapshot: Snapshot = Snapshot.NONE
    ) -> None:
        """Count `tokens` more positions of `table` as written; index and store the pages that became full.

        `token_ids` are all tokens of the sequence from its start, at least as many as are written now. If a page with
        the same contents is indexed already, the table takes that page and releases its own. Pages go to the store in
        the background. Pages that no later position sees are released. If the tokens end at a page's end, the state
        there is kept as `snapshot` says.
        """
        if len(token_ids) < table.length_tokens + tokens:
            raise ValueError(f"{table.length_tokens + tokens} tokens are written, {len(token_ids)} are given")
        first = table.full_pages
        for group, own in zip(self.groups, table.groups, strict=True):
            group.commit(own, tokens)
        if table.full_pages > first:
            if table.keys is not None:
                self._index_pages(table, table.keys, token_ids, first, snapshot)
            for group, own in zip(self.groups, table.groups, strict=True):
                group.slide(own)
        if self.writer is not None:
            self.writer.advance()

    def fork(self, table: SequenceTable) -> SequenceTable:
        """Return a second table with the same written positions, on the same pages."""
        return table.fork()

    def release(self, table: SequenceTable) -> None:
        """Release all pages of `table`. Full ones stay cached, and count as used now, also in the store.

        So does its state at the last boundary, if it still exists.
        """
        if table.keys is not None:
            for group, own in zip(self.groups, table.groups, strict=True):
                group.keep_last(own, table.keys)
        stored = self._describe(table)
        for group, own in zip(self.groups, table.groups, strict=True):
            group.release(own)
        if self.writer is not None:
            self.writer.offer(stored, time.time_ns(), released=True)
        for group in self.groups:
            group.populate_ahead()

    @property
    def written_bytes(self) -> int:
        """Bytes of memory that the pages of all groups take now. Any thread may read it."""
        return sum(group.written_bytes for group in self.groups)

    @property
    def held_bytes(self) -> int:
        """Bytes of the pages that tables hold. Any thread may read it."""
        return sum(group.pager.used_pages * group.arena.page_bytes for group in self.groups)

    def limit(self, nbytes: int, least_pages: Sequence[int]) -> None:
        """Let the pages take at most `nbytes` of memory, but leave each group its number of `least_pages`.

        Pages beyond that are given back to the system, except those that tables hold.
        """
        share = nbytes / sum(group.arena.nbytes for group in self.groups)
        for group, least in zip(self.groups, least_pages, strict=True):
            pages = min(group.arena.pages, max(least, int(group.arena.pages * share)))
            group.limit(pages, self.writer)

    def forget_peak(self) -> None:
        """Reset the peak of held pages to those that are held now."""
        for group in self.groups:
            group.pager.peak_pages = group.pager.used_pages

    def stats(self) -> CacheStats:
        """Return the cache's numbers at this moment."""
        groups = tuple(group.stats() for group in self.groups)
        return CacheStats(
            **asdict(self.found),
            evictions=self.count_evictions(),
            store=self.read_store(),
            groups=groups,
            short_tokens={group.name: self.short_tokens[number] for number, group in enumerate(groups)},
        )

    def count_evictions(self) -> dict[EvictionCause, int]:
        """Count the cached pages that were given up, by cause."""
        return {cause: sum(group.evictions[cause] for group in self.groups) for cause in EvictionCause}

    def read_store(self) -> StoreStats | None:
        """Return the numbers of the store; None without one."""
        return None if self.writer is None else self.writer.stats()

    def read_names(self, *, whole: bool = False) -> NameChanges:
        """Return the keys of pages that were added and removed since the last call; at the first, or if `whole`, all.

        They are those of the first group without a window; if there is none, of the first group.
        """
        index = next((group.index for group in self.groups if group.is_linked), self.groups[0].index)
        changes, index.changes = index.changes, {}
        if changes is None or whole:
            return NameChanges([entry.key for entry in index], [], whole=True)
        came = [key for key, is_there in changes.items() if is_there]
        return NameChanges(came, [key for key, is_there in changes.items() if not is_there], whole=False)

    def flush(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Wait until all full pages are on disk; return False if that takes longer than `timeout_s`."""
        return self.writer is None or self.writer.flush(timeout_s)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Write waiting pages to the store for at most `timeout_s`, and end the writer. The cache stays usable."""
        if self.writer is not None:
            self.writer.close(timeout_s)

    def check(self, tables: Iterable[SequenceTable]) -> None:
        """Check all parts of the cache against every table that holds pages; AssertionError says what is wrong."""
        tables = list(tables)
        for table in tables:
            if len({own.length_tokens for own in table.groups}) > 1:
                raise AssertionError("the groups of a table have different positions written")
            if table.keys is not None and len(table.keys.chain) - 1 < table.full_pages:
                keys = len(table.keys.chain) - 1
                raise AssertionError(f"{keys} keys name the full pages of {table.length_tokens} tokens")
        for number, group in enumerate(self.groups):
            lent = () if self.peers is None else self.peers.list_lent(number)
            group.check(((table.groups[number], table.keys) for table in tables), lent)
        if self.peers is not None:
            self.peers.check()
        if self.writer is not None:
            self.writer.check(indexed_pages(self.groups))

    def _name_pages(self, tokens: Sequence[int], keys: PageKeys, limit_tokens: int) -> list[bytes]:
        """Return the keys of the full pages of tokens[:limit_tokens]."""
        return keys.cover(tokens, min(limit_tokens, len(tokens)) // self.page_size)

    def _find(self, names: Sequence[bytes], limit_pages: int) -> Boundary:
        """Return the longest boundary at which every group has what it needs in memory, on disk or from peers."""
        indexes, store, peers = [group.index for group in self.groups], self.store, self.peers

        def has(group: int, place: int) -> bool:
            name = names[place]
            if indexes[group].get(name) is not None:
                return True
            stored = store is not None and store.contains((group, name))
            return stored or (peers is not None and peers.contains((group, name)))

        return find_boundary(self.groups, has, limit_pages)

    def _fill(self, table: SequenceTable, names: Sequence[bytes], boundary: int) -> tuple[int, int]:
        """Let `table` hold what is needed to go on after `boundary` pages, or fewer if not all can be had.

        Returns the number of pages of tokens read from disk, at least in part, and of those that came from peers.
        """
        held: list[dict[int, int]] = [{} for _ in self.groups]  # by place, the page that is held for the table
        found: list[list[PrefixEntry]] = [[] for _ in self.groups]
        restored: dict[int, bool] = {}
        try:
            while (lacking := self._hold(names, boundary, held, found, restored)) is not None:
                boundary = self._find(names, lacking).pages
        except BaseException:
            for group, pages in zip(self.groups, held, strict=True):
                group.drop_holds(pages.values())
            raise
        for group, own, pages, entries in zip(self.groups, table.groups, held, found, strict=True):
            first = group.first_needed(boundary)
            group.drop_holds(page for place, page in pages.items() if not first <= place < boundary)
            group.index.reuse([entry for entry in entries if first <= entry.depth < boundary])
            own.take(pages, first, boundary)
        came = [is_brought for place, is_brought in restored.items() if place < boundary]
        return len(came) - sum(came), sum(came)

    def _hold(
        self,
        names: Sequence[bytes],
        boundary: int,
        held: list[dict[int, int]],
        found: list[list[PrefixEntry]],
        restored: dict[int, bool],
    ) -> int | None:
        """Hold what a boundary needs, first the pages in memory, then the others; return a place that cannot be had.

        `restored` gets the places of the others, with True if everything that was lacking there came from peers.
        """
        for group, pages, entries in zip(self.groups, held, found, strict=True):
            for place in range(group.first_needed(boundary), boundary):
                entry = None if place in pages else group.index.get(names[place])
                if entry is not None:
                    group.pager.retain([entry.page])
                    pages[place] = entry.page
                    entries.append(entry)
        for group, pages in zip(self.groups, held, strict=True):
            for place in range(group.first_needed(boundary), boundary):
                if place not in pages:
                    name = group.number, names[place]
                    is_brought = self.peers is not None and self.peers.contains(name)
                    page = self._restore(group, names, place)
                    if page is None:
                        return place
                    pages[place] = page
                    restored[place] = is_brought and restored.get(place, True)
        return None

    def _restore(self, group: CacheGroup, names: Sequence[bytes], place: int) -> int | None:
        """Return a page loaded from peers or disk, held once; None if it is not there or there is no room for it."""
        if not group.available_pages:
            return None
        group.evict(1, EvictionCause.RESTORE, self.writer)
        (page,) = group.pager.allocate(1)
        name = group.number, names[place]
        try:
            payload = None if self.peers is None else self.peers.take(name)
            if payload is None and self.store is not None:
                payload = self.store.read(name)
            if payload is not None:
                group.arena.import_page(page, payload)
        except BaseException:
            group.pager.release([page])
            raise
        if payload is None:  # damaged, or gone meanwhile
            group.pager.release([page])
            return None
        entry = group.index.add(names[place], names[place - 1] if place else b"", page, place)
        group.pager.keep(page)
        entry.reuses = 1  # somebody came back for it: it is as good as one found in memory
        return page

    def _index_pages(
        self, table: SequenceTable, keys: PageKeys, token_ids: Sequence[int], first: int, snapshot: Snapshot
    ) -> None:
        """Index the pages of `table` from place `first` on, which have become full, and offer them to the writer."""
        keys.cover(token_ids, table.full_pages)
        for group, own in zip(self.groups, table.groups, strict=True):
            group.index_pages(own, keys, range(first, table.full_pages), snapshot)
            if first < table.sought_pages <= table.full_pages:
                group.credit(own, table.sought_pages)
        if self.writer is not None:
            self.writer.offer(self._describe(table, first), table.opened_ns)

    def _describe(self, table: SequenceTable, first: int = 0) -> list[tuple[PageName, int, int]]:
        """Return (name, page, depth) of the full pages of `table` from place `first` on, for the writer."""
        if table.keys is None:
            return []
        names = table.keys.chain
        return [
            ((group.number, names[place + 1]), page, place)
            for group, own in zip(self.groups, table.groups, strict=True)
            for place, page in group.list_lasting(own, first)
        ]
