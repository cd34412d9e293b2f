"""Pages that go from one process to another: what is lacking here, what can be lent, what was brought.

A page is computed from the tokens before it alone, so whoever has the same model can use it. One side says which names
it looks for and what it has of them (`seek`); the other side finds the longest boundary at which all of its groups have
what it takes to go on, and holds the pages that the asker lacks while they are read (`lend`). States and the ends of
windows belong to their boundary: they are lent together with the pages before it, or nothing is. What arrives is proved
and put into the `Inbox`, where look-ups find it beside what is in memory and on disk. Whoever brings pages opens a
`Delivery`, which reserves the bytes beforehand, so that what waits is bounded whatever comes.

`Exchange` touches the books of the cache and is for the engine's thread, but for `export` from an arena on the host;
the inbox is safe for one thread that takes and any number that bring. `PageExchange` is its asynchronous face: books
are touched between two steps, bytes are read beside the steps where they lie in the host's memory, and those of a
device by the engine's thread, one page between two steps. Knows no network.
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
from mlxr.engine.engine_thread import EngineThread

ByteArray = NDArray[np.uint8]


class Inbox:
    """Pages by name, at most `max_bytes` of them together."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._pages: dict[PageName, tuple[ByteArray, Delivery]] = {}
        self._reserved_bytes = 0
        self._lock = RLock()  # whoever is forgotten closes its delivery, in whichever thread and whatever that is at

    @property
    def reserved_bytes(self) -> int:
        """Bytes of pages that are here or may still come."""
        return self._reserved_bytes

    def open(self, wanted_bytes: int) -> Delivery:
        """Room for pages of so many bytes, or of as many as are left."""
        with self._lock:
            limit_bytes = max(0, min(wanted_bytes, self.max_bytes - self._reserved_bytes))
            self._reserved_bytes += limit_bytes
            return Delivery(self, limit_bytes)

    def contains(self, name: PageName) -> bool:
        """Whether a page of that name is here."""
        return name in self._pages

    def take(self, name: PageName) -> ByteArray | None:
        """The bytes of the page of that name, which is no longer here then; None if it is not here."""
        with self._lock:
            payload, delivery = self._pages.pop(name, (None, None))
            if payload is not None and delivery is not None:
                delivery.names.discard(name)
                delivery.held_bytes -= payload.nbytes
                self._give_up(delivery, payload.nbytes)
            return payload

    def put(self, name: PageName, payload: ByteArray, delivery: Delivery) -> bool:
        """Keep a page of `delivery`, if that has room for it; whether it is here now, from whomever."""
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
        """Give back what `delivery` reserved: all of it and its pages, or what its pages do not take."""
        with self._lock:
            if drops:
                for name in delivery.names:
                    del self._pages[name]
                delivery.names.clear()
                delivery.held_bytes = 0
            self._give_up(delivery, delivery.reserved_bytes - delivery.held_bytes)

    def check(self) -> None:
        """Prove the bound and the books; raises AssertionError."""
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
    """Pages that are brought for one request, at most `limit_bytes`."""

    def __init__(self, inbox: Inbox, limit_bytes: int) -> None:
        self._inbox = inbox
        self.limit_bytes = self.reserved_bytes = limit_bytes
        self.held_bytes = 0
        self.names: set[PageName] = set()

    def put(self, name: PageName, payload: ByteArray) -> bool:
        """Bring a page whose bytes are proved; whether there was room for it."""
        return self._inbox.put(name, payload, self)

    def settle(self) -> None:
        """No more pages come: what they do not take is free for others."""
        self._inbox.close(self, drops=False)

    def close(self) -> None:
        """Drop the pages that nobody has taken. May be called more than once."""
        self._inbox.close(self, drops=True)


Here = Sequence[Sequence[bool]]  # for each group and each name, whether the page is there


@dataclass(frozen=True, slots=True)
class Lack:
    """Of some names, `pages` can be gone on after already; `here` is what each group has."""

    pages: int
    here: Here


@dataclass(frozen=True, slots=True)
class LentPage:
    """A page that may be read for a while: number `page` of its group's arena, or None where it is on disk."""

    name: PageName
    page: int | None


@dataclass(eq=False, slots=True)
class Loan:
    """Pages to lend, from which a text goes on after `boundary`; `held` are each group's pages kept meanwhile."""

    boundary: int
    pages: list[LentPage]
    held: list[list[int]]


