"""Pages that one process fetches from another: finding the missing ones, lending, and receiving.

A page depends only on the tokens before it, so every process with the same model can use it. The receiver says which
names it looks for and which of them it has (`seek`). The lender finds the longest boundary at which all of its groups
have the pages needed to continue, and holds the pages that the receiver lacks while they are read (`lend`). States and
the ends of windows belong to their boundary: they are lent together with the pages before it, or nothing is. Pages that
arrive are verified and put into the `Inbox`, where look-ups find them beside those in memory and on disk. To bring
pages, one opens a `Delivery`, which reserves their bytes first, so that the inbox is bounded.

`Exchange` changes the book-keeping of the cache and is for the engine's thread, except `export` from an arena in host
memory; the inbox is safe for one thread that takes and any number that bring. `PageExchange` is its asynchronous face:
book-keeping is done between two steps; bytes in host memory are read while steps run, and those of a device by the
engine's thread, one page between two steps. Uses no network.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from threading import RLock
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from mlxr.cache.group import CacheGroup
from mlxr.cache.kv_cache import KVCache
from mlxr.cache.prefix import find_boundary
from mlxr.cache.store import PageName, allocate_payload, name_groups, pack_header
from mlxr.core.errors import EngineStopped
from mlxr.core.frozen import frozen
from mlxr.engine.engine_thread import EngineThread

ByteArray = NDArray[np.uint8]


class Inbox:
    """Pages by name, at most `max_bytes` of them together."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._pages: dict[PageName, tuple[ByteArray, Delivery]] = {}
        self._reserved_bytes = 0
        self._lock = RLock()  # reentrant: garbage collection may close a delivery in any thread at any point

    @property
    def reserved_bytes(self) -> int:
        """The bytes of pages that are here or may still come."""
        return self._reserved_bytes

    def open(self, wanted_bytes: int) -> Delivery:
        """Reserve room for `wanted_bytes` of pages, or for as many bytes as are left."""
        with self._lock:
            limit_bytes = max(0, min(wanted_bytes, self.max_bytes - self._reserved_bytes))
            self._reserved_bytes += limit_bytes
            return Delivery(self, limit_bytes)

    def contains(self, name: PageName) -> bool:
        """Return True if a page of that name is here."""
        return name in self._pages

    def take(self, name: PageName) -> ByteArray | None:
        """Remove the page of that name and return its bytes; None if it is not here."""
        with self._lock:
            payload, delivery = self._pages.pop(name, (None, None))
            if payload is not None and delivery is not None:
                delivery.names.discard(name)
                delivery.held_bytes -= payload.nbytes
                self._give_up(delivery, payload.nbytes)
            return payload

    def put(self, name: PageName, payload: ByteArray, delivery: Delivery) -> bool:
        """Keep a page if its `delivery` has room for it. Returns True if the page is here now, from any delivery."""
        with self._lock:
            if name in self._pages:
                return True
            if delivery.held_bytes + payload.nbytes > delivery.reserved_bytes:
                return False
            self._pages[name] = payload, delivery
            delivery.names.add(name)
            delivery.held_bytes += payload.nbytes
            return True

    def close(self, delivery: Delivery, *, drops: bool) -> None:
        """Release bytes that `delivery` reserved: all, with its pages, if it `drops`, else those left over."""
        with self._lock:
            if drops:
                for name in delivery.names:
                    del self._pages[name]
                delivery.names.clear()
                delivery.held_bytes = 0
            self._give_up(delivery, delivery.reserved_bytes - delivery.held_bytes)

    def check(self) -> None:
        """Check the bound and the book-keeping; raises AssertionError."""
        with self._lock:
            deliveries = {id(delivery): delivery for _, delivery in self._pages.values()}
            held_bytes = sum(payload.nbytes for payload, _ in self._pages.values())
            if not held_bytes <= self._reserved_bytes <= self.max_bytes:
                raise AssertionError(f"{held_bytes} bytes are in the inbox, {self._reserved_bytes} are reserved")
            names = [name for delivery in deliveries.values() for name in delivery.names]
            own_bytes = sum(delivery.held_bytes for delivery in deliveries.values())
            if sorted(names) != sorted(self._pages) or own_bytes != held_bytes:
                raise AssertionError(f"{len(self._pages)} pages are in the inbox, deliveries have {len(names)}")

    def _give_up(self, delivery: Delivery, size_bytes: int) -> None:
        delivery.reserved_bytes -= size_bytes
        self._reserved_bytes -= size_bytes


