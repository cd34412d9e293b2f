"""Plain values that travel between the packages: requests, events of answers as they grow, and counts of finished ones.

No arrays, no text processing; every value checks itself when it is made.
"""

from __future__ import annotations

import math
import re
from dataclasses import field
from enum import StrEnum
from typing import ClassVar, Literal, Self

from mlxr.core.frozen import frozen
from mlxr.core.sampling import MAX_ANSWERS as MAX_ANSWERS
from mlxr.core.sampling import MAX_INT as MAX_INT
from mlxr.core.sampling import MAX_SEED as MAX_SEED
from mlxr.core.sampling import MAX_STOP_STRINGS as MAX_STOP_STRINGS
from mlxr.core.sampling import MAX_TOP_LOGPROBS as MAX_TOP_LOGPROBS
from mlxr.core.sampling import PARAMETERS as PARAMETERS
from mlxr.core.sampling import SamplingParams as SamplingParams


class FinishReason(StrEnum):
    """The reason why an answer ended."""

    STOP = "stop"  # an end token or a stop string
    LENGTH = "length"  # max_tokens, or the end of the context
    TOOL_CALLS = "tool_calls"  # the answer is calls of tools, complete
    CANCELLED = "cancelled"
    DEADLINE = "deadline"  # the time that the request allowed was over
    ERROR = "error"


@frozen
class TokenLogprob:
    """Natural log-probability of one token, before temperature and truncation."""

    token_id: int
    logprob: float


@frozen
class Usage:
    """Token counts of one answer; `cached_tokens` of the prompt came from the cache, `reasoning_tokens` of the answer
    belong to thoughts and their tags.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0


@frozen
class Timings:
    """Seconds of one answer: in the queue, from there to its first token, and from the first token to the last.

    Of the `drafted_tokens`, `accepted_tokens` became part of the answer; see `docs/drafts.md`. Of the tokens in the
    request's `prediction`, the answer has `expected_tokens`, and lacks `missed_tokens`.
    """

    queue_s: float
    prompt_s: float
    generate_s: float
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    expected_tokens: int = 0
    missed_tokens: int = 0


@frozen
class TokenInfo:
    """One generated token as reported with logprobs: its own log-probability and the best alternatives."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()

    @property
    def possible(self) -> list[TokenLogprob]:
        """Return the alternatives that no grammar rules out: only their log-probabilities are numbers in JSON."""
        return [token for token in self.top if token.logprob > -math.inf]


@frozen
class TextDelta:
    """More text of the answer. `tokens` are those completed since the last delta, none, one or several."""

    text: str
    token_ids: tuple[int, ...] = ()
    tokens: tuple[TokenInfo, ...] = ()
    index: int = 0


@frozen
class ReasoningDelta:
    """More of the model's thought before it answers; the fields are those of TextDelta."""

    text: str
    token_ids: tuple[int, ...] = ()
    tokens: tuple[TokenInfo, ...] = ()
    index: int = 0


@frozen
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


@frozen
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


@frozen
class Finish:
    """The last event of an answer: `error` is set when `reason` is ERROR, `stop` is the stop string that ended it."""

    reason: FinishReason
    usage: Usage
    error: str | None = None
    stop: str | None = None
    index: int = 0
    timings: Timings | None = field(default=None, compare=False)


Event = PromptProgress | TextDelta | ReasoningDelta | ToolCallDelta | Finish


@frozen
class DraftOptions:
    """Options of speculative decoding: the next tokens of an answer are drafted, which changes none of them."""

    tokens: int | None = None  # most that are drafted at a time; 0: none; None: as many as pay
    prediction: str = ""  # a text that the answer is likely to repeat in long parts: drafts are taken from it


AUTO_DRAFTS = DraftOptions()


@frozen
class Grammar:
    """The form of an answer. `text` is the JSON schema, the regular expression or the grammar in GBNF or Lark.

    For `json_object` (any JSON object) `text` is empty. `field` is its name in the request, for errors.
    """

    kind: Literal["json_object", "json_schema", "regex", "lark", "gbnf"]
    text: str = ""
    field: str = field(default="grammar", compare=False)


_TOWER_TYPES = ("f16", "bf16", "q8_0", "f32")


def is_tower_file(name: str) -> bool:
    """Return True if the name is that of a GGUF model's tower (`mmproj`), not of a model."""
    return "mmproj" in name.lower() and name.lower().endswith(".gguf")


def rank_tower_file(name: str) -> tuple[int, str]:
    """Return a sort key for several towers of a model, from the type in their names: take the least."""
    name = name.lower()
    found = [rank for rank, word in enumerate(_TOWER_TYPES) if re.search(rf"(?<![a-z0-9]){word}(?![a-z0-9])", name)]
    return (found[0] if found else len(_TOWER_TYPES)), name


class Closes:
    """A base of objects that a `with` block closes at its end."""

    __slots__ = ()

    def close(self) -> None:
        """Release the resources of the object."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
