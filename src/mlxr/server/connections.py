"""Connections: how many may be open, and which of them are closed for others.

uvicorn closes connections that are idle between two requests; one that never sends a whole head would stay for ever.
And the system has only so many descriptors: without one left, no connection could be taken and no file opened.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
from collections.abc import Callable
from time import monotonic
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

logger = logging.getLogger(__name__)
MAX_CONNECTIONS = 8192
MAX_DESCRIPTORS = 1 << 16  # more than the system should be asked for, where it sets no bound itself
RESERVED_DESCRIPTORS = 128  # for models, the catalogue, pulls and template workers
ACCEPTS_AT_ONCE = 8  # before those that were taken are looked at
COMPLAINT_S = 60.0  # between two lines of the log about one lack
FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain\r\nContent-Length: 35\r\nRetry-After: 1\r\n"
    b"Connection: close\r\n\r\ntoo many connections are being used"
)


def raise_descriptor_limit() -> int:
    """Let the process have as many descriptors as the system allows; how many that are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # a bound that the system does not tell
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return wanted
    return wanted if soft == resource.RLIM_INFINITY else soft


def count_connections(descriptors: int) -> int:
    """How many connections a process may have that has so many descriptors."""
    return max(4, min(MAX_CONNECTIONS, descriptors - min(RESERVED_DESCRIPTORS, descriptors // 2)))


class Connections:
    """The open connections of a server, at most `most`, those that were heard of last at the end."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._open: dict[TimedProtocol, None] = {}

    def __len__(self) -> int:
        return len(self._open)

    def enter(self, connection: TimedProtocol) -> bool:
        """Take in a connection; where there are too many, the one closes that was silent longest and is not answered.

        Those that have not sent a whole request yet go before those that have. False where all are being answered, so
        that there is no place for this one.
        """
        if len(self._open) >= self.most:
            idle = [other for other in self._open if not other.is_answered]
            if not idle:
                return False
            leaving = next((other for other in idle if not other.has_asked), idle[0])
            self.leave(leaving)
            leaving.transport.close()
        self._open[connection] = None
        return True

    def note(self, connection: TimedProtocol) -> None:
        """Something came from a connection."""
        if connection in self._open:
            del self._open[connection]
            self._open[connection] = None

    def leave(self, connection: TimedProtocol) -> None:
        """A connection is no longer counted."""
        self._open.pop(connection, None)


class TimedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's HTTP protocol that closes the connection `timeout_s` after it was made, or after a head began, unless
    the head is complete, and at once where there are too many connections.
    """

    def __init__(self, timeout_s: float, connections: Connections, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._timeout_s, self._counted = timeout_s, connections
        self._timer: asyncio.TimerHandle | None = None
        self.has_asked = False  # sent a whole request, now or before

    @property
    def is_answered(self) -> bool:
        """Whether a request of the connection, which has come whole, is being answered."""
        return self._has_head and not self.cycle.more_body

    @property
    def _has_head(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for the head of a request."""
        super().connection_made(transport)
        if self._counted.enter(self):
            self._watch()
        else:
            transport.write(FULL)
            transport.close()

    def data_received(self, data: bytes) -> None:
        """Take in what came, and note that something did."""
        self._counted.note(self)
        super().data_received(data)
        self.has_asked = self.has_asked or (self.cycle is not None and not self.cycle.more_body)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing more."""
        self._counted.leave(self)
        self._rest()
        super().connection_lost(exc)

    def _watch(self) -> None:
        if self._has_head:
            self._rest()
        elif self._timer is None:
            self._timer = self.loop.call_later(self._timeout_s, self.transport.close)

    def _rest(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def make_protocol(timeout_s: float, connections: Connections) -> type[asyncio.Protocol]:
    """Return the class of `TimedProtocol` with these arguments, as uvicorn wants a class."""

    class BoundProtocol(TimedProtocol):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(timeout_s, connections, *arguments, **options)

    return BoundProtocol


class SeldomComplaints:
    """A loop's handler of exceptions that tells of a lack of descriptors once in COMPLAINT_S, and of the rest as usual.

    asyncio tells of it for each connection that it cannot take, thousands of times a second.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._told_s = -COMPLAINT_S

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log what happened, or not."""
        if "out of system resource" not in str(context.get("message", "")):
            loop.default_exception_handler(context)
        elif self._clock() - self._told_s >= COMPLAINT_S:
            self._told_s = self._clock()
            reason = context.get("exception")
            logger.warning("no connection can be taken: %s; raise the limit of open files (ulimit -n)", reason)
