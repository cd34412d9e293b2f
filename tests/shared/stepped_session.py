"""A session that the test itself steps, on one thread: what happens when is the test's choice."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

from mlxr.core.types import Event, Finish
from mlxr.engine.engine import Engine
from mlxr.loading import LoadedModel
from mlxr.service.adapters import Adapters
from mlxr.service.preparation import Preparation, Prepared
from mlxr.service.requests import ChatRequest, TextRequest


class SteppedSession:
    """Requests to an engine that computes while somebody waits for an event."""

    def __init__(self, loaded: LoadedModel, engine: Engine, adapters: Adapters | None = None) -> None:
        self.engine, self._open = engine, dict[int, SteppedStream]()
        self.preparation = Preparation(
            loaded.tokenizer,
            loaded.chat_template,
            vocab_size=loaded.config.vocab_size,
            context_tokens=engine.context_tokens,
            model_name=loaded.name,
            host=loaded.ctx,
            adapters=adapters,
        )

    def start(self, request: TextRequest | ChatRequest, prediction_ids: Sequence[int] = ()) -> SteppedStream:
        """Start the answers to a request; `prediction_ids` take the place of its own prediction."""
        prepared = self.preparation.prepare(request)
        asked = replace(prepared.request, prediction_ids=prediction_ids) if prediction_ids else prepared.request
        number = self.engine.submit(asked)
        self._open[number] = stream = SteppedStream(self, number, prepared)
        return stream

    def step(self) -> None:
        for event in self.engine.step():
            stream = self._open.get(event.sequence_id)
            if stream is None or stream.answers[event.index].finished:
                continue
            answer = stream.answers[event.index]
            stream.events.extend(answer.push(event))
            if answer.is_over and not answer.finished:
                for last in self.engine.cancel(event.sequence_id, event.index):
                    stream.events.extend(answer.push(last))

    def cancel(self, number: int) -> None:
        self._open.pop(number)
        self.engine.cancel(number)

    def close(self) -> None:
        for number in list(self._open):
            self.cancel(number)
        self.engine.close()


class SteppedStream:
    """The events of one request; each step that is needed is made when an event is asked for."""

    def __init__(self, session: SteppedSession, number: int, prepared: Prepared) -> None:
        self._session, self._number = session, number
        self.answers, self.thought_end = prepared.answers, prepared.thought_end
        self.events: deque[Event] = deque()
        self._growing = len(prepared.answers)

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        if not self._growing:
            raise StopIteration
        while not self.events:
            self._session.step()
        event = self.events.popleft()
        self._growing -= isinstance(event, Finish)
        return event

    def close(self) -> None:
        """Cancel what still grows."""
        if self._growing:
            self._growing = 0
            self._session.cancel(self._number)
