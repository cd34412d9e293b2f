"""The KV cache as the engine sees it: page tables that start with what is cached and are kept when they end.

Brings together the groups of layers (which page holds which tokens, who holds it, which one goes first), the store
(pages on disk) and the peers (pages that another process has sent). Full pages are indexed as soon as they are written,
so requests share them while they run. Indexed pages are never written into again. Every group names its pages by the
same keys, so a boundary between two pages has a name, and each group can be asked what it has there. A text is found up
to the longest boundary at which every group has what it needs to go on: one whose positions see everything needs all
pages before it, one with a window the last ones, and the recurrent layers a snapshot of their state there.

Keys, values and states depend on the tokens before them alone, to the bit, so a cached page is as good as a computed
one. For one thread, except that the store's writer copies indexed pages on its own.
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
    """Other processes with the same model, as a cache sees them: pages that they brought, and pages lent to them."""

    def contains(self, name: PageName) -> bool:
        """Tell whether a page of that name was brought and is still here."""

    def take(self, name: PageName) -> ByteArray | None:
        """Return the bytes of a page that was brought, which is no longer here then; None if it is not."""

    def list_lent(self, group: int) -> Iterable[Sequence[int]]:
        """List the pages of a group that are held while others read them."""

    def check(self) -> None:
        """Prove the books of what was brought; raises AssertionError."""


class KVCache:
    """One per engine. `fingerprint` must differ whenever the same tokens may give other keys and values.

    `sharing` False makes it a plain allocator: nothing is indexed, nothing is found, and there can be no store.
    Where it `is_shared`, pages may also come from `peers`, which a cluster sets.
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
        """Tell whether other processes can make use of these pages."""
        return self._sharing and bool(self._fingerprint)

    @property
    def available_pages(self) -> tuple[int, ...]:
        """Pages of each group that `prepare` can have: free ones, and cached ones, all of which can be given up."""
        return tuple(group.available_pages for group in self.groups)

    def start_keys(self, namespace: bytes = b"", extra: Callable[[int, int], bytes] | None = None) -> PageKeys:
        """Keys for the pages of a new sequence, which stays their owner: they are computed once, not per look-up.

        `namespace` keeps apart what is computed differently from the same tokens, such as by an adapter; `extra` tells
        what single pages have besides their tokens, see `PageKeys`.
        """
        return PageKeys(hash_fields(self._fingerprint, namespace, self._layout), self.page_size, extra)

    def open_table(self, tokens: Sequence[int], keys: PageKeys, *, limit_tokens: int) -> SequenceTable:
        """A table that holds what is cached of tokens[:limit_tokens], from memory, from disk and from peers.

        Its `length_tokens` says how far that goes. Pages that are not in memory take pages of the arena, which may
        evict others.
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
        """An empty table whose pages nobody else will find: they are not indexed, and free when it is released."""
        return SequenceTable([group.open_table() for group in self.groups])

    def lookup(self, tokens: Sequence[int], keys: PageKeys, *, limit_tokens: int) -> int:
        """Tokens that `open_table` would find, in memory or on disk; takes and counts nothing."""
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

        The copies returned must be done before anything else is written or prepared. Asking twice is the same as
        asking once. Raises OutOfPages, with nothing changed, when the pages that nobody holds do not suffice.
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
            for copy in own.prepare(tokens):  # of a page that may be full for others, and was this table's last
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

        `token_ids` are all tokens of the sequence from its start, at least as many as are written now. Where another
        page with the same contents is indexed already, the table changes over to it and its own page returns. Pages go
        to the store in the background. What no later position sees is let go of. If the tokens end with a page, the
        state there is kept as a `snapshot`, should one be wanted.
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
        """A second table with the same written positions, on the same pages."""
        return table.fork()

    def release(self, table: SequenceTable) -> None:
        """Give all pages of `table` back: full ones stay cached, and count as used now in the store, too.

        So does its state at the last boundary, if that is still there.
        """
        if table.keys is not None:
            for group, own in zip(self.groups, table.groups, strict=True):
                group.keep_last(own, table.keys)
        stored = self._describe(table)
        for group, own in zip(self.groups, table.groups, strict=True):
            group.release(own)
        if self.writer is not None:
            self.writer.offer(stored, time.time_ns(), released=True)

    @property
    def written_bytes(self) -> int:
        """Memory that the pages of all groups take now. May be asked for from any thread."""
        return sum(group.written_bytes for group in self.groups)

    @property
    def held_bytes(self) -> int:
        """Bytes of the pages that tables hold. May be asked for from any thread."""
        return sum(group.pager.used_pages * group.arena.page_bytes for group in self.groups)

    def limit(self, nbytes: int, least_pages: Sequence[int]) -> None:
        """Let the pages take at most `nbytes` of memory, as far as each group may have its `least_pages`.

        What is written beyond that goes back to the system, except for what tables hold.
        """
        share = nbytes / sum(group.arena.nbytes for group in self.groups)
        for group, least in zip(self.groups, least_pages, strict=True):
            pages = min(group.arena.pages, max(least, int(group.arena.pages * share)))
            group.limit(pages, self.writer)

    def forget_peak(self) -> None:
        """Let the most pages ever held be those that are held now."""
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
        """Which names of pages came and went since the last call; if `whole` or at the first, all there are.

        They are those of the first group whose pages all lie before one another, else of the first group.
        """
        index = next((group.index for group in self.groups if group.is_linked), self.groups[0].index)
        changes, index.changes = index.changes, {}
        if changes is None or whole:
            return NameChanges([entry.key for entry in index], [], whole=True)
        came = [key for key, is_there in changes.items() if is_there]
        return NameChanges(came, [key for key, is_there in changes.items() if not is_there], whole=False)

    def flush(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Wait until all full pages are on disk; False when that took longer than `timeout_s`."""
        return self.writer is None or self.writer.flush(timeout_s)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Write what is waiting for the store, for at most `timeout_s`, and end the writer. The cache stays usable."""
        if self.writer is not None:
            self.writer.close(timeout_s)

    def check(self, tables: Iterable[SequenceTable]) -> None:
        """Prove all books, given every table that holds pages; raises AssertionError saying what is wrong."""
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
        """The keys of the full pages of tokens[:limit_tokens]."""
        return keys.cover(tokens, min(limit_tokens, len(tokens)) // self.page_size)

    def _find(self, names: Sequence[bytes], limit_pages: int) -> Boundary:
        """The longest boundary at which every group has what it needs, in memory, on disk or brought by peers."""
        indexes, store, peers = [group.index for group in self.groups], self.store, self.peers

        def has(group: int, place: int) -> bool:
            name = names[place]
            if indexes[group].get(name) is not None:
                return True
            stored = store is not None and store.contains((group, name))
            return stored or (peers is not None and peers.contains((group, name)))

        return find_boundary(self.groups, has, limit_pages)

    def _fill(self, table: SequenceTable, names: Sequence[bytes], boundary: int) -> tuple[int, int]:
        """Let `table` hold what is needed to go on after `boundary` pages, or fewer if not all can be read from disk.

        Returns how many pages of tokens had to be read, at least in part, and how many others came from peers.
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
        """Hold what a boundary needs, first the pages in memory, then the others; returns one that cannot be had.

        `restored` gets the places of the others, and whether all that was lacking there came from peers.
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
        """A page from peers or from disk, held once; None if it is not there, or nothing can be evicted for it."""
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
        """The pages of `table` from number `first` on have become full."""
        keys.cover(token_ids, table.full_pages)
        for group, own in zip(self.groups, table.groups, strict=True):
            group.index_pages(own, keys, range(first, table.full_pages), snapshot)
            if first < table.sought_pages <= table.full_pages:
                group.credit(own, table.sought_pages)
        if self.writer is not None:
            self.writer.offer(self._describe(table, first), table.opened_ns)

    def _describe(self, table: SequenceTable, first: int = 0) -> list[tuple[PageName, int, int]]:
        """Name, page and depth of the full pages of `table` from number `first` on, as the writer wants them."""
        if table.keys is None:
            return []
        names = table.keys.chain
        return [
            ((group.number, names[place + 1]), page, place)
            for group, own in zip(self.groups, table.groups, strict=True)
            for place, page in group.list_lasting(own, first)
        ]
