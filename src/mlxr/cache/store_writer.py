"""A thread that writes pages from the arena to the store in the background, so that no step waits for a disk.

Pages are offered when they become full, and again when a sequence lets go of them. They are copied only when their turn
comes: an indexed page never changes, so it must only not be evicted during the copy. A page that must leave the arena
before its turn is copied aside, as long as there is room for that. If there is no room, the page is dropped and
counted: a slow disk costs cached pages, never time and never memory. Only the engine's thread reads pages of a device,
so these are all copied aside, a bounded number at a time; while sequences run, that thread spends a small share of its
time on it. The writer's thread has a low priority, so that steps go on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from threading import Condition, Thread

from mlxr.cache.arena import PoolSet
from mlxr.cache.store import PageName, PageStore, allocate_payload
from mlxr.core.stats import StoreDrop, StorePlace, StoreStats
from mlxr.core.work_threads import give_way
from mlxr.kernels.tensor import ByteArray

logger = logging.getLogger(__name__)

MAX_QUEUED_PAGES = 16384
MAX_ASIDE_BYTES = 64 * 2**20
DEPTH_NS = 1000  # a deeper page counts as used this much earlier
NICENESS = 10  # of the thread, which then gets some tenth of a processor that others want
COPY_SHARE = 1 / 20  # of the engine's time goes into copying pages of a device while sequences run


@dataclass(slots=True)
class _Waiting:
    """A page to be written: still in the arena as `page`, or copied aside."""

    page: int
    stamp_ns: int
    payload: ByteArray | None = None


class StoreWriter:
    """One thread that writes pages of `arenas` to `store`, oldest offer first; the engine's thread calls its methods.

    `arenas` has one arena for each group, all on one device. At most `max_queued_pages` wait, at most `max_aside_bytes`
    of them as copies.
    """

    def __init__(
        self,
        store: PageStore,
        arenas: Sequence[PoolSet],
        *,
        max_queued_pages: int = MAX_QUEUED_PAGES,
        max_aside_bytes: int = MAX_ASIDE_BYTES,
    ) -> None:
        self._store, self._arenas = store, tuple(arenas)
        self._largest_bytes = max(arena.page_bytes for arena in arenas)
        self._max_queued_pages = max_queued_pages
        self._max_aside_bytes = max_aside_bytes
        if not self._is_on_host:
            self._max_aside_bytes = max(self._largest_bytes, max_aside_bytes)  # there is no other way for them
        self._waiting: dict[PageName, _Waiting] = {}  # in order of offer
        self._aside_bytes = 0
        self._rest_end_s = 0.0  # until then `advance` copies nothing
        self._writing: PageName | None = None  # the page that the thread has taken, if any
        self._copying: PageName | None = None  # the same page, while its bytes are copied out of the arena
        self._is_closing = False
        self._changed = Condition()
        self._thread: Thread | None = None

    @property
    def _is_on_host(self) -> bool:
        return self._arenas[0].is_on_host

    def offer(self, pages: Iterable[tuple[PageName, int, int]], now_ns: int, *, released: bool = False) -> None:
        """Queue pages, given as (name, page, depth), to be written, or stamped as used if they are stored already.

        A page is offered as soon as it is full, and again when it is `released`; if there is no room for it then
        either, it counts as dropped.
        """
        with self._changed:
            if not self._store.writable:
                return
            for name, page, depth in pages:
                self._add(name, page, now_ns - depth * DEPTH_NS, counts_drop=released)
            if released:
                self._copy_aside()
            self._start()
            self._changed.notify_all()

    def advance(self) -> None:
        """Copy aside one page that waits on a device, if it is time for that; do nothing for an arena on the host."""
        if self._is_on_host or not self._waiting:
            return
        start_s = time.monotonic()
        if start_s < self._rest_end_s:
            return
        with self._changed:
            self._copy_aside(is_short=True)
            self._changed.notify_all()
        end_s = time.monotonic()
        self._rest_end_s = end_s + (end_s - start_s) / COPY_SHARE

    def evict(self, group: int, key: bytes, page: int, depth: int) -> None:
        """Copy `page` aside if it is not stored yet and there is room; the caller may overwrite it afterwards."""
        name = group, key
        with self._changed:
            self._changed.wait_for(lambda: self._copying != name)
            waiting = self._waiting.pop(name, None)
            if waiting is None:  # stored already, as a rule; if not, the queue was full when the page was released
                waiting = _Waiting(page, time.time_ns() - depth * DEPTH_NS)
            if self._is_saved(name) or self._is_closing or not self._store.writable:
                self._drop_copy(waiting)
                return
            if waiting.payload is None:
                if not self._has_room_aside(group) or len(self._waiting) >= self._max_queued_pages:
                    self._store.count_drop(StoreDrop.EVICTED)
                    return
                self._set_aside(waiting, group)
            self._waiting[name] = waiting
            self._start()
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all pages are written; return False if that takes longer than `timeout_s`."""
        end_s = time.monotonic() + timeout_s
        with self._changed:
            while self._waiting or self._writing is not None:
                self._copy_aside()
                self._changed.notify_all()
                if not self._changed.wait(max(0.0, end_s - time.monotonic())):
                    return not self._waiting and self._writing is None
            return True

    def close(self, timeout_s: float) -> None:
        """Write waiting pages for at most `timeout_s`, drop the rest and end the thread. Later offers are dropped."""
        with self._changed:
            self._is_closing = True
        self.flush(timeout_s)
        with self._changed:
            for name in self._waiting:
                self._store.count_drop(StoreDrop.CLOSED)
                self._store.note(name)
            self._waiting.clear()
            self._aside_bytes = 0
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(max(1.0, timeout_s))  # a thread stuck in a broken disk is left behind; it is a daemon

    def stats(self) -> StoreStats:
        """Return the store's numbers, with the number of pages that wait."""
        with self._changed:
            return self._store.stats(len(self._waiting) + (self._writing is not None))

    def find_place(self, name: PageName) -> StorePlace:
        """Return the place of the page of that name: on disk, waiting for it, or neither."""
        if self._store.contains(name):
            return StorePlace.ON_DISK
        is_waiting = name in self._waiting or name == self._writing
        return StorePlace.WAITING if is_waiting else StorePlace.NONE

    def check(self, indexed: Mapping[PageName, int]) -> None:
        """Check the bounds, and that pages waiting in the arenas are `indexed` (name to page); AssertionError."""
        with self._changed:
            aside_bytes = 0
            for name, waiting in self._waiting.items():
                aside_bytes += 0 if waiting.payload is None else waiting.payload.nbytes
                if waiting.payload is None and indexed.get(name) != waiting.page:
                    raise AssertionError(f"page {waiting.page} waits for the store and holds something else now")
            if aside_bytes != self._aside_bytes or aside_bytes > self._max_aside_bytes:
                raise AssertionError(f"{aside_bytes} bytes are copied aside, the books say {self._aside_bytes}")
            if len(self._waiting) > self._max_queued_pages:
                raise AssertionError(f"{len(self._waiting)} pages wait, {self._max_queued_pages} may")
            if self._writing is None:
                self._store.check()

    def _has_room_aside(self, group: int) -> bool:
        """Return True if one more page of a group may be copied aside."""
        return self._aside_bytes + self._arenas[group].page_bytes <= self._max_aside_bytes

    def _set_aside(self, waiting: _Waiting, group: int) -> None:
        """Copy the bytes of a page that waits."""
        waiting.payload = allocate_payload(self._arenas[group].page_bytes)
        self._arenas[group].export_page(waiting.page, waiting.payload)
        self._aside_bytes += waiting.payload.nbytes

    def _drop_copy(self, waiting: _Waiting) -> None:
        """Stop counting the copy of a page, if there is one."""
        self._aside_bytes -= 0 if waiting.payload is None else waiting.payload.nbytes

    def _add(self, name: PageName, page: int, stamp_ns: int, *, counts_drop: bool) -> None:
        """Queue a page if there is room, or renew its stamp."""
        waiting = self._waiting.get(name)
        if waiting is not None:
            waiting.stamp_ns = stamp_ns
        elif not self._is_closing and len(self._waiting) < self._max_queued_pages:
            self._waiting[name] = _Waiting(page, stamp_ns)
        elif counts_drop:
            self._store.count_drop(StoreDrop.CLOSED if self._is_closing else StoreDrop.QUEUE_FULL)

    def _is_saved(self, name: PageName) -> bool:
        """Return True if a page is in the store or is being written."""
        return name == self._writing or self._store.contains(name)

    def _copy_aside(self, *, is_short: bool = False) -> None:
        """Copy pages on a device aside, in order, until there is no more room; if time `is_short`, only one page."""
        if self._is_on_host:
            return
        for name, waiting in self._waiting.items():
            if waiting.payload is None and not self._is_saved(name):
                if not self._has_room_aside(name[0]):
                    break
                self._set_aside(waiting, name[0])
                if is_short:
                    break

    def _find_ready(self) -> PageName | None:
        """Return the first waiting page that the writer's thread can write, if there is one."""
        for name, waiting in self._waiting.items():
            if self._is_on_host or waiting.payload is not None or self._store.contains(name):
                return name
        return None

    def _start(self) -> None:
        if self._thread is None and self._waiting:
            self._thread = Thread(target=self._run, name="mlxr-store", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        give_way(NICENESS)  # checksums and the system's copies take as long as a short prompt
        buffer = allocate_payload(self._largest_bytes)
        while (taken := self._next(buffer)) is not None:
            name, payload, stamp_ns = taken
            try:
                if payload is None:
                    self._store.touch(name, stamp_ns)
                else:
                    self._store.write(name, payload, stamp_ns)
            except Exception:  # a bug must not end the thread, which has other pages to write
                logger.exception("a page could not be stored")
                self._store.count_drop(StoreDrop.UNWRITABLE)

    def _next(self, buffer: ByteArray) -> tuple[PageName, ByteArray | None, int] | None:
        """Wait for the next page; return its name, bytes (None if it is stored) and stamp, or None at the end."""
        with self._changed:
            if self._writing is not None:
                self._store.note(self._writing)
            self._writing = None
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._find_ready() is not None or (self._is_closing and not self._waiting))
            name = self._find_ready()
            if name is None:
                return None
            self._writing = name
            waiting = self._waiting.pop(name)
            self._drop_copy(waiting)
            if self._store.contains(name):
                return name, None, waiting.stamp_ns
            if waiting.payload is not None:
                return name, waiting.payload, waiting.stamp_ns
            self._copying = name
        arena = self._arenas[name[0]]
        payload = buffer[: arena.page_bytes]
        try:
            arena.export_page(waiting.page, payload)  # without the lock: only the eviction of this page waits
        finally:
            with self._changed:
                self._copying = None
                self._changed.notify_all()
        return name, payload, waiting.stamp_ns
