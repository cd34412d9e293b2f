"""What one answer tells its caller while it grows: text pieces, then exactly one finish.

A plain reply is the fold of these events; streaming forwards them. Where several answers to one prompt grow, `index`
tells them apart.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlxr.core.types import FinishReason, TokenLogprob, Usage


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """One generated token as reported with logprobs: its own log-probability and the best alternatives."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More text of the answer. `tokens` are those that ended since the last delta (may be empty, may be several)."""

    text: str
    token_ids: tuple[int, ...] = ()
    tokens: tuple[TokenInfo, ...] = ()
    index: int = 0


@dataclass(frozen=True, slots=True)
class Finish:
    """The last event of an answer: `error` is set when `reason` is ERROR, `stop` is the stop string that ended it."""

    reason: FinishReason
    usage: Usage
    error: str | None = None
    stop: str | None = None
    index: int = 0


Event = TextDelta | Finish
