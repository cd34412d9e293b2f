"""Connections whose clients say nothing, or stop in the middle of a request's head: closed after a time.

uvicorn closes connections that are idle between two requests; one that never sends a whole head would stay for ever.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol


def make_protocol(timeout_s: float) -> type[asyncio.Protocol]:
    """Return uvicorn's HTTP protocol with a bound on the time until a request's head is complete."""

    class TimedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        """Closes the connection `timeout_s` after it was made, or after a head began, unless the head is complete."""

        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            self._rest()
            super().connection_lost(exc)

        def _watch(self) -> None:
            is_served = self.cycle is not None and not self.cycle.response_complete
            if is_served:
                self._rest()
            elif self._timer is None:
                self._timer = self.loop.call_later(timeout_s, self.transport.close)

        def _rest(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    return TimedProtocol
