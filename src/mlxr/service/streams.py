"""The events of the answers to one request, for readers on an event loop (`AsyncStream`) and blocking ones (`Stream`).

Both are fed by the engine's events as these happen, so a stop string ends an answer whether its reader is quick or
slow. Unread events are queued, at most the `max_tokens` of the request.

Also the fold of an answer's events, which adds them up, so far and at the end. All callers use this one fold.
`AnswerFold` takes the events of one answer and keeps its sections (thoughts, texts and calls, one after another), its
tokens and its counts; `add` returns the changes that an event makes, for streams to send. `ReplyFold` holds all answers
to a request with their counts together. A `Completion` is one answer that has ended. Nothing here knows how the events
came about, or how a dialect writes them.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import islice
from time import monotonic
from typing import Literal, NamedTuple

from mlxr.core.frozen import frozen
from mlxr.core.types import (
    Closes,
    Event,
    Finish,
    FinishReason,
    PromptProgress,
    ReasoningDelta,
    TextDelta,
    Timings,
    TokenInfo,
    ToolCallDelta,
    Usage,
)
from mlxr.engine.engine_thread import EngineThread, Ticket, read_embedding
from mlxr.engine.request import EngineRequest
from mlxr.engine.runner import Floats
from mlxr.engine.sequence import TokenEvent
from mlxr.service.identity import Brought, current_identity, use_identity
from mlxr.service.preparation import Prepared

logger = logging.getLogger(__name__)
MAX_TEXTS, TEXTS_AT_ONCE = 256, 16  # to embed: the most of one call in the queue, and those added to it together


class AnswerStream(ABC):
    """Turns the engine's events of one request into those of its answers; closing it cancels unfinished answers.

    `thought_end` ends the thoughts of the answers; it is None if there can be none.
    """

    def __init__(self, prepared: Prepared) -> None:
        self.prompt_ids = list(prepared.request.token_ids)
        self.relaxed = prepared.relaxed
        self.thought_end = prepared.thought_end
        self._answers = prepared.answers
        self._unfetched = len(self._answers)  # answers whose Finish event was not fetched yet
        self._ticket: Ticket | None = None
        self._identity = current_identity()
        self._brought: Brought | None = None  # pages that wait for this request

    @abstractmethod
    def _hand_out(self, events: Sequence[Event]) -> None:
        """Let the reader have more events."""

    @property
    def growing(self) -> int:
        """The number of answers whose end was not fetched yet."""
        return self._unfetched

    def attach(self, ticket: Ticket) -> None:
        """Keep the engine's ticket for the request; called once, before it is started."""
        self._ticket = ticket

    def keep(self, brought: Brought | None) -> None:
        """Keep pages that were brought for this request until its first event; closes those kept before."""
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
        with use_identity(self._identity):  # this runs outside of the request's own task
            try:
                events = answer.push(event)
            except Exception as error:  # one answer's failure must not end the others of this step
                logger.exception("an answer failed")
                events = answer.fail(f"{type(error).__name__}: {error}")
            has_ended = answer.finished or (answer.is_over and not was_over)
            if has_ended and event.finish_reason is None and self._ticket is not None:
                self._ticket.cancel(event.index)  # the engine does not know yet
            if events:
                self._hand_out(events)

    def cancel(self) -> None:
        """Stop all answers before the next step; their last events, each a Finish(CANCELLED), can still be fetched.

        May be called from any thread, and from a signal handler.
        """
        if self._unfetched and self._ticket is not None:
            self._ticket.cancel()

    def close(self) -> None:
        """Cancel unfinished answers and forget them; there are no more events."""
        self.cancel()
        self.keep(None)
        self._unfetched = 0

    def __del__(self) -> None:
        self.cancel()
        self.keep(None)