class Delivery:
    """The pages that are brought for one request, at most `limit_bytes`."""

    def __init__(self, inbox: Inbox, limit_bytes: int) -> None:
        self._inbox = inbox
        self.limit_bytes = self.reserved_bytes = limit_bytes
        self.held_bytes = 0
        self.names: set[PageName] = set()

    def put(self, name: PageName, payload: ByteArray) -> bool:
        """Bring a page whose bytes are verified; returns True if it is here now."""
        return self._inbox.put(name, payload, self)

    def settle(self) -> None:
        """Note that no more pages come: bytes that they do not take are free for others."""
        self._inbox.close(self, drops=False)

    def close(self) -> None:
        """Drop the pages that have not been taken. May be called more than once."""
        self._inbox.close(self, drops=True)


Here = Sequence[Sequence[bool]]  # for each group and each name, whether the page is there


@frozen
class Lack:
    """The pages that a process lacks: it can continue after the first `pages`; `here` are the pages of each group."""

    pages: int
    here: Here


@frozen
class LentPage:
    """A page that is lent to be read: number `page` of its group's arena, None if it is on disk."""

    name: PageName
    page: int | None


@dataclass(eq=False, slots=True)
class Loan:
    """Lent pages, with which a text continues after `boundary` pages; `held` are the pages held in each group."""

    boundary: int
    pages: list[LentPage]
    held: list[list[int]]


