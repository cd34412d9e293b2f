"""One growing answer: the engine's tokens in, events out.

Knows the tokenizer's detokenizer, the parser of the conversation's format and stop strings; not the engine, nor other
answers. Each token event gives zero or more events; the last one of an answer is a Finish.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from mlxr.core.events import Event, Finish, ReasoningDelta, TextDelta, TokenInfo, ToolCallDelta
from mlxr.core.types import FinishReason, SamplingParams, Timings, TokenLogprob, Usage
from mlxr.engine.sequence import TokenEvent
from mlxr.service.output import OutputParser
from mlxr.service.reasoning import Thought
from mlxr.service.stops import StopScanner
from mlxr.service.tools.format import Piece, make_call_id
from mlxr.tokenizers import Detokenizer


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How the answers of one request are read; the default is plain text.

    `open_parser` makes the parser of one answer. `shown_tokens` are control tokens whose spelling the parser is to
    see, `make_id` gives an id to a call.
    """

    open_parser: Callable[[], OutputParser | None] = lambda: None
    shown_tokens: Mapping[int, str] = field(default_factory=lambda: MappingProxyType({}))
    make_id: Callable[[], str] = make_call_id


PLAIN = AnswerFormat()


class Answer:
    """State of one answer between two steps.

    Stop strings are looked for in the text of the answer, not in its reasoning and calls, nor in the `echo` of the
    prompt that it begins with.
    """

    def __init__(
        self,
        decoder: Detokenizer,
        params: SamplingParams,
        prompt_tokens: int,
        stop_tokens: Mapping[int, str],
        index: int = 0,
        format: AnswerFormat = PLAIN,  # noqa: A002 - the word for it
        echo: str | None = None,
    ) -> None:
        self._index = index
        self._echo = echo
        self._decoder = decoder
        self._parser = format.open_parser()
        self._shown_tokens, self._make_id = format.shown_tokens, format.make_id
        self._stops = StopScanner(params.stop)
        self._min_tokens = params.min_tokens  # text of the first ones holds no stop string
        self._stop: str | None = None
        self._stop_tokens = stop_tokens  # stop strings that are special tokens: they never show up as text
        self._wants_logprobs = params.logprobs is not None
        self._prompt_tokens = prompt_tokens
        self._completion_tokens = 0
        self._cached_tokens = self._reasoning_tokens = 0
        self._pending_ids: list[int] = []
        self._pending_tokens: list[TokenInfo] = []
        self._last: Piece = ""  # the kind of what was given out last
        self._is_closed = False  # with tokens that were not drawn
        self.finished = False

    @property
    def usage(self) -> Usage:
        """How many tokens the prompt and the answer have so far, and how many came from the cache."""
        return Usage(self._prompt_tokens, self._completion_tokens, self._cached_tokens, self._reasoning_tokens)

    def push(self, event: TokenEvent) -> list[Event]:
        """Events that follow from one token event. After a Finish the caller pushes nothing more.

        Once the answer `is_over` its request should be cancelled: the Finish comes with the engine's last event.
        """
        if event.progress is not None:
            return [replace(event.progress, index=self._index)]
        if event.withdrawn:
            if self._would_end(event.withdrawn):
                return [told for withdrawn in event.withdrawn for told in self.push(withdrawn)]
            self._is_closed = not self.is_over
        events = self._begin(event)
        if not self.is_over:
            events += self._read(self._take_token(event))
        if event.finish_reason is None:
            return events
        if self.is_over:
            reason = FinishReason.LENGTH if self._is_closed else FinishReason.STOP
            return self._finish(events, reason, stop=self._stop, timings=event.timings)
        events += self._flush()
        stop = self._name_stop_token(event) if self._stop is None else self._stop
        reason = event.finish_reason if self._stop is None else FinishReason.STOP
        return self._finish(events, reason, stop=stop, error=event.error, timings=event.timings)

    def _would_end(self, events: Sequence[TokenEvent]) -> bool:
        """Whether the answer is over with these, so that it needs no other end."""
        if self.is_over or not (self._parser or self._stops.stops):
            return False
        twin = copy(self)
        twin._pending_ids, twin._pending_tokens = [], []
        twin._decoder, twin._parser, twin._stops = self._decoder.fork(), deepcopy(self._parser), copy(self._stops)
        for event in events:
            twin.push(event)
        return twin.is_over

    def _begin(self, event: TokenEvent) -> list[Event]:
        """The echo of the prompt, once."""
        echo, self._echo = self._echo, None
        return [] if echo is None else [TextDelta(echo, (), event.prompt, self._index)]

    @property
    def is_over(self) -> bool:
        """Whether nothing that the engine may add counts any more: a stop string came, or the one call allowed."""
        return self._stop is not None or (self._parser is not None and self._parser.is_over)

    def abort(self, reason: FinishReason, error: str | None = None) -> list[Event]:
        """End the answer from outside (cancelled, or the engine failed); text held back is given out."""
        if self.is_over:
            return self._finish([], FinishReason.STOP, stop=self._stop)
        return self._finish(self._flush(), reason, error=error)

    def fail(self, error: str) -> list[Event]:
        """End the answer after a failure of its own, whatever was held back."""
        return self._finish([], FinishReason.ERROR, error=error)

    def _take_token(self, event: TokenEvent) -> str:
        """Count the event's token; returns its text. A token that ends the answer has none."""
        self._cached_tokens = event.usage.cached_tokens
        if event.token_id is None:
            return ""
        self._completion_tokens += 1
        self._pending_ids.append(event.token_id)
        if self._wants_logprobs and event.logprob is not None:
            self._pending_tokens.append(TokenInfo(TokenLogprob(event.token_id, event.logprob), tuple(event.top)))
        if event.finish_reason is FinishReason.STOP:
            return ""
        if event.token_id in self._shown_tokens:
            return self._decoder.flush() + self._shown_tokens[event.token_id]
        return self._decoder.push(event.token_id)

    def _read(self, text: str) -> list[Event]:
        """Events of more text."""
        if not text:
            return []
        events: list[Event] = []
        for piece in (text,) if self._parser is None else self._parser.push(text):
            self._give(piece, events)
        return events

    def _flush(self) -> list[Event]:
        """Events of all that was held back."""
        events = self._read(self._decoder.flush())
        for piece in () if self._parser is None else self._parser.flush():
            self._give(piece, events)
        if self._stop is None:
            self._emit(self._stops.flush(), events)
        return events

    def _give(self, piece: Piece, events: list[Event]) -> None:
        """Append the events of one piece; nothing follows a stop string."""
        if self._stop is not None:
            return
        if isinstance(piece, str) and self._completion_tokens > self._min_tokens:
            piece, self._stop = self._stops.push(piece)
        elif not isinstance(piece, str):
            self._emit(self._stops.flush(), events)
        self._emit(piece, events)

    def _emit(self, piece: Piece, events: list[Event]) -> None:
        """Append the event of a piece with the tokens that ended since the last one, unless it says nothing."""
        if piece == "" or (isinstance(piece, Thought) and not piece.text and not self._pending_ids):
            return
        ids, tokens = tuple(self._pending_ids), tuple(self._pending_tokens)
        self._pending_ids.clear()
        self._pending_tokens.clear()
        self._last = piece
        if isinstance(piece, str):
            events.append(TextDelta(piece, ids, tokens, self._index))
        elif isinstance(piece, Thought):
            self._reasoning_tokens += len(ids)
            events.append(ReasoningDelta(piece.text, ids, tokens, self._index))
        else:
            call_id = None if piece.name is None else self._make_id()
            events.append(ToolCallDelta(piece.call, piece.arguments, call_id, piece.name, ids, tokens, self._index))

    def _name_stop_token(self, event: TokenEvent) -> str | None:
        if event.finish_reason is not FinishReason.STOP or event.token_id is None:
            return None
        return self._stop_tokens.get(event.token_id)

    def _finish(
        self,
        events: list[Event],
        reason: FinishReason,
        *,
        stop: str | None = None,
        error: str | None = None,
        timings: Timings | None = None,
    ) -> list[Event]:
        self.finished = True
        if self._pending_ids:  # tokens that said nothing count with what was said before them
            events.append(self._make_last())
        if reason is FinishReason.STOP and stop is None and self._parser is not None and self._parser.has_calls:
            reason = FinishReason.TOOL_CALLS
        events.append(Finish(reason, self.usage, error, stop, self._index, timings))
        return events

    def _make_last(self) -> Event:
        ids, tokens = tuple(self._pending_ids), tuple(self._pending_tokens)
        if isinstance(self._last, Thought):
            self._reasoning_tokens += len(ids)
            return ReasoningDelta("", ids, tokens, self._index)
        if isinstance(self._last, str):
            return TextDelta("", ids, tokens, self._index)
        return ToolCallDelta(self._last.call, "", token_ids=ids, tokens=tokens, index=self._index)
