"""Events of an answer while it grows: pieces of text, thought and tool calls, then exactly one finish.

A plain reply joins these events; streaming forwards them. If several answers to one prompt grow, `index` is the number
of the answer.
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
        """Return the alternatives that no grammar rules out: only their log-probabilities are numbers in JSON."""
        return [token for token in self.top if token.logprob > -math.inf]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More text of the answer. `tokens` are those completed since the last delta, none, one or several."""

    text: str
    token_ids: tuple[int, ...] = ()
    tokens: tuple[TokenInfo, ...] = ()
    index: int = 0


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the model's thought before it answers; the fields are those of TextDelta."""

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
    """The progress of a prompt: `read_tokens` have been read, `cached_tokens` of them from the cache, in `seconds`.

    Comes before the answer if `EngineRequest.reports_progress` is set: once at the beginning and once for each step
    that computed a part of the prompt. It brings no tokens of the answer.
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
