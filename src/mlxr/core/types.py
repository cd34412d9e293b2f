"""Plain values that travel between the packages: what a caller asks for and what a finished answer counts.

No arrays, no text processing; every value checks itself when it is made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Literal

from mlxr.core.errors import InvalidRequest
from mlxr.core.parameter import MAX_SEED as MAX_SEED
from mlxr.core.parameter import Parameter, parameter

MAX_TOP_LOGPROBS = 128
MAX_STOP_STRINGS = 64
MAX_INT = 2**31 - 1
SMALLEST_TOP_P = 1e-9  # keeps the likeliest token alone
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
    """What an answer must look like. `text` is the JSON schema, the regular expression or the grammar in GBNF or Lark.

    For `json_object` (any JSON object) `text` is empty. `field` is what the caller calls it; errors name that.
    """

    kind: Literal["json_object", "json_schema", "regex", "lark", "gbnf"]
    text: str = ""
    field: str = field(default="grammar", compare=False)


def _check_count(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidRequest(name, f"must be at least {low} and at most {high}, got {value}")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when to stop: the table of sampling parameters, and what else a request sets.

    `temperature` 0 is greedy; `top_k` 0, `top_p` 1, `min_p` 0, penalties 1 / 0 / 0 switch each rule off.
    `repetition_penalty` divides (or multiplies, below zero) the logits of every token seen in prompt and answer;
    `presence_penalty` and `frequency_penalty` subtract from tokens of the answer, once or per occurrence; all three
    look at the last `repeat_last_n` tokens. `seed` None draws one. `logprobs` None reports none, 0 the chosen token's,
    n also the n best of each step. `max_tokens` None means as far as the context and the arena reach.
    `n` answers are given to the prompt, each from its own random stream; the first is the one that `n` = 1 gives.
    With `best_of` above `n`, that many are computed and the `n` with the highest mean log-probability given, the best
    first. They are ranked as whole answers of the engine, which knows no text, so stop strings are refused then.
    """

    max_tokens: int | None = parameter(
        "int",
        256,
        0,
        MAX_INT,
        "Most tokens of an answer; -1: until the context is full; 0: only the prompt is computed.",
        stands_for={-1: None, -2: None},
        names={
            "openai": "max_completion_tokens",
            "responses": "max_output_tokens",
            "ollama": "num_predict",
            "llamacpp": "n_predict",
            "hub": "max_new_tokens",
        },
    )
    temperature: float = parameter("float", 0.0, 0.0, 100.0, "0 takes the likeliest token, higher is more varied.")
    top_k: int = parameter(
        "int", 0, 0, MAX_INT, "Choose among the k likeliest tokens; 0 or -1 for all.", stands_for={-1: 0}
    )
    top_p: float = parameter(
        "float",
        1.0,
        0.0,
        1.0,
        "Choose among the likeliest tokens that together reach this probability.",
        stands_for={0: SMALLEST_TOP_P},
    )
    min_p: float = parameter("float", 0.0, 0.0, 1.0, "Drop tokens less likely than this times the likeliest.")
    repetition_penalty: float = parameter(
        "float",
        1.0,
        0.0,
        100.0,
        "Above 1: make tokens already seen less likely.",
        open_low=True,
        names={"ollama": "repeat_penalty", "llamacpp": "repeat_penalty"},
    )
    presence_penalty: float = parameter(
        "float", 0.0, -100.0, 100.0, "Subtracted from tokens that the answer already has."
    )
    frequency_penalty: float = parameter(
        "float", 0.0, -100.0, 100.0, "Subtracted from such tokens once per occurrence."
    )
    repeat_last_n: int = parameter(
        "int", -1, -1, MAX_INT, "How many of the last tokens the penalties look at; -1 for all, 0 for none."
    )
    seed: int | None = parameter(
        "seed", None, -(2**63), MAX_SEED - 1, "Makes a varied answer repeatable; -1 draws one.", stands_for={-1: None}
    )
    stop: tuple[str, ...] = parameter(
        "texts",
        (),
        0,
        MAX_STOP_STRINGS,
        "End the answer before this text; may be given several times.",
        names={"anthropic": "stop_sequences"},
    )
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
        for row in PARAMETERS:
            given = getattr(self, row.name)
            kept = row.check(given)
            if kept is not given:
                object.__setattr__(self, row.name, kept)
        if self.logprobs is not None:
            _check_count("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)
        self._check_answers()
        for token_id, bias in self.logit_bias.items():
            if token_id < 0 or math.isnan(bias):
                raise InvalidRequest("logit_bias", f"token {token_id} with bias {bias} is not a bias")

    def _check_answers(self) -> None:
        _check_count("n", self.n, 1, MAX_ANSWERS)
        _check_count("best_of", self.streams, self.n, MAX_ANSWERS)
        if self.streams > self.n and self.stop:
            raise InvalidRequest("best_of", "cannot rank answers that stop strings cut; use stop_token_ids, or raise n")


PARAMETERS: tuple[Parameter, ...] = tuple(
    replace(field.metadata["parameter"], name=field.name)
    for field in fields(SamplingParams)
    if "parameter" in field.metadata
)
