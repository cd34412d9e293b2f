"""The events of one request to an `EngineThread`, one after another, for tests."""

from __future__ import annotations

import asyncio

from mlxr.engine.engine_thread import EngineThread, Ticket
from mlxr.engine.request import EngineRequest
from mlxr.engine.sequence import TokenEvent


class TokenStream:
    """Events of one request, which is submitted before the first is asked for, until all its answers have ended.

    Closing it, or letting go of it, cancels what still grows.
    """

    def __init__(self, server: EngineThread, request: EngineRequest) -> None:
        self._server, self._request = server, request
        self._events: asyncio.Queue[TokenEvent] = asyncio.Queue()
        self._growing = request.answers
        self._ticket: Ticket | None = None

    async def start(self) -> None:
        """Submit the request now, so that a refusal comes here and not with the first event. Once is enough."""
        if self._ticket is None and self._growing:
            try:
                self._ticket = await self._server.submit(self._request, self._events.put_nowait)
            except BaseException:
                self._growing = 0
                raise

    def cancel(self) -> None:
        """Stop the request before the next step; the last events of its answers can still be fetched."""
        if self._ticket is not None and self._growing:
            self._ticket.cancel()

    def close(self) -> None:
        """Stop the request, if it still grows; there are no more events."""
        self.cancel()
        self._growing = 0

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> TokenEvent:
        await self.start()
        if not self._growing:
            raise StopAsyncIteration
        event = await self._events.get()
        self._growing -= event.finish_reason is not None
        return event

    async def __aenter__(self) -> TokenStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.cancel()