class Exchange:
    """Lends pages of `cache` to other processes and takes theirs, at most `inbox_bytes` of which wait here.

    `models` identify the model that each group's pages belong to, `page_bytes` are the bytes of a page of each group.
    """

    def __init__(self, cache: KVCache, inbox_bytes: int) -> None:
        self._groups, self._store, self.inbox = cache.groups, cache.store, Inbox(inbox_bytes)
        self.models = name_groups(cache.model, len(cache.groups))
        self.page_bytes = tuple(group.arena.page_bytes for group in cache.groups)
        self._loans: list[Loan] = []
        cache.peers = self

    @property
    def is_on_host(self) -> bool:
        """True if any thread may `export`, as the pages are in host memory."""
        return self._groups[0].arena.is_on_host

    @property
    def linked_bytes(self) -> int:
        """The bytes that each further page of a text takes."""
        sizes = zip(self._groups, self.page_bytes, strict=True)
        return sum(size_bytes for group, size_bytes in sizes if group.is_linked)

    @property
    def boundary_bytes(self) -> int:
        """The most bytes that continuing from a boundary takes besides: a state, and the ends of windows."""
        far = 2**20  # a boundary behind all windows
        sizes = zip(self._groups, self.page_bytes, strict=True)
        return sum((far - group.first_needed(far)) * size_bytes for group, size_bytes in sizes if not group.is_linked)

    def seek(self, names: Sequence[bytes]) -> Lack:
        """Look up the pages `names` of a text: those that each group has, and how many the text can continue after."""
        here = [
            [self._has(group, name) or self.inbox.contains((group.number, name)) for name in names]
            for group in self._groups
        ]
        return Lack(find_boundary(self._groups, lambda group, place: here[group][place], len(names)).pages, here)

    def lend(self, names: Sequence[bytes], lack: Lack, max_bytes: int) -> Loan:
        """Hold pages that let a process with that `lack` continue later, at most `max_bytes`; empty if none help.

        The loan must be given back.
        """
        loan = Loan(0, [], [[] for _ in self._groups])
        limit = len(names)

        def has(group: int, place: int) -> bool:
            return self._has(self._groups[group], names[place])

        while limit > lack.pages:
            boundary = find_boundary(self._groups, has, limit).pages
            places = self._list_lacking(boundary, lack) if boundary > lack.pages else []
            excess_bytes = sum(self.page_bytes[group] for group, _ in places) - max_bytes
            if excess_bytes <= 0:
                loan.boundary = boundary if places else 0
                self._hold(loan, names, places)
                break
            limit = boundary - max(1, -(-excess_bytes // self.linked_bytes)) if self.linked_bytes else 0
        self._loans.append(loan)
        return loan

    def give_back(self, loan: Loan) -> None:
        """Release the pages of a loan, which are not read any more."""
        self._loans.remove(loan)
        for group, pages in zip(self._groups, loan.held, strict=True):
            group.drop_holds(pages)

    def export(self, lent: LentPage, target: ByteArray) -> bool:
        """Copy the bytes of a lent page to `target`; returns False if it is no longer on disk."""
        if lent.page is None:
            return self._store is not None and self._store.read_into(lent.name, target)
        self._groups[lent.name[0]].arena.export_page(lent.page, target)
        return True

    def contains(self, name: PageName) -> bool:
        """Return True if a page of that name was brought and is still here."""
        return self.inbox.contains(name)

    def take(self, name: PageName) -> ByteArray | None:
        """Remove a page that was brought and return its bytes; None if it is not here."""
        return self.inbox.take(name)

    def list_lent(self, group: int) -> list[list[int]]:
        """List the pages of a group that each loan holds."""
        return [loan.held[group] for loan in self._loans]

    def check(self) -> None:
        """Check the book-keeping of the pages that were brought; raises AssertionError."""
        self.inbox.check()

    def _has(self, group: CacheGroup, name: bytes) -> bool:
        stored = self._store is not None and self._store.contains((group.number, name))
        return stored or group.index.get(name) is not None

    def _list_lacking(self, boundary: int, lack: Lack) -> list[tuple[int, int]]:
        """List group and place of the pages needed to continue after `boundary` pages that the other side lacks.

        Linked pages come last and in order, so that of a model with these alone any first part is of use.
        """
        return [
            (group.number, place)
            for group in sorted(self._groups, key=lambda group: group.is_linked)
            for place in range(group.first_needed(boundary), boundary)
            if not lack.here[group.number][place]
        ]

    def _hold(self, loan: Loan, names: Sequence[bytes], places: Sequence[tuple[int, int]]) -> None:
        """Hold the pages in memory. If pages are linked, all before them are held as well, as page tables do."""
        for number, place in places:
            entry = self._groups[number].index.get(names[place])
            loan.pages.append(LentPage((number, names[place]), None if entry is None else entry.page))
        for group, held in zip(self._groups, loan.held, strict=True):
            wanted = {lent.page for lent in loan.pages if lent.name[0] == group.number and lent.page is not None}
            if wanted and group.is_linked:
                entries = map(group.index.get, names[: loan.boundary])
                wanted |= {entry.page for entry in entries if entry is not None}
            held.extend(sorted(wanted))
            group.pager.retain(held)


T = TypeVar("T")


class PageExchange:
    """The asynchronous face of an engine's `Exchange`, with the same `models`, `page_bytes` and the like."""

    def __init__(self, engine: EngineThread, inbox_bytes: int) -> None:
        exchange = Exchange(engine.cache, inbox_bytes)
        self._engine, self._exchange = engine, exchange
        self.models, self.page_bytes = exchange.models, exchange.page_bytes
        self.linked_bytes, self.boundary_bytes = exchange.linked_bytes, exchange.boundary_bytes

    def open_delivery(self, wanted_bytes: int) -> Delivery:
        """Reserve room for pages that are to be brought."""
        return self._exchange.inbox.open(wanted_bytes)

    async def seek(self, names: Sequence[bytes]) -> Lack:
        """Look up these pages; see `Exchange.seek`."""
        return await self._call(lambda: self._exchange.seek(names))

    @asynccontextmanager
    async def lend(self, names: Sequence[bytes], lack: Lack, max_bytes: int) -> AsyncIterator[Loan]:
        """Lend the pages that `Exchange.lend` chooses until the block ends."""
        lending = self._engine.post(lambda _: self._exchange.lend(names, lack, max_bytes))
        try:
            yield await asyncio.wrap_future(lending)
        finally:
            lending.add_done_callback(self._give_back)  # also if the caller is cancelled meanwhile

    async def read(self, lent: LentPage) -> tuple[bytes, ByteArray] | None:
        """A lent page in the store's form: header and bytes. None if it is no longer on disk."""
        group, key = lent.name
        payload = allocate_payload(self.page_bytes[group])

        def export() -> bool:
            return self._exchange.export(lent, payload)

        is_free = lent.page is None or self._exchange.is_on_host
        if not (await asyncio.to_thread(export) if is_free else await self._call(export)):
            return None
        return await asyncio.to_thread(pack_header, self.models[group], key, payload), payload

    def _give_back(self, lending: Future[Loan]) -> None:
        if not lending.cancelled() and lending.exception() is None:
            with suppress(EngineStopped):
                self._engine.post(lambda _: self._exchange.give_back(lending.result()))

    async def _call(self, function: Callable[[], T]) -> T:
        return await self._engine.run_between_steps(lambda _: function())
