"""The fold of an answer's events: what they add up to, so far and at the end.

Every front door renders this one fold. `AnswerFold` takes the events of one answer and keeps its sections (thoughts,
texts and calls, one after another), its tokens and its counts; `add` tells what an event has changed, which is what a
stream sends. `ReplyFold` holds all answers to a request with their counts together. A `Completion` is one answer that
has ended. Nothing here knows how the events came about, or how a dialect writes them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Literal, NamedTuple

from mlxr.core.events import Event, Finish, PromptProgress, ReasoningDelta, TextDelta, TokenInfo, ToolCallDelta
from mlxr.core.types import FinishReason, Timings, Usage


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Names a tool to call, and what to call it with."""

    id: str
    name: str
    arguments: str  # the JSON text of an object, cut short if the answer was


@dataclass(frozen=True, slots=True)
class Completion:
    """Holds one answer that has ended."""

    text: str  # ends before the stop string
    finish_reason: FinishReason
    usage: Usage
    token_ids: tuple[int, ...] = ()  # all that were generated, the end token and those of a stop string included
    tokens: tuple[TokenInfo, ...] = ()  # with log-probabilities, where they were asked for
    stop: str | None = None  # the stop string that ended it
    error: str | None = None  # set where `finish_reason` is ERROR or DEADLINE
    others: tuple[Completion, ...] = ()  # the other answers to the prompt, where this is the first of several
    reasoning: str = ""  # the thoughts before the text
    tool_calls: tuple[ToolCall, ...] = ()
    timings: Timings | None = field(default=None, compare=False)  # None where it was not the engine that ended it

    @property
    def choices(self) -> tuple[Completion, ...]:
        """Return all answers to the prompt, in order."""
        return (replace(self, others=()), *self.others)


@dataclass(slots=True)
class Section:
    """Holds a piece of an answer: a text, a thought, or one call of a tool. Sections follow one another."""

    kind: Literal["text", "thought", "call"]
    place: int  # among the sections of the answer
    call: int | None = None  # the number of the call among those of the answer
    id: str = ""  # of the call
    name: str = ""  # of the tool that is called
    texts: list[str] = field(default_factory=list)  # pieces of the text, the thought, or the call's arguments as JSON
    tokens: list[TokenInfo] = field(default_factory=list)  # with log-probabilities, where they were asked for

    @property
    def text(self) -> str:
        """Return the text of the section so far; of a call, its arguments as JSON."""
        return "".join(self.texts)


class Change(NamedTuple):
    """Tells what an event changes in an answer: it may end a section, and adds to one, which may begin with it."""

    closed: Section | None = None  # the section that ends before this event, or with the answer
    grown: Section | None = None  # the section that the event belongs to; None for progress and for the end
    opens: bool = False  # `grown` begins with this event
    text: str = ""  # what it adds to `grown`


@dataclass(slots=True)
class AnswerFold:
    """Adds up the events of one answer while it grows."""

    prompt_tokens: int = 0
    started_s: float = field(default_factory=monotonic)  # by this process's clock, as `first_s`
    first_s: float | None = None  # when the first token came
    cached_tokens: int = 0  # of the prompt, where the progress has told it
    sections: list[Section] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    tokens: list[TokenInfo] = field(default_factory=list)
    thought_tokens: int = 0
    finish: Finish | None = None

    def add(self, event: Event) -> Change:
        """Take the next event of this answer; tell what it changes."""
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
        """Return the text so far, without thoughts and calls."""
        return "".join(section.text for section in self.sections if section.kind == "text")

    @property
    def thought(self) -> str:
        """Return the thoughts so far."""
        return "".join(section.text for section in self.sections if section.kind == "thought")

    @property
    def text_tokens(self) -> list[TokenInfo]:
        """Return the tokens of the text, where log-probabilities were asked for."""
        return [token for section in self.sections if section.kind == "text" for token in section.tokens]

    @property
    def calls(self) -> list[Section]:
        """Return the calls of tools so far, in order."""
        return [section for section in self.sections if section.kind == "call"]

    @property
    def ended(self) -> Finish:
        """Return how the answer ended; raise ValueError while it grows."""
        if self.finish is None:
            raise ValueError("the events end without a Finish")
        return self.finish

    @property
    def usage(self) -> Usage:
        """Return the token counts at the end, or so far."""
        if self.finish is not None:
            return self.finish.usage
        return Usage(self.prompt_tokens, len(self.token_ids), self.cached_tokens, self.thought_tokens)

    @property
    def generated_tokens(self) -> int:
        """Count the tokens of the answer so far."""
        return len(self.token_ids)

    def read_clock(self) -> Timings:
        """Return the times of an answer that still grows, as the clock here has them."""
        return _time(self.started_s, self.first_s)

    def complete(self) -> Completion:
        """Return the answer that has ended; raises ValueError for one that has not."""
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
        """Count the tokens of all answers so far."""
        return sum(answer.generated_tokens for answer in self.answers)

    @property
    def ended_tokens(self) -> int:
        """Count the tokens of the answers that have ended."""
        return sum(finish.usage.completion_tokens for finish in self._finishes)

    @property
    def cached_tokens(self) -> int:
        """Count prompt tokens that came from the cache; of a prompt's answers, the one that found the most counts."""
        return sum(
            max(answer.usage.cached_tokens for answer in self.answers[start : start + self.answers_each])
            for start in range(0, len(self.answers), self.answers_each)
        )

    @property
    def thought_tokens(self) -> int:
        """Count the tokens of thoughts."""
        return sum(answer.thought_tokens for answer in self.answers)

    @property
    def timings(self) -> Timings | None:
        """Return the times of the slowest answer that has ended, drafts of all; None where the engine measured none."""
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
        """Return the times of answers that still grow, as the clock here has them."""
        begun = [answer.first_s for answer in self.answers if answer.first_s is not None]
        return _time(self.answers[0].started_s, min(begun, default=None))

    @property
    def _finishes(self) -> list[Finish]:
        return [answer.finish for answer in self.answers if answer.finish is not None]


def fold_events(events: Iterable[Event]) -> Completion:
    """Add up the events of one prompt's answers; raises ValueError when one of them does not end with a Finish."""
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
