"""Answers that grow together on one engine: text in, events out.

Every answer is a stream of events, and a plain reply is the fold of that stream. Whoever needs the next event of any
stream steps the engine; events of the other answers wait in their own queues, so several streams, also from several
threads, share one ragged batch. Knows no HTTP and no terminal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING

from mlxr.core.errors import InvalidRequest, QueueFull, RequestFailed
from mlxr.core.events import Event, Finish
from mlxr.core.types import FinishReason, SamplingParams
from mlxr.engine.engine import Engine
from mlxr.engine.pooling import Floats, Pooling
from mlxr.engine.request import EngineRequest
from mlxr.engine.sequence import TokenEvent
from mlxr.engine.stats import EngineStats
from mlxr.service.adapters import AdapterChoice, Adapters
from mlxr.service.answer import Answer
from mlxr.service.completion import Completion, fold_events
from mlxr.service.preparation import Preparation, Prepared
from mlxr.service.prompt import Message, Prompt
from mlxr.service.requests import ChatRequest, TextRequest
from mlxr.service.thought_budget import Thinking, ThoughtEnd
from mlxr.tokenizers import ChatTemplate, Tokenizer

if TYPE_CHECKING:
    from mlxr.service.grammar_library import NativeHost


@dataclass(slots=True)
class _Open:
    """The answers to one prompt by index, their events that nobody has fetched yet, and how many Finish are to come."""

    answers: list[Answer]
    unfetched: int
    events: deque[Event] = field(default_factory=deque)

    @property
    def finished(self) -> bool:
        return all(answer.finished for answer in self.answers)

    def abort(self, reason: FinishReason, error: str | None = None) -> None:
        """End all answers that still grow."""
        for answer in self.answers:
            if not answer.finished:
                self.events.extend(answer.abort(reason, error))

    def take_event(self) -> Event:
        event = self.events.popleft()
        self.unfetched -= isinstance(event, Finish)
        return event


MAX_TEXTS = 64  # that one call has in the queue at a time


def _read_vector(event: TokenEvent) -> Floats:
    if event.embedding is None:
        raise RequestFailed(str(event.finish_reason), event.error or "the request was cancelled")
    return event.embedding


class Session:
    """Texts and conversations on one engine. Thread-safe: one step runs at a time."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        *,
        vocab_size: int,
        model_name: str,
        system: str | None = None,
        host: NativeHost | None = None,
        adapters: Adapters | None = None,
        adapter: str | None = None,
        thinking: Thinking = Thinking(),  # noqa: B008 - a constant
    ) -> None:
        self._engine = engine
        self._preparation = Preparation(
            tokenizer,
            template,
            vocab_size=vocab_size,
            context_tokens=engine.context_tokens,
            model_name=model_name,
            system=system,
            host=host,
            adapters=adapters,
            adapter=adapter,
            thinking=thinking,
        )
        self._open: dict[int, _Open] = {}
        self._unwanted: deque[tuple[int, bool]] = deque()  # answers to end at the next call; whether to forget them
        self._expected: set[int] = set()  # texts that somebody waits for
        self._embedded: dict[int, TokenEvent] = {}
        self._lock = Lock()

    @property
    def can_chat(self) -> bool:
        """Whether the model came with a chat template."""
        return self._preparation.can_chat

    @property
    def context_tokens(self) -> int:
        """How many tokens a prompt and its answer may have together."""
        return self._engine.context_tokens

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """Token ids of plain text (special tokens in it count as such) or of ready ids; raises InvalidRequest."""
        return self._preparation.encode_prompt(prompt)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation; TemplateError without a chat template, InvalidRequest for bad messages."""
        return self._preparation.encode_chat(ChatRequest(messages, SamplingParams()))

    def stream(self, token_ids: Sequence[int], params: SamplingParams, adapter: AdapterChoice | None = None) -> Stream:
        """Start the answers to one prompt. They are refused here and now, or their events follow.

        Raises InvalidRequest, OutOfPages, or QueueFull when too many prompts wait already.
        """
        prepared = self._preparation.bound_text(self._preparation.prepare_tokens(token_ids, params))
        asked = replace(prepared.request, adapter=self._preparation.find_adapter(adapter))
        return self._submit(replace(prepared, request=asked))

    def start(self, request: TextRequest | ChatRequest) -> Stream:
        """Start the answers to a request; as `stream`, and TemplateError."""
        return self._submit(self._preparation.prepare(request))

    def _submit(self, prepared: Prepared) -> Stream:
        with self._lock:
            self._end_unwanted()
            sequence_id = self._engine.submit(prepared.request)
            self._open[sequence_id] = _Open(prepared.answers, len(prepared.answers))
        return Stream(self, sequence_id, len(prepared.answers), prepared.thought_end)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        adapters: Sequence[AdapterChoice | None] | None = None,
    ) -> list[Completion]:
        """Whole answers to several prompts, computed in one ragged batch, in the order of the prompts.

        When one prompt is refused, the others are cancelled. Prompts beyond what may wait are held back until there is
        room. Raises ValueError unless there is one `params` per prompt.
        """
        streams: list[Stream] = []
        try:
            names = adapters or [None] * len(prompts)
            for token_ids, own, name in zip(prompts, params, names, strict=True):
                streams.append(self._stream_when_room(token_ids, own, name))
            return [fold_events(stream) for stream in streams]
        finally:
            for stream in streams:
                stream.close()

    def _stream_when_room(
        self, token_ids: Sequence[int], params: SamplingParams, adapter: AdapterChoice | None
    ) -> Stream:
        while True:
            try:
                return self.stream(token_ids, params, adapter)
            except QueueFull:
                with self._lock:
                    if self._engine.has_work:  # others may have made room meanwhile
                        self._step()

    def embed(self, texts: Sequence[Sequence[int]], pooling: Pooling) -> list[Floats]:
        """One vector (hidden size,) for each text of token ids, not normalised, computed in the same batches.

        Raises as `Engine.submit` does, and RequestFailed for a text that could not be computed.
        """
        waiting, vectors = deque(enumerate(texts)), dict[int, Floats]()
        places: dict[int, int] = {}
        try:
            while waiting or places:
                with self._lock:
                    while waiting and len(places) < MAX_TEXTS:
                        place, token_ids = waiting.popleft()
                        places[self._engine.submit(EngineRequest(token_ids, pooling=pooling))] = place
                    for number in [number for number in places if number in self._embedded]:
                        vectors[places.pop(number)] = _read_vector(self._embedded.pop(number))
                    if places:
                        self._expected |= places.keys()
                        self._step()
        finally:
            with self._lock:
                self._expected -= places.keys()
                for number in places:
                    self._engine.cancel(number)
                    self._embedded.pop(number, None)
        return [vectors[place] for place in range(len(texts))]

    def stats(self) -> EngineStats:
        """The engine's counts at this moment, after requests that nobody waits for have been ended."""
        with self._lock:
            self._end_unwanted()
            return self._engine.stats()

    def close(self) -> None:
        """End all answers and close the engine; streams that are left find their last events here."""
        with self._lock:
            self._end_unwanted()
            for sequence_id, entry in self._open.items():
                if not entry.finished:
                    self._engine.cancel(sequence_id)
                    entry.abort(FinishReason.CANCELLED)
            self._engine.close()

    def next_event(self, sequence_id: int) -> Event:
        """The next event of one answer; steps the engine until there is one. Raises InvalidRequest for unknown ids."""
        while True:
            with self._lock:
                self._end_unwanted()
                entry = self._open.get(sequence_id)
                if entry is None:
                    raise InvalidRequest("sequence_id", f"there is no answer {sequence_id} under way")
                if entry.events:
                    event = entry.take_event()
                    if not entry.unfetched:
                        del self._open[sequence_id]
                    return event
                self._step()

    def cancel(self, sequence_id: int, *, forget: bool = False) -> None:
        """Stop an answer and give its pages back.

        The text held back and a Finish(CANCELLED) end its events, unless nobody wants them any more (`forget`).
        """
        self.cancel_soon(sequence_id, forget=forget)
        with self._lock:
            self._end_unwanted()

    def cancel_soon(self, sequence_id: int, *, forget: bool = False) -> None:
        """`cancel` before the next step. Takes no lock, so it is fit for signal handlers and finalisers."""
        self._unwanted.append((sequence_id, forget))

    def _step(self) -> None:
        """One engine step; its token events become events of their answers. A failing engine ends all answers."""
        try:
            if not self._engine.has_work:
                raise RuntimeError("an answer has not ended, but the engine has nothing to do")
            for event in self._engine.step():
                if event.sequence_id in self._expected:
                    self._expected.discard(event.sequence_id)
                    self._embedded[event.sequence_id] = event
                entry = self._open.get(event.sequence_id)
                if entry is not None and not entry.answers[event.index].finished:
                    self._deliver(entry, event)
        except BaseException as error:
            self._abort_all(error)
            raise

    def _deliver(self, entry: _Open, event: TokenEvent) -> None:
        answer = entry.answers[event.index]
        entry.events.extend(answer.push(event))
        if answer.is_over and not answer.finished:  # the engine does not know yet
            for last in self._engine.cancel(event.sequence_id, event.index):
                entry.events.extend(answer.push(last))

    def _end_unwanted(self) -> None:
        while self._unwanted:
            sequence_id, forget = self._unwanted.popleft()
            entry = self._open.get(sequence_id)
            if entry is not None and not entry.finished:
                self._engine.cancel(sequence_id)
                entry.abort(FinishReason.CANCELLED)
            if forget:
                self._open.pop(sequence_id, None)

    def _abort_all(self, error: BaseException) -> None:
        """End every answer: as cancelled when the user interrupted the step, as failed otherwise."""
        interrupted = isinstance(error, KeyboardInterrupt)
        reason = FinishReason.CANCELLED if interrupted else FinishReason.ERROR
        for sequence_id, entry in self._open.items():
            if not entry.finished:
                self._engine.cancel(sequence_id)
                entry.abort(reason, None if interrupted else str(error))


class Stream:
    """The events of the answers to one prompt, as an iterator that ends after the last Finish.

    Closing it early cancels what still grows.
    """

    def __init__(self, session: Session, sequence_id: int, answers: int, thought_end: ThoughtEnd | None = None) -> None:
        self._session = session
        self._thought_end = thought_end
        self._sequence_id = sequence_id
        self._growing = answers

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        if not self._growing:
            raise StopIteration
        event = self._session.next_event(self._sequence_id)
        self._growing -= isinstance(event, Finish)
        return event

    def cancel(self) -> None:
        """Stop the answer before the next step; its last events, a Finish(CANCELLED) at the end, can still be fetched.

        May be called from a signal handler.
        """
        self._session.cancel_soon(self._sequence_id)

    def end_thinking(self) -> None:
        """Close the thought that the model is in, and let it answer; nothing happens where it does not think.

        May be called from any thread.
        """
        if self._thought_end is not None:
            self._thought_end.end()

    def close(self) -> None:
        """Stop the answer, if it still grows, and forget it."""
        if self._growing:
            self._growing = 0
            self._session.cancel(self._sequence_id, forget=True)

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if self._growing:
            self._session.cancel_soon(self._sequence_id, forget=True)
