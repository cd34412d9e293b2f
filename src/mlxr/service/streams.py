"""The events of the answers to one request, for readers on an event loop (`AsyncStream`) and for those that wait.

Both are fed by the engine's events as these happen, so a stop string ends an answer whether its reader is quick or
slow. What nobody has fetched yet is queued, at most the `max_tokens` of the request.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from types import TracebackType

from mlxr.core.events import Event, Finish
from mlxr.engine.engine_thread import EngineThread, Ticket, read_embedding
from mlxr.engine.request import EngineRequest
from mlxr.engine.runner import Floats
from mlxr.engine.sequence import TokenEvent
from mlxr.service.cluster_hooks import Brought
from mlxr.service.identity import current_identity, use_identity
from mlxr.service.preparation import Prepared

logger = logging.getLogger(__name__)
MAX_TEXTS = 64  # to embed that one call has in the queue at a time


class AnswerStream(ABC):
    """Turns the engine's events of one request into those of its answers; closing it cancels what still grows.

    `thought_end` ends the thoughts of the answers; it is None where there are none.
    """

    def __init__(self, prepared: Prepared) -> None:
        self.prompt_ids = list(prepared.request.token_ids)
        self.relaxed = prepared.relaxed
        self.thought_end = prepared.thought_end
        self._answers = prepared.answers
        self._unfetched = len(self._answers)  # Finish events that nobody has taken
        self._ticket: Ticket | None = None
        self._identity = current_identity()
        self._brought: Brought | None = None  # pages that wait for this request

    @abstractmethod
    def _hand_out(self, events: Sequence[Event]) -> None:
        """Let the reader have more events."""

    @property
    def growing(self) -> int:
        """How many answers have an end that nobody has taken yet."""
        return self._unfetched

    def attach(self, ticket: Ticket) -> None:
        """Take the request as the engine knows it; called once, before it is started."""
        self._ticket = ticket

    def keep(self, brought: Brought | None) -> None:
        """Keep pages that were brought for this request until its first event; those before are dropped."""
        if self._brought is not None:
            self._brought.close()
        self._brought = brought

    def receive(self, event: TokenEvent) -> None:
        """Take one event of the engine."""
        self.keep(None)
        answer = self._answers[event.index]
        if answer.finished:
            return
        was_over = answer.is_over
        try:
            with use_identity(self._identity):  # this runs outside of the request's own task
                events = answer.push(event)
        except Exception as error:  # one answer's failure must not take along the others of this step
            logger.exception("an answer failed")
            events = answer.fail(f"{type(error).__name__}: {error}")
        has_ended = answer.finished or (answer.is_over and not was_over)
        if has_ended and event.finish_reason is None and self._ticket is not None:
            self._ticket.cancel(event.index)  # the engine does not know yet
        self._hand_out(events)

    def cancel(self) -> None:
        """Stop all answers before the next step; their last events, each a Finish(CANCELLED), can still be fetched.

        May be called from any thread, and from a signal handler.
        """
        if self._unfetched and self._ticket is not None:
            self._ticket.cancel()

    def close(self) -> None:
        """Stop what still grows and forget it; there are no more events."""
        self.cancel()
        self.keep(None)
        self._unfetched = 0

    def __del__(self) -> None:
        self.cancel()
        self.keep(None)


class AsyncStream(AnswerStream):
    """An asynchronous iterator over the events, which ends after the last Finish. Letting go of it cancels it.

    Belongs to the loop it was started on.
    """

    def __init__(self, prepared: Prepared) -> None:
        super().__init__(prepared)
        self._events: deque[Event] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def _hand_out(self, events: Sequence[Event]) -> None:
        self._events.extend(events)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        """Stop what still grows and forget it; there are no more events."""
        super().close()
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


class Stream(AnswerStream):
    """An iterator over the events, which waits for each and ends after the last Finish. Letting go of it cancels it.

    It is fed on the engine's thread, and read by one thread at a time.
    """

    def __init__(self, prepared: Prepared, engine: EngineThread) -> None:
        super().__init__(prepared)
        self._engine = engine  # which ends when nobody has it any more
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._growing = len(self._answers)  # answers that have no end yet, fetched or not
        self._ended = threading.Event()

    def _hand_out(self, events: Sequence[Event]) -> None:
        for event in events:
            self._events.put(event)
            self._growing -= isinstance(event, Finish)
        if not self._growing:
            self._ended.set()

    def wait(self) -> Stream:
        """Wait until all answers have ended, which wakes the reader once instead of with every token."""
        self._ended.wait()
        return self

    def end_thinking(self) -> None:
        """Close the thought that the model is in, and let it answer; nothing happens where it does not think.

        May be called from any thread.
        """
        if self.thought_end is not None:
            self.thought_end.end()

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        if not self._unfetched:
            raise StopIteration
        event = self._events.get()
        self._unfetched -= isinstance(event, Finish)
        return event

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_streams(engine: EngineThread, prepared: Sequence[Prepared], *, waits_for_room: bool = False) -> list[Stream]:
    """Start the answers to several requests together; see `EngineThread.start_all`."""
    streams = [Stream(one, engine) for one in prepared]
    tickets = [engine.open(one.request, forward_to(stream)) for one, stream in zip(prepared, streams, strict=True)]
    for stream, ticket in zip(streams, tickets, strict=True):
        stream.attach(ticket)
    engine.start_all(tickets, waits_for_room=waits_for_room)
    return streams


def embed_all(engine: EngineThread, requests: Sequence[EngineRequest]) -> list[Floats]:
    """Wait for the embeddings of texts, (hidden size,) and not normalised; at most MAX_TEXTS are in the queue at once.

    Raises as `Engine.submit` does, and RequestFailed for a text that could not be computed; the others end then.
    """
    waiting, vectors = deque(requests), list[Floats]()
    started: deque[tuple[Ticket, queue.SimpleQueue[TokenEvent]]] = deque()
    try:
        while waiting or started:
            added = []
            while waiting and len(started) < MAX_TEXTS:
                ended: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
                ticket = engine.open(waiting.popleft(), ended.put)
                started.append((ticket, ended))
                added.append(ticket)
            if added:
                engine.start_all(added)
            vectors.append(read_embedding(started[0][1].get()))
            started.popleft()
    finally:
        for ticket, _ in started:
            ticket.cancel()
    return vectors


def forward_to(stream: AnswerStream) -> Callable[[TokenEvent], None]:
    """A receiver for the engine that does not keep the stream alive: one that is forgotten cancels itself."""
    reference = weakref.ref(stream)

    def receive(event: TokenEvent) -> None:
        target = reference()
        if target is not None:
            target.receive(event)

    return receive
