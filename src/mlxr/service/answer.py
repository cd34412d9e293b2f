"""One growing answer: the engine's tokens in, events out.

Knows the tokenizer's detokenizer, the parser of the conversation's format and stop strings; not the engine, nor other
answers. Each token event gives zero or more events; the last one of an answer is a Finish.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import field, replace
from types import MappingProxyType

from mlxr.core.frozen import frozen
from mlxr.core.types import (
    Event,
    Finish,
    FinishReason,
    ReasoningDelta,
    SamplingParams,
    TextDelta,
    Timings,
    TokenInfo,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)
from mlxr.engine.sequence import TokenEvent
from mlxr.service.reasoning import ReasoningSplitter, Thought, hold_back
from mlxr.service.tools import CallParser, CallPiece
from mlxr.service.tools.format import Piece, make_call_id
from mlxr.tokenizers import Detokenizer


class StopScanner:
    """Holds back text that could begin one of `stops` until the next pieces decide."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Add a piece; returns the text that is now certain, and the stop string found (then nothing may follow)."""
        if not self.stops:
            return text, None
        buffer = self._held + text
        found = self._find_first(buffer)
        if found is not None:
            start, stop = found
            self._held = ""
            return buffer[:start], stop
        keep = self._undecided_length(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep], None

    def flush(self) -> str:
        """Return the text still held back; called once, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _find_first(self, buffer: str) -> tuple[int, str] | None:
        """Start and text of the stop string that is complete first."""
        hits = [(start + len(stop), start, stop) for stop in self.stops if (start := buffer.find(stop)) >= 0]
        if not hits:
            return None
        _, start, stop = min(hits)
        return start, stop

    def _undecided_length(self, buffer: str) -> int:
        """Return the length of the longest end of `buffer` that is the beginning of a stop string."""
        longest = max((len(stop) for stop in self.stops), default=1) - 1
        for length in range(min(longest, len(buffer)), 0, -1):
            end = buffer[len(buffer) - length :]
            if any(stop.startswith(end) for stop in self.stops):
                return length
        return 0


# Command R7B and Command A write these around an answer. Their files do not say that they are control tokens.
WRAPPERS = ("<|START_RESPONSE|>", "<|END_RESPONSE|>")

MAX_REPEATS = 2  # repeated calls in a row


class OutputParser:
    """Takes the reasoning out of the text, then the calls out of the rest, and leaves out the strings in `dropped`.

    With `drops_repeats` each call comes once.
    """

    def __init__(
        self,
        reasoning: ReasoningSplitter | None,
        calls: CallParser | None,
        dropped: Sequence[str] = (),
        *,
        drops_repeats: bool = False,
    ) -> None:
        self._reasoning, self._calls, self._dropped = reasoning, calls, dropped
        self._sieve = _RepeatSieve() if drops_repeats else None
        self._held = ""  # may become one of `dropped`

    @property
    def has_calls(self) -> bool:
        """True if a call is complete."""
        return self._calls is not None and self._calls.calls > 0

    @property
    def is_over(self) -> bool:
        """True if any further text is ignored."""
        has_looped = self._sieve is not None and self._sieve.is_over
        return has_looped or (self._calls is not None and self._calls.is_over)

    def push(self, text: str) -> list[Piece]:
        """Add a piece of text; returns the pieces that are now certain."""
        return self._read([text] if self._reasoning is None else self._reasoning.push(text))

    def flush(self) -> list[Piece]:
        """Return the pieces still held back; called once, when no more text comes."""
        pieces = [] if self._reasoning is None else self._read(self._reasoning.flush())
        self._held, held = "", self._held
        pieces += self._read_text(held)
        if self._calls is None:
            return pieces
        pieces += self._sift(self._calls, self._calls.flush())
        return pieces

    def _read(self, parts: list[Thought | str]) -> list[Piece]:
        pieces: list[Piece] = []
        for part in parts:
            pieces += [part] if isinstance(part, Thought) else self._read_text(self._drop(part))
        return pieces

    def _read_text(self, text: str) -> list[Piece]:
        if self._calls is not None:
            return self._sift(self._calls, self._calls.push(text))
        return [text] if text else []

    def _sift(self, calls: CallParser, pieces: list[Piece]) -> list[Piece]:
        return pieces if self._sieve is None else self._sieve.push(pieces, calls.calls)

    def _drop(self, text: str) -> str:
        """Return the text without the dropped strings; an end that could become one of them is held back."""
        if not self._dropped:
            return text
        *found, rest = re.split("|".join(map(re.escape, self._dropped)), self._held + text)
        sure = len(rest) - max(hold_back(rest, spelling) for spelling in self._dropped)
        self._held = rest[sure:]
        return "".join(found) + rest[:sure]


class _RepeatSieve:
    """Leaves out calls that are equal to earlier ones of the answer; after a few in a row the answer is over.

    A model that must call and may call again often writes the same call until its tokens run out. A call is held back
    only as long as its text so far is the beginning of an earlier one.
    """

    def __init__(self) -> None:
        self._made: list[tuple[str, str]] = []  # names and arguments
        self._number: int | None = None  # of the call that grows
        self._name = self._arguments = ""
        self._held: list[CallPiece] = []
        self._left_out = self._in_a_row = 0

    @property
    def is_over(self) -> bool:
        """True if the model only repeats itself."""
        return self._in_a_row == MAX_REPEATS

    def push(self, pieces: Sequence[Piece], complete: int) -> list[Piece]:
        """Return the pieces without repetitions; with them `complete` calls of the answer are complete."""
        found: list[Piece] = []
        for piece in pieces:
            if self._number is not None and not (isinstance(piece, CallPiece) and piece.call == self._number):
                self._end_call()
            if self.is_over:
                return found
            found += self._add(piece) if isinstance(piece, CallPiece) else [piece]
        if self._number is not None and self._number < complete:
            self._end_call()
        return found

    def _add(self, piece: CallPiece) -> list[CallPiece]:
        """Add a piece of a call; returns the pieces that can no longer be part of a repetition."""
        if self._number is None:
            self._number, self._name, self._arguments = piece.call, piece.name or "", ""
        self._arguments += piece.arguments
        self._held.append(replace(piece, call=piece.call - self._left_out))
        if any(name == self._name and made.startswith(self._arguments) for name, made in self._made):
            return []
        held, self._held = self._held, []
        return held

    def _end_call(self) -> None:
        """Count the call that has ended; if it is still held back, it is a repetition or the beginning of one."""
        if self._held:
            self._held, self._left_out, self._in_a_row = [], self._left_out + 1, self._in_a_row + 1
        else:
            self._made.append((self._name, self._arguments))
            self._in_a_row = 0
        self._number = None


@frozen
class AnswerFormat:
    """The way in which the answers of one request are read; the default is plain text.

    `open_parser` makes the parser of one answer. `shown_tokens` are control tokens that the parser sees spelt out,
    `make_id` makes the id of a call.
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
        self._last: Piece = ""  # the last piece given out
        self._is_closed = False  # by tokens that were not sampled
        self.finished = False

    @property
    def usage(self) -> Usage:
        """The numbers of tokens of the prompt and of the answer so far, and of those that came from the cache."""
        return Usage(self._prompt_tokens, self._completion_tokens, self._cached_tokens, self._reasoning_tokens)

    def push(self, event: TokenEvent) -> list[Event]:
        """Return the events that follow from one token event. After a Finish the caller pushes nothing more.

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
        """Return True if the answer would be over after these events, so that it needs no other end."""
        if self.is_over or not (self._parser or self._stops.stops):
            return False
        twin = copy(self)
        twin._pending_ids, twin._pending_tokens = [], []
        twin._decoder, twin._parser, twin._stops = self._decoder.fork(), deepcopy(self._parser), copy(self._stops)
        for event in events:
            twin.push(event)
        return twin.is_over

    def _begin(self, event: TokenEvent) -> list[Event]:
        """Return the event of the prompt's echo, once."""
        echo, self._echo = self._echo, None
        return [] if echo is None else [TextDelta(echo, (), event.prompt, self._index)]

    @property
    def is_over(self) -> bool:
        """True if further tokens are ignored, since a stop string or the last call that is allowed came."""
        return self._stop is not None or (self._parser is not None and self._parser.is_over)

    def abort(self, reason: FinishReason, error: str | None = None) -> list[Event]:
        """End the answer from outside (cancelled, or the engine failed); text held back is given out."""
        if self.is_over:
            return self._finish([], FinishReason.STOP, stop=self._stop)
        return self._finish(self._flush(), reason, error=error)

    def fail(self, error: str) -> list[Event]:
        """End the answer after an error of its own; text held back is lost."""
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
        """Append the event of a piece, unless it is empty, with the tokens that ended since the last event."""
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
        if self._pending_ids:  # tokens without text belong to the text before them
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
