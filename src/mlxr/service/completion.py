"""A whole answer, as the fold of its events. Knows nothing of how the events came about."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from mlxr.core.events import Event, Finish, ReasoningDelta, TextDelta, TokenInfo, ToolCallDelta
from mlxr.core.types import FinishReason, Timings, Usage


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool; `arguments` is the JSON text of an object, cut short if the answer was."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished answer.

    `reasoning` is what the model thought before `text`, `tool_calls` the tools that it wants to be called.
    `token_ids` are all tokens generated, the end token and those of a stop string included, so their number is
    `usage.completion_tokens`; `text` ends before the stop string, which `stop` names. `tokens` carries
    log-probabilities when they were asked for. `error` is set when `finish_reason` is ERROR or DEADLINE. Where several
    answers to one prompt were asked for, this is the first of them and `others` are the rest; `choices` is all.
    `timings` is None when it was not the engine that ended the answer.
    """

    text: str
    finish_reason: FinishReason
    usage: Usage
    token_ids: tuple[int, ...] = ()
    tokens: tuple[TokenInfo, ...] = ()
    stop: str | None = None
    error: str | None = None
    others: tuple[Completion, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    timings: Timings | None = field(default=None, compare=False)

    @property
    def choices(self) -> tuple[Completion, ...]:
        """All answers to the prompt, in order."""
        return (replace(self, others=()), *self.others)


@dataclass(slots=True)
class _Parts:
    """What has come of one answer."""

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: dict[int, ToolCall] = field(default_factory=dict)
    token_ids: list[int] = field(default_factory=list)
    tokens: list[TokenInfo] = field(default_factory=list)
    completion: Completion | None = None

    def add(self, event: Event) -> None:
        match event:
            case TextDelta():
                self.texts.append(event.text)
            case ReasoningDelta():
                self.thoughts.append(event.text)
            case ToolCallDelta():
                call = self.calls.get(event.call) or ToolCall(event.id or "", event.name or "", "")
                self.calls[event.call] = replace(call, arguments=call.arguments + event.arguments)
            case Finish():
                self.completion = self._finish(event)
                return
        self.token_ids.extend(event.token_ids)
        self.tokens.extend(event.tokens)

    def _finish(self, event: Finish) -> Completion:
        return Completion(
            "".join(self.texts),
            event.reason,
            event.usage,
            tuple(self.token_ids),
            tuple(self.tokens),
            event.stop,
            event.error,
            reasoning="".join(self.thoughts),
            tool_calls=tuple(self.calls[number] for number in sorted(self.calls)),
            timings=event.timings,
        )


def fold_events(events: Iterable[Event]) -> Completion:
    """Add up the events of one prompt's answers; raises ValueError when one of them does not end with a Finish."""
    parts: dict[int, _Parts] = {}
    for event in events:
        parts.setdefault(event.index, _Parts()).add(event)
    completions = [parts[index].completion for index in sorted(parts)]
    whole = [completion for completion in completions if completion is not None]
    if not whole or len(whole) < len(completions):
        raise ValueError("the events end without a Finish")
    return replace(whole[0], others=tuple(whole[1:]))
