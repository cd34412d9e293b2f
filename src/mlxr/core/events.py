"""What one answer tells its caller while it grows: pieces of text, thought and tool calls, then exactly one finish.

A plain reply is the fold of these events; streaming forwards them. Where several answers to one prompt grow, `index`
tells them apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from mlxr.core.types import FinishReason, Timings, TokenLogprob, Usage


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """One generated token as reported with logprobs: its own log-probability and the best alternatives."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()

    @property
    def possible(self) -> list[TokenLogprob]:
        """Return the alternatives that no grammar rules out: JSON has a number for their log-probability."""
        return [token for token in self.top if token.logprob > -math.inf]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More text of the answer. `tokens` are those that ended since the last delta (may be empty, may be several)."""

    text: str
    token_ids: tuple[int, ...] = ()
    tokens: tuple[TokenInfo, ...] = ()
    index: int = 0


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what the model thinks before it answers; the fields are those of TextDelta."""

    text: str
    token_ids: tuple[int, ...] = ()
    tokens: tuple[TokenInfo, ...] = ()
    index: int = 0


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of call number `call` of a tool: the first delta carries `id` and `name`, all carry JSON `arguments` text.

    The `arguments` of one call, joined, are one JSON object. Token fields are those of TextDelta.
    """

    call: int
    arguments: str
    id: str | None = None
    name: str | None = None
    token_ids: tuple[int, ...] = ()
    tokens: tuple[TokenInfo, ...] = ()
    index: int = 0


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """How much of the prompt has been read: `read_tokens`, among them `cached_tokens`, after `seconds` of reading it.

    Comes before the answer, where `EngineRequest.reports_progress` asks for it: once for the beginning and once for
    each step that computed a part of the prompt. It brings no tokens of the answer.
    """

    prompt_tokens: int
    cached_tokens: int
    read_tokens: int
    seconds: float = field(default=0.0, compare=False)
    index: int = 0
    token_ids: ClassVar[tuple[int, ...]] = ()
    tokens: ClassVar[tuple[TokenInfo, ...]] = ()


@dataclass(frozen=True, slots=True)
class Finish:
    """The last event of an answer: `error` is set when `reason` is ERROR, `stop` is the stop string that ended it."""

    reason: FinishReason
    usage: Usage
    error: str | None = None
    stop: str | None = None
    index: int = 0
    timings: Timings | None = field(default=None, compare=False)


Event = PromptProgress | TextDelta | ReasoningDelta | ToolCallDelta | Finish
