"""Plain values that travel between the packages: what a caller asks for and what a finished answer counts.

No arrays, no text processing; every value checks itself when it is made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Literal

from mlxr.core.errors import InvalidRequest

MAX_TOP_LOGPROBS = 128
MAX_STOP_STRINGS = 64
MAX_SEED = 2**64
MAX_ANSWERS = 128


class FinishReason(StrEnum):
    """Says why an answer ended."""

    STOP = "stop"  # an end token or a stop string
    LENGTH = "length"  # max_tokens, or the end of the context
    TOOL_CALLS = "tool_calls"  # the answer is calls of tools, complete
    CANCELLED = "cancelled"
    DEADLINE = "deadline"  # the time that the request allowed was over
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log-probability of one token, before temperature and truncation."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one answer; `cached_tokens` of the prompt came from the cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of one answer: in the queue, from there to its first token, and from the first token to the last."""

    queue_s: float
    prompt_s: float
    generate_s: float


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must look like. `text` is the JSON schema, the regular expression or the Lark grammar.

    For `json_object` (any JSON object) `text` is empty.
    """

    kind: Literal["json_object", "json_schema", "regex", "lark"]
    text: str = ""


def _check_range(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    inside = not math.isnan(value) and value <= high and (value > low if open_low else value >= low)
    if not inside:
        raise InvalidRequest(
            name, f"must be {'above' if open_low else 'at least'} {low} and at most {high}, got {value}"
        )


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when to stop.

    `temperature` 0 is greedy; `top_k` 0, `top_p` 1, `min_p` 0, penalties 1 / 0 / 0 switch each rule off.
    `repetition_penalty` divides (or multiplies, below zero) the logits of every token seen in prompt and answer;
    `presence_penalty` and `frequency_penalty` subtract from tokens of the answer, once or per occurrence.
    `seed` None draws one. `logprobs` None reports none, 0 the chosen token's, n also the n best of each step.
    `max_tokens` None means as far as the context and the arena reach.
    `n` answers are given to the prompt, each from its own random stream; the first is the one that `n` = 1 gives.
    With `best_of` above `n`, that many are computed and the `n` with the highest mean log-probability given, the best
    first. They are ranked as whole answers of the engine, which knows no text, so stop strings are refused then.
    """

    max_tokens: int | None = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    logprobs: int | None = None
    n: int = 1
    best_of: int | None = None

    @property
    def streams(self) -> int:
        """Answers to compute: `best_of`, or `n` without it."""
        return self.n if self.best_of is None else self.best_of

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            raise InvalidRequest("stop", "must be a tuple of strings, got one string")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidRequest("max_tokens", f"must be at least 1, got {self.max_tokens}")
        _check_range("temperature", self.temperature, 0.0, 100.0)
        _check_range("top_k", self.top_k, 0, 2**31 - 1)
        _check_range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _check_range("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _check_range("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        if self.seed is not None and not 0 <= self.seed < MAX_SEED:
            raise InvalidRequest("seed", f"must be from 0 to 2**64 - 1, got {self.seed}")
        if self.logprobs is not None:
            _check_range("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)
        self._check_answers()
        if len(self.stop) > MAX_STOP_STRINGS or any(not text for text in self.stop):
            raise InvalidRequest("stop", f"takes at most {MAX_STOP_STRINGS} strings, none of them empty")
        for token_id, bias in self.logit_bias.items():
            if token_id < 0 or math.isnan(bias):
                raise InvalidRequest("logit_bias", f"token {token_id} with bias {bias} is not a bias")

    def _check_answers(self) -> None:
        _check_range("n", self.n, 1, MAX_ANSWERS)
        _check_range("best_of", self.streams, self.n, MAX_ANSWERS)
        if self.streams > self.n and self.stop:
            raise InvalidRequest("best_of", "cannot rank answers that stop strings cut; use stop_token_ids, or raise n")