class AsyncStream(AnswerStream):
    """An asynchronous iterator over the events, which ends after the last Finish. Dropping it cancels it.

    Belongs to the loop it was started on.
    """

    def __init__(self, prepared: Prepared) -> None:
        super().__init__(prepared)
        self._events: deque[Event] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._taker: Callable[[Sequence[Event]], bool] | None = None

    def pour(self, taker: Callable[[Sequence[Event]], bool]) -> None:
        """While the reader waits, give events to `taker` instead of waking the reader, but never an answer's end.

        `taker` returns True if it took the events; otherwise the reader gets them. If it fails, the reader gets the
        error.
        """
        self._taker = taker

    def _hand_out(self, events: Sequence[Event]) -> None:
        waiter = self._waiter
        if waiter is None or waiter.done():
            self._events.extend(events)
            return
        if self._taker is not None and not any(isinstance(event, Finish) for event in events):
            try:
                if self._taker(events):
                    return
            except Exception as error:  # as above
                waiter.set_exception(error)
                return
        self._events.extend(events)
        waiter.set_result(None)

    def close(self) -> None:
        """Cancel unfinished answers and forget them; there are no more events."""
        super().close()
        self._events.clear()
        self._taker = None

    async def take(self) -> list[Event]:
        """Return all events that are there, waiting for at least one; none once all answers have ended."""
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


class Stream(AnswerStream, Closes):
    """An iterator over the events, which waits for each and ends after the last Finish. Dropping it cancels it.

    It is fed on the engine's thread, and read by one thread at a time.
    """

    def __init__(self, prepared: Prepared, engine: EngineThread) -> None:
        super().__init__(prepared)
        self._engine = engine  # kept, since an engine thread ends with its last reference
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
        """Wait until all answers have ended; this wakes the reader once instead of with every token."""
        self._ended.wait()
        return self

    def end_thinking(self) -> None:
        """Close the thought that the model is in, and let it answer; does nothing if it is not thinking.

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


def open_streams(engine: EngineThread, prepared: Sequence[Prepared], *, waits_for_room: bool = False) -> list[Stream]:
    """Start the answers to several requests together; see `EngineThread.start_all`."""
    streams = [Stream(one, engine) for one in prepared]
    tickets = [engine.open(one.request, forward_to(stream)) for one, stream in zip(prepared, streams, strict=True)]
    for stream, ticket in zip(streams, tickets, strict=True):
        stream.attach(ticket)
    engine.start_all(tickets, waits_for_room=waits_for_room)
    return streams


def embed_each(engine: EngineThread, requests: Iterable[EngineRequest]) -> Iterator[Floats]:
    """Wait for the embeddings of texts, (hidden size,) and not normalised; at most MAX_TEXTS are in the queue at once.

    Further requests are taken while the engine computes, so that its steps are full; embeddings come in order.

    Raises as `Engine.submit` does, and RequestFailed if a text could not be computed, which ends the others.
    """
    waiting = iter(requests)
    started: deque[tuple[Ticket, queue.SimpleQueue[TokenEvent], Future[None]]] = deque()
    try:
        while True:
            while len(started) <= MAX_TEXTS - TEXTS_AT_ONCE:
                taken = list(islice(waiting, TEXTS_AT_ONCE))
                if not taken:
                    break
                ended: list[queue.SimpleQueue[TokenEvent]] = [queue.SimpleQueue() for _ in taken]
                tickets = [engine.open(request, own.put) for request, own in zip(taken, ended, strict=True)]
                accepted = engine.begin_all(tickets, waits_for_room=True)
                started += [(ticket, own, accepted) for ticket, own in zip(tickets, ended, strict=True)]
            if not started:
                return
            _, own, accepted = started[0]
            accepted.result()
            vector = read_embedding(own.get())
            started.popleft()
            yield vector
    finally:
        for ticket, _, _ in started:
            ticket.cancel()


def forward_to(stream: AnswerStream) -> Callable[[TokenEvent], None]:
    """Return a receiver for the engine that does not keep the stream alive: a dropped stream cancels itself."""
    reference = weakref.ref(stream)

    def receive(event: TokenEvent) -> None:
        target = reference()
        if target is not None:
            target.receive(event)

    return receive


@frozen
class ToolCall:
    """A tool's name and the arguments to call it with."""

    id: str
    name: str
    arguments: str  # the JSON text of an object, cut short if the answer was