class Exchange:
    """Gives pages of `cache` to other processes and takes theirs, at most `inbox_bytes` of which wait here.

    `models` are what the pages of each group belong to, `page_bytes` what one of each takes.
    """

    def __init__(self, cache: KVCache, inbox_bytes: int) -> None:
        self._groups, self._store, self.inbox = cache.groups, cache.store, Inbox(inbox_bytes)
        self.models = name_groups(cache.model, len(cache.groups))
        self.page_bytes = tuple(group.arena.page_bytes for group in cache.groups)
        self._loans: list[Loan] = []
        cache.peers = self

    @property
    def is_on_host(self) -> bool:
        """Whether any thread may `export`."""
        return self._groups[0].arena.is_on_host

    @property
    def linked_bytes(self) -> int:
        """Bytes that each further page of a text takes."""
        sizes = zip(self._groups, self.page_bytes, strict=True)
        return sum(size_bytes for group, size_bytes in sizes if group.is_linked)

    @property
    def boundary_bytes(self) -> int:
        """Bytes that it takes at most, besides, to go on from a boundary: a state, and the ends of windows."""
        far = 2**20  # a boundary behind all windows
        sizes = zip(self._groups, self.page_bytes, strict=True)
        return sum((far - group.first_needed(far)) * size_bytes for group, size_bytes in sizes if not group.is_linked)

    def seek(self, names: Sequence[bytes]) -> Lack:
        """Look up the pages `names` of a text: which of them each group has here, and up to where it can go on."""
        here = [
            [self._has(group, name) or self.inbox.contains((group.number, name)) for name in names]
            for group in self._groups
        ]
        return Lack(find_boundary(self._groups, lambda group, place: here[group][place], len(names)).pages, here)

    def lend(self, names: Sequence[bytes], lack: Lack, max_bytes: int) -> Loan:
        """Hold what one who lacks that much needs to get further, at most `max_bytes` of it; empty if nothing helps.

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
        """Nobody reads the pages of a loan any more."""
        self._loans.remove(loan)
        for group, pages in zip(self._groups, loan.held, strict=True):
            group.drop_holds(pages)

    def export(self, lent: LentPage, target: ByteArray) -> bool:
        """Copy the bytes of a page that is lent to `target`; False if it is on disk no longer."""
        if lent.page is None:
            return self._store is not None and self._store.read_into(lent.name, target)
        self._groups[lent.name[0]].arena.export_page(lent.page, target)
        return True

    def contains(self, name: PageName) -> bool:
        """Tell whether a page of that name was brought and is still here."""
        return self.inbox.contains(name)

    def take(self, name: PageName) -> ByteArray | None:
        """Return the bytes of a page that was brought, which is no longer here then; None if it is not."""
        return self.inbox.take(name)

    def list_lent(self, group: int) -> list[list[int]]:
        """List the pages of a group that each loan holds."""
        return [loan.held[group] for loan in self._loans]

    def check(self) -> None:
        """Prove the books of what was brought; raises AssertionError."""
        self.inbox.check()

    def _has(self, group: CacheGroup, name: bytes) -> bool:
        stored = self._store is not None and self._store.contains((group.number, name))
        return stored or group.index.get(name) is not None

    def _list_lacking(self, boundary: int, lack: Lack) -> list[tuple[int, int]]:
        """Group and place of what is needed to go on after `boundary` pages and not there, pages in order last.

        So that of a model with pages alone whatever arrives is of use, however much of it that is.
        """
        return [
            (group.number, place)
            for group in sorted(self._groups, key=lambda group: group.is_linked)
            for place in range(group.first_needed(boundary), boundary)
            if not lack.here[group.number][place]
        ]

    def _hold(self, loan: Loan, names: Sequence[bytes], places: Sequence[tuple[int, int]]) -> None:
        """Hold the pages in memory. Where pages are linked, all before them are held as well, as tables do."""
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
    """The asynchronous face of an engine's `Exchange`, whose `models`, `page_bytes` and the like it has."""

    def __init__(self, engine: EngineThread, inbox_bytes: int) -> None:
        exchange = Exchange(engine.cache, inbox_bytes)
        self._engine, self._exchange = engine, exchange
        self.models, self.page_bytes = exchange.models, exchange.page_bytes
        self.linked_bytes, self.boundary_bytes = exchange.linked_bytes, exchange.boundary_bytes

    def open_delivery(self, wanted_bytes: int) -> Delivery:
        """Room for pages that are to be brought."""
        return self._exchange.inbox.open(wanted_bytes)

    async def seek(self, names: Sequence[bytes]) -> Lack:
        """What there is of these pages; see `Exchange.seek`."""
        return await self._call(lambda: self._exchange.seek(names))

    @asynccontextmanager
    async def lend(self, names: Sequence[bytes], lack: Lack, max_bytes: int) -> AsyncIterator[Loan]:
        """Within, the pages that `Exchange.lend` chooses stay as they are."""
        lending = self._engine.post(lambda _: self._exchange.lend(names, lack, max_bytes))
        try:
            yield await asyncio.wrap_future(lending)
        finally:
            lending.add_done_callback(self._give_back)  # also of whoever has been cancelled while it was lent

    async def read(self, lent: LentPage) -> tuple[bytes, ByteArray] | None:
        """A page that is lent, as in the store: header and bytes. None where it is on disk no longer."""
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
