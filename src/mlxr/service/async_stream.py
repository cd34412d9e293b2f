"""The events of the answers to one request, for readers on an event loop."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable

from mlxr.core.events import Event, Finish
from mlxr.engine.async_engine import Ticket
from mlxr.engine.sequence import TokenEvent
from mlxr.service.identity import current_identity, use_identity
from mlxr.service.page_source import Brought
from mlxr.service.preparation import Prepared

logger = logging.getLogger(__name__)


class AsyncStream:
    """The events of the answers to one request, as an asynchronous iterator that ends after the last Finish.

    `thought_end` ends their thoughts; it is None where there are none.

    Closing it early, or letting go of it, cancels what still grows. Belongs to the loop it was started on.
    """

    def __init__(self, prepared: Prepared) -> None:
        self.prompt_ids = list(prepared.request.token_ids)
        self.relaxed = prepared.relaxed
        self.thought_end = prepared.thought_end
        self._answers = prepared.answers
        self._events: deque[Event] = deque()
        self._unfetched = len(self._answers)  # Finish events that nobody has taken
        self._waiter: asyncio.Future[None] | None = None
        self._ticket: Ticket | None = None
        self._identity = current_identity()
        self._brought: Brought | None = None  # pages that wait for this request
        self._unwanted: list[int | None] = []  # what was to be cancelled before there was a ticket

    @property
    def growing(self) -> int:
        """How many answers have an end that nobody has taken yet."""
        return self._unfetched

    def attach(self, ticket: Ticket) -> None:
        """The engine has accepted the request; called once."""
        self._ticket = ticket
        for index in self._unwanted:
            ticket.cancel(index)

    def keep(self, brought: Brought | None) -> None:
        """Pages have been brought for this request; those before are dropped. They are until its first event."""
        if self._brought is not None:
            self._brought.close()
        self._brought = brought

    def receive(self, event: TokenEvent) -> None:
        """Take one event of the engine; called on the loop."""
        self.keep(None)
        answer = self._answers[event.index]
        if answer.finished:
            return
        was_over = answer.is_over
        try:
            with use_identity(self._identity):  # the loop calls this outside of the request's own task
                self._events.extend(answer.push(event))
        except Exception as error:  # one answer's failure must not take along the others of this step
            logger.exception("an answer failed")
            self._events.extend(answer.fail(f"{type(error).__name__}: {error}"))
        if event.finish_reason is None and (answer.finished or (answer.is_over and not was_over)):
            self._cancel(event.index)  # the engine does not know yet
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def cancel(self) -> None:
        """Stop all answers before the next step; their last events, each a Finish(CANCELLED), can still be fetched."""
        if self._unfetched:
            self._cancel(None)

    def close(self) -> None:
        """Stop what still grows and forget it; there are no more events."""
        self.cancel()
        self.keep(None)
        self._unfetched = 0
        self._events.clear()

    async def take(self) -> list[Event]:
        """All events that are there, at least one; none when all answers have ended."""
        while not self._events and self._unfetched:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        events = list(self._events)
        self._events.clear()
        self._unfetched -= sum(isinstance(event, Finish) for event in events)
        return events

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        while not self._events:
            if not self._unfetched:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        event = self._events.popleft()
        self._unfetched -= isinstance(event, Finish)
        return event

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.cancel()
        self.keep(None)

    def _cancel(self, index: int | None) -> None:
        if self._ticket is None:
            self._unwanted.append(index)
        else:
            self._ticket.cancel(index)


def forward_to(stream: AsyncStream) -> Callable[[TokenEvent], None]:
    """A receiver for the engine that does not keep the stream alive: one that is forgotten cancels itself."""
    reference = weakref.ref(stream)

    def receive(event: TokenEvent) -> None:
        target = reference()
        if target is not None:
            target.receive(event)

    return receive