@frozen
class Completion:
    """One answer that has ended."""

    text: str  # ends before the stop string
    finish_reason: FinishReason
    usage: Usage
    token_ids: tuple[int, ...] = ()  # all that were generated, with the end token and those of a stop string
    tokens: tuple[TokenInfo, ...] = ()  # with log-probabilities, if they were asked for
    stop: str | None = None  # the stop string that ended it
    error: str | None = None  # set if `finish_reason` is ERROR or DEADLINE
    others: tuple[Completion, ...] = ()  # the other answers to the prompt, if this is the first of several
    reasoning: str = ""  # the thoughts before the text
    tool_calls: tuple[ToolCall, ...] = ()
    timings: Timings | None = field(default=None, compare=False)  # None if the engine did not end it

    @property
    def choices(self) -> tuple[Completion, ...]:
        """Return all answers to the prompt, in order."""
        return (replace(self, others=()), *self.others)


@dataclass(slots=True)
class Section:
    """A piece of an answer: a text, a thought, or one call of a tool. Sections follow one another."""

    kind: Literal["text", "thought", "call"]
    place: int  # among the sections of the answer
    call: int | None = None  # the number of the call among those of the answer
    id: str = ""  # of the call
    name: str = ""  # of the tool that is called
    texts: list[str] = field(default_factory=list)  # pieces of the text, the thought, or the call's arguments as JSON
    tokens: list[TokenInfo] = field(default_factory=list)  # with log-probabilities, if they were asked for

    @property
    def text(self) -> str:
        """The text of the section so far; of a call, its arguments as JSON."""
        return "".join(self.texts)


class Change(NamedTuple):
    """The change that an event makes in an answer: it may end a section, and adds to one, which may begin with it."""

    closed: Section | None = None  # the section that ends before this event, or with the answer
    grown: Section | None = None  # the section that the event belongs to; None for progress and for the end
    opens: bool = False  # `grown` begins with this event
    text: str = ""  # added to `grown`


@dataclass(slots=True)
class AnswerFold:
    """Adds up the events of one answer while it grows."""

    prompt_tokens: int = 0
    started_s: float = field(default_factory=monotonic)  # by this process's clock, as `first_s`
    first_s: float | None = None  # when the first token came
    cached_tokens: int = 0  # of the prompt, once the progress tells it
    sections: list[Section] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    tokens: list[TokenInfo] = field(default_factory=list)
    thought_tokens: int = 0
    finish: Finish | None = None

    def add(self, event: Event) -> Change:
        """Take the next event of this answer; returns the change that it makes."""
        match event:
            case PromptProgress():
                self.cached_tokens = event.cached_tokens
                return Change()
            case Finish():
                self.finish = event
                return Change(self.sections[-1] if self.sections else None)
            case ToolCallDelta():
                change = self._grow(event, "call", event.arguments, event.call)
                if change.opens:
                    self.sections[-1].id, self.sections[-1].name = event.id or "", event.name or ""
                return change
            case ReasoningDelta():
                self.thought_tokens += len(event.token_ids)
                return self._grow(event, "thought", event.text)
            case TextDelta():
                return self._grow(event, "text", event.text)

    def _grow(
        self,
        event: TextDelta | ReasoningDelta | ToolCallDelta,
        kind: Literal["text", "thought", "call"],
        text: str,
        call: int | None = None,
    ) -> Change:
        if self.first_s is None:
            self.first_s = monotonic()
        self.token_ids += event.token_ids
        self.tokens += event.tokens
        last = self.sections[-1] if self.sections else None
        opens = last is None or (last.kind, last.call) != (kind, call)
        if opens:
            self.sections.append(Section(kind, len(self.sections), call))
        section = self.sections[-1]
        section.texts.append(text)
        section.tokens += event.tokens
        return Change(last if opens else None, section, opens, text)

    @property
    def text(self) -> str:
        """The text so far, without thoughts and calls."""
        return "".join(section.text for section in self.sections if section.kind == "text")

    @property
    def thought(self) -> str:
        """The thoughts so far."""
        return "".join(section.text for section in self.sections if section.kind == "thought")

    @property
    def text_tokens(self) -> list[TokenInfo]:
        """The tokens of the text, if log-probabilities were asked for."""
        return [token for section in self.sections if section.kind == "text" for token in section.tokens]

    @property
    def calls(self) -> list[Section]:
        """The calls of tools so far, in order."""
        return [section for section in self.sections if section.kind == "call"]

    @property
    def ended(self) -> Finish:
        """The end of the answer; raises ValueError before it has ended."""
        if self.finish is None:
            raise ValueError("the events end without a Finish")
        return self.finish

    @property
    def usage(self) -> Usage:
        """The token counts at the end, or so far."""
        if self.finish is not None:
            return self.finish.usage
        return Usage(self.prompt_tokens, len(self.token_ids), self.cached_tokens, self.thought_tokens)

    @property
    def generated_tokens(self) -> int:
        """The number of tokens of the answer so far."""
        return len(self.token_ids)

    def read_clock(self) -> Timings:
        """Return the times of an unfinished answer, by this process's clock."""
        return _time(self.started_s, self.first_s)

    def complete(self) -> Completion:
        """Return the finished answer; raises ValueError if it has not ended."""
        finish = self.ended
        return Completion(
            self.text,
            finish.reason,
            finish.usage,
            tuple(self.token_ids),
            tuple(self.tokens),
            finish.stop,
            finish.error,
            reasoning=self.thought,
            tool_calls=tuple(ToolCall(section.id, section.name, section.text) for section in self.calls),
            timings=finish.timings,
        )


