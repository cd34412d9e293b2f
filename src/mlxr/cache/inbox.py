"""Pages that another process has computed and that were brought here, until a look-up takes them into the arena.

Whoever brings pages opens a `Delivery`, which reserves the bytes beforehand and gives them back when it is closed, so
that what waits here is bounded whatever comes. Pages are proved before they are put in. Safe for one thread that takes
and any number that bring.
"""

from __future__ import annotations

from threading import RLock

from mlxr.cache.store import PageName
from mlxr.kernels.tensor import ByteArray


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
