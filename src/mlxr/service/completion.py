"""A whole answer, as the fold of its events. Knows nothing of how the events came about."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from mlxr.core.events import Event, Finish, TextDelta, TokenInfo
from mlxr.core.types import FinishReason, Usage


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished answer.

    `token_ids` are all tokens generated, the end token and those of a stop string included, so their number is
    `usage.completion_tokens`; `text` ends before the stop string, which `stop` names. `tokens` carries
    log-probabilities when they were asked for. `error` is set when `finish_reason` is ERROR or DEADLINE. Where several
    answers to one prompt were asked for, this is the first of them and `others` are the rest; `choices` is all.
    """

    text: str
    finish_reason: FinishReason
    usage: Usage
    token_ids: tuple[int, ...] = ()
    tokens: tuple[TokenInfo, ...] = ()
    stop: str | None = None
    error: str | None = None
    others: tuple[Completion, ...] = ()

    @property
    def choices(self) -> tuple[Completion, ...]:
        """All answers to the prompt, in order."""
        return (replace(self, others=()), *self.others)


@dataclass(slots=True)
class _Parts:
    """What has come of one answer."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    tokens: list[TokenInfo] = field(default_factory=list)
    completion: Completion | None = None

    def add(self, event: Event) -> None:
        match event:
            case TextDelta():
                self.texts.append(event.text)
                self.token_ids.extend(event.token_ids)
                self.tokens.extend(event.tokens)
            case Finish():
                self.completion = Completion(
                    "".join(self.texts),
                    event.reason,
                    event.usage,
                    tuple(self.token_ids),
                    tuple(self.tokens),
                    event.stop,
                    event.error,
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