class ReplyFold:
    """Adds up all answers to the prompts of a request; those to prompt i have the indices from i * `answers` on."""

    def __init__(self, prompt_tokens: Sequence[int], answers: int = 1) -> None:
        """`prompt_tokens` has the length of each prompt; each gets `answers` answers."""
        self.prompt_tokens = sum(prompt_tokens)
        self.answers_each = answers
        self.answers = [AnswerFold(tokens) for tokens in prompt_tokens for _ in range(answers)]

    def add(self, event: Event) -> Change:
        """Take the next event of the answer that it names."""
        return self.answers[event.index].add(event)

    def add_all(self, events: Iterable[Event]) -> None:
        """Take all events, one by one."""
        for event in events:
            self.add(event)

    @property
    def generated_tokens(self) -> int:
        """The number of tokens of all answers so far."""
        return sum(answer.generated_tokens for answer in self.answers)

    @property
    def ended_tokens(self) -> int:
        """The number of tokens of the answers that have ended."""
        return sum(finish.usage.completion_tokens for finish in self._finishes)

    @property
    def cached_tokens(self) -> int:
        """The number of prompt tokens from the cache; of a prompt's answers, the one that found the most counts."""
        return sum(
            max(answer.usage.cached_tokens for answer in self.answers[start : start + self.answers_each])
            for start in range(0, len(self.answers), self.answers_each)
        )

    @property
    def thought_tokens(self) -> int:
        """The number of tokens of thoughts."""
        return sum(answer.thought_tokens for answer in self.answers)

    @property
    def timings(self) -> Timings | None:
        """The times of the slowest answer that has ended, drafts of all; None if the engine measured none."""
        measured = [finish.timings for finish in self._finishes if finish.timings is not None]
        if not measured:
            return None
        return Timings(
            queue_s=max(timings.queue_s for timings in measured),
            prompt_s=max(timings.prompt_s for timings in measured),
            generate_s=max(timings.generate_s for timings in measured),
            drafted_tokens=sum(timings.drafted_tokens for timings in measured),
            accepted_tokens=sum(timings.accepted_tokens for timings in measured),
            expected_tokens=sum(timings.expected_tokens for timings in measured),
            missed_tokens=sum(timings.missed_tokens for timings in measured),
        )

    def read_clock(self) -> Timings:
        """Return the times of unfinished answers, by this process's clock."""
        begun = [answer.first_s for answer in self.answers if answer.first_s is not None]
        return _time(self.answers[0].started_s, min(begun, default=None))

    @property
    def _finishes(self) -> list[Finish]:
        return [answer.finish for answer in self.answers if answer.finish is not None]


def fold_events(events: Iterable[Event]) -> Completion:
    """Add up the events of one prompt's answers; raises ValueError if one of them does not end with a Finish."""
    answers: defaultdict[int, AnswerFold] = defaultdict(AnswerFold)
    for event in events:
        answers[event.index].add(event)
    if not answers:
        raise ValueError("the events end without a Finish")
    first, *others = [answers[index].complete() for index in sorted(answers)]
    return replace(first, others=tuple(others))


def _time(started_s: float, first_s: float | None) -> Timings:
    now = monotonic()
    begun_s = now if first_s is None else first_s
    return Timings(0.0, begun_s - started_s, now - begun_s)
