"""The KV cache as the engine sees it: page tables that start with what is cached and are kept when they end.

Brings together the pager (who holds which page), the prefix index (which page holds which tokens), the eviction queue
(which page goes first), the arena (the bytes) and the store (pages on disk). A page is free; or held by tables; or
cached: held by nobody, indexed, and given up when room is needed. Full pages are indexed as soon as they are written,
so requests share them while they run. Indexed pages are never written into again.

Keys and values of a token depend on the tokens before it alone, to the bit, so a cached page is as good as a computed
one. For one thread, except that the store's writer copies indexed pages on its own.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial

from mlxr.cache.arena import Arena
from mlxr.cache.eviction import EvictionQueue
from mlxr.cache.page_table import PageCopy, PageTable
from mlxr.cache.pager import Pager
from mlxr.cache.prefix import PageKeys, PrefixEntry, PrefixIndex, hash_fields
from mlxr.cache.stats import CacheStats, CacheTotals, EvictionCause
from mlxr.cache.store import PageStore
from mlxr.cache.store_writer import StoreWriter
from mlxr.cache.watch import CacheWatch, describe_page
from mlxr.core.errors import OutOfPages
from mlxr.core.live import PageRecord

CLOSE_TIMEOUT_S = 10.0


class KVCache:
    """One per engine. `fingerprint` must differ whenever the same tokens may give other keys and values.

    `sharing` False makes it a plain allocator: nothing is indexed, nothing is found, and there can be no store.
    """

    def __init__(
        self,
        arena: Arena,
        pager: Pager,
        *,
        fingerprint: bytes,
        store: PageStore | None = None,
        sharing: bool = True,
    ) -> None:
        if (arena.pages, arena.page_size) != (pager.pages, pager.page_size):
            raise ValueError(
                f"the arena has {arena.pages} pages of {arena.page_size} tokens, "
                f"the pager {pager.pages} of {pager.page_size}"
            )
        if store is not None and not sharing:
            raise ValueError("a cache that does not share pages cannot have a store")
        self._arena, self._pager, self._sharing = arena, pager, sharing
        self._fingerprint, self._layout = fingerprint, arena.layout.encode()
        self._index = PrefixIndex()
        # Not a method of this object: with a cycle of references the arena would outlive its engine for a while.
        self._may_go = partial(_may_go, self._index, pager)
        self._queue = EvictionQueue(pager.pages, self._may_go)
        self._evictions: Counter[EvictionCause] = Counter()
        self._memory_hit_tokens = self._disk_hit_tokens = self._missed_tokens = 0
        self._store = store
        self._writer = None
        self._watch: CacheWatch | None = None
        if store is not None:
            store.open(hash_fields(b"model", fingerprint, self._layout), arena.page_bytes)
            self._writer = StoreWriter(store, arena)

    @property
    def available_pages(self) -> int:
        """Pages that `prepare` can have: free ones, and cached ones, all of which can be given up."""
        return self._pager.free_pages + self._pager.cached_pages

    def start_keys(self, namespace: bytes = b"") -> PageKeys:
        """Keys for the pages of a new sequence, which stays their owner: they are computed once, not per look-up.

        `namespace` keeps apart what is computed differently from the same tokens, such as by an adapter.
        """
        return PageKeys(hash_fields(self._fingerprint, namespace, self._layout), self._pager.page_size)

    def open_table(self, tokens: Sequence[int], keys: PageKeys, *, limit_tokens: int) -> PageTable:
        """A table that holds the longest cached run of full pages of tokens[:limit_tokens], from memory, then disk.

        Its `length_tokens` says how far that goes. Pages read back from disk take pages of the arena, which may evict
        others.
        """
        if not self._sharing:
            return PageTable(self._pager)
        table = PageTable(self._pager, keys)
        names = self._name_pages(tokens, keys, limit_tokens)
        found = self._index.find(names)
        self._take(table, found)
        try:
            if self._store is not None:
                self._restore(table, keys, names, self._store)
        except BaseException:
            self.release(table)
            raise
        if self._writer is not None:
            table.opened_ns = time.time_ns()
            self._writer.offer(self._describe(table), table.opened_ns)
        memory_tokens = len(found) * self._pager.page_size
        self._memory_hit_tokens += memory_tokens
        self._disk_hit_tokens += table.length_tokens - memory_tokens
        self._missed_tokens += max(0, min(limit_tokens, len(tokens)) - table.length_tokens)
        return table

    def open_private_table(self) -> PageTable:
        """An empty table whose pages nobody else will find: they are not indexed, and free when it is released."""
        return PageTable(self._pager)

    def lookup(self, tokens: Sequence[int], keys: PageKeys, *, limit_tokens: int) -> int:
        """Tokens that `open_table` would find, in memory or on disk; takes and counts nothing."""
        if not self._sharing:
            return 0
        names = self._name_pages(tokens, keys, limit_tokens)
        pages = len(self._index.find(names))
        if self._store is not None:
            while pages < len(names) and self._store.contains(names[pages]):
                pages += 1
        return pages * self._pager.page_size

    def prepare(self, table: PageTable, tokens: int) -> list[PageCopy]:
        """Make room in `table` for `tokens` more positions, evicting cached pages as needed.

        The copies returned must be done before anything else is written or prepared. Asking twice is the same as
        asking once. Raises OutOfPages, with nothing changed, when the pages that nobody holds do not suffice.
        """
        if tokens > 0 and table.has_room(tokens):
            return []
        missing_pages = table.missing_pages(tokens)
        if missing_pages > self.available_pages:
            raise OutOfPages(missing_pages, self.available_pages, self._pager.page_size)
        self._evict(missing_pages, EvictionCause.GROW)
        copies = table.prepare(tokens)
        if copies and self._watch is not None:
            self._watch.note_copies(copies)
        for copy in copies:  # a page that is full for others, and which this table was the last to hold
            entry = self._index.at(copy.source)
            if entry is not None and self._may_go(entry):
                self._queue.push(entry)
        return copies

    def commit(self, table: PageTable, token_ids: Sequence[int], tokens: int) -> None:
        """Count `tokens` more positions of `table` as written; index and store the pages that became full.

        `token_ids` are all tokens of the sequence from its start, at least as many as are written now. Where another
        page with the same contents is indexed already, the table changes over to it and its own page returns. Pages go
        to the store in the background.
        """
        if len(token_ids) < table.length_tokens + tokens:
            raise ValueError(f"{table.length_tokens + tokens} tokens are written, {len(token_ids)} are given")
        first = table.full_pages
        table.commit(tokens)
        if table.keys is not None and table.full_pages > first:
            table.keys.cover(token_ids, table.full_pages)
            for place in range(first, table.full_pages):
                self._index_page(table, table.keys, place)
            if self._writer is not None:
                self._writer.offer(self._describe(table, first), table.opened_ns)
        if self._writer is not None:
            self._writer.advance()

    def fork(self, table: PageTable) -> PageTable:
        """A second table with the same written positions, on the same pages."""
        return table.fork()

    def release(self, table: PageTable) -> None:
        """Give all pages of `table` back: full ones stay cached, and count as used now in the store, too."""
        entries = [entry for page in table.pages if (entry := self._index.at(page)) is not None]
        stored = self._describe(table)
        table.release()
        self._index.let_go(entries)
        for entry in entries:
            if self._may_go(entry):
                self._queue.push(entry)
        if self._writer is not None:
            self._writer.offer(stored, time.time_ns(), released=True)

    def stats(self) -> CacheStats:
        """Return the cache's numbers at this moment."""
        return CacheStats(
            pages=self._pager.pages,
            free_pages=self._pager.free_pages,
            held_pages=self._pager.used_pages,
            shared_pages=self._pager.shared_pages,
            cached_pages=self._pager.cached_pages,
            page_bytes=self._arena.page_bytes,
            memory_hit_tokens=self._memory_hit_tokens,
            disk_hit_tokens=self._disk_hit_tokens,
            missed_tokens=self._missed_tokens,
            evictions={cause: self._evictions[cause] for cause in EvictionCause},
            store=None if self._writer is None else self._writer.stats(),
        )

    def totals(self) -> CacheTotals:
        """What the cache has done, without the numbers that take a look at every page."""
        return CacheTotals(
            memory_hit_tokens=self._memory_hit_tokens,
            disk_hit_tokens=self._disk_hit_tokens,
            missed_tokens=self._missed_tokens,
            evictions={cause: self._evictions[cause] for cause in EvictionCause},
            store=None if self._writer is None else self._writer.stats(),
        )

    def watch(self) -> CacheWatch:
        """Begin to note which pages change; one watch at a time."""
        self._watch = CacheWatch(self._arena, self._pager, self._index, self._store, self._writer)
        return self._watch

    def unwatch(self) -> None:
        """End what `watch` began."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def describe_page(self, page: int) -> PageRecord | None:
        """One page in full, its sequences aside; None if there is no such page."""
        if not 0 <= page < self._pager.pages:
            return None
        return describe_page(page, self._pager, self._index, self._writer)

    def flush(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Wait until all full pages are on disk; False when that took longer than `timeout_s`."""
        return self._writer is None or self._writer.flush(timeout_s)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Write what is waiting for the store, for at most `timeout_s`, and end the writer. The cache stays usable."""
        if self._writer is not None:
            self._writer.close(timeout_s)

    def check(self, tables: Iterable[PageTable]) -> None:
        """Prove all books, given every table that holds pages; raises AssertionError saying what is wrong."""
        tables = list(tables)
        self._pager.check(table.pages for table in tables)
        self._index.check()
        for entry in self._index:
            if not self._pager.is_kept(entry.page):
                raise AssertionError(f"page {entry.page} is indexed and not kept")
        kept_pages = sum(self._pager.is_kept(page) for page in range(self._pager.pages))
        if kept_pages != len(self._index):
            raise AssertionError(f"{kept_pages} pages are kept, {len(self._index)} indexed")
        self._queue.check(entry for entry in self._index if self._may_go(entry))
        for table in tables:
            self._check_table(table)
        if self._writer is not None:
            self._writer.check({entry.key: entry.page for entry in self._index})

    def _check_table(self, table: PageTable) -> None:
        """A table's full pages must be the very pages indexed under its keys."""
        if self._pager.pages_for(table.length_tokens) > len(table.pages):
            raise AssertionError(f"{table.length_tokens} tokens are in {len(table.pages)} pages")
        if table.keys is None:
            if any(map(self._pager.is_kept, table.pages)):
                raise AssertionError(f"a table without keys holds indexed pages: {table.pages}")
            return
        if len(table.keys.chain) - 1 < table.full_pages:
            raise AssertionError(
                f"{len(table.keys.chain) - 1} keys name the full pages of {table.length_tokens} tokens"
            )
        for depth, key in enumerate(table.keys.chain[1 : table.full_pages + 1]):
            entry = self._index.get(key)
            if entry is None or entry.page != table.pages[depth] or entry.depth != depth:
                raise AssertionError(f"page {table.pages[depth]} at place {depth} of a table is not indexed as such")

    def _name_pages(self, tokens: Sequence[int], keys: PageKeys, limit_tokens: int) -> list[bytes]:
        """The keys of the full pages of tokens[:limit_tokens]."""
        return keys.cover(tokens, min(limit_tokens, len(tokens)) // self._pager.page_size)

    def _take(self, table: PageTable, entries: Sequence[PrefixEntry]) -> None:
        """Let `table` hold the pages of `entries`, after those it has."""
        self._pager.retain(entry.page for entry in entries)
        self._index.reuse(entries)
        table.pages += [entry.page for entry in entries]
        table.length_tokens += len(entries) * table.page_size

    def _restore(self, table: PageTable, keys: PageKeys, names: Sequence[bytes], store: PageStore) -> None:
        """Read further pages of `names` back from disk, until one is missing or nothing can be evicted for it."""
        for place in range(len(table.pages), len(names)):
            key = names[place]
            if not store.contains(key) or not self.available_pages:
                return
            self._evict(1, EvictionCause.RESTORE)
            (page,) = self._pager.allocate(1)
            table.pages.append(page)
            payload = store.read(key)
            if payload is None:  # damaged, or gone meanwhile
                self._pager.release([table.pages.pop()])
                return
            self._arena.import_page(page, payload)
            entry = self._index.add(key, keys.chain[place], page)
            self._pager.keep(page)
            entry.reuses = 1  # somebody came back for it: it is as good as one found in memory
            table.length_tokens += table.page_size

    def _index_page(self, table: PageTable, keys: PageKeys, place: int) -> None:
        """Page number `place` of `table` has just become full."""
        key, page = keys.chain[place + 1], table.pages[place]
        entry = self._index.get(key)
        if entry is None:
            self._index.add(key, keys.chain[place], page)
            self._pager.keep(page)
        elif entry.page != page:
            self._pager.retain([entry.page])
            self._index.reuse([entry])
            table.pages[place] = entry.page
            self._pager.release([page])

    @staticmethod
    def _describe(table: PageTable, first: int = 0) -> list[tuple[bytes, int, int]]:
        """Key, page and depth of the full pages of `table` from number `first` on, as the writer wants them."""
        if table.keys is None:
            return []
        names = table.keys.chain[first + 1 : table.full_pages + 1]
        return [(key, table.pages[depth], depth) for depth, key in enumerate(names, first)]

    def _evict(self, wanted_pages: int, cause: EvictionCause) -> None:
        """Give up cached pages until `wanted_pages` are free; there must be enough."""
        while self._pager.free_pages < wanted_pages:
            entry = self._queue.pop()
            if entry is None:
                raise AssertionError(f"{self._pager.cached_pages} pages are cached and none of them may go")
            if self._writer is not None:
                self._writer.evict(entry.key, entry.page, entry.depth)
            self._index.remove(entry)
            self._pager.drop(entry.page)
            if self._watch is not None:
                self._watch.note_eviction(entry.page)
            self._evictions[cause] += 1
            if entry.parent is not None and self._may_go(entry.parent):
                self._queue.push(entry.parent)


def _may_go(index: PrefixIndex, pager: Pager, entry: PrefixEntry) -> bool:
    """Whether `entry` is a cached leaf now."""
    return not entry.children and index.at(entry.page) is entry and pager.count(entry.page) == 0
