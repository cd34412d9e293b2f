"""The table of sampling parameters: the class of which a row is a field, with its checks, names and help.

A new sampler is a row here, a rule in `kernels/sample` with its reference, and nothing else: flags, fields of requests
in every dialect, options of models and their defaults follow from the row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType

from mlxr.core.errors import InvalidRequest
from mlxr.core.parameter import MAX_SEED as MAX_SEED
from mlxr.core.parameter import Parameter, parameter

MAX_TOP_LOGPROBS = 128
MAX_STOP_STRINGS = 64
MAX_INT = 2**31 - 1
SMALLEST_TOP_P = 1e-9  # keeps the likeliest token alone
MAX_ANSWERS = 128


def _check_count(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidRequest(name, f"must be at least {low} and at most {high}, got {value}")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when to stop: the table of sampling parameters, and what else a request sets.

    `docs/sampling.md` says what each rule does and in which order. `seed` None draws one. `logprobs` None reports none,
    0 the chosen token's, n also the n best of each step. `max_tokens` None means as far as the context and the arena
    reach. `n` answers are given to the prompt, each from its own random stream; the first is the one that `n` = 1
    gives. With `best_of` above `n`, that many are computed and the `n` with the highest mean log-probability given, the
    best first. They are ranked as whole answers of the engine, which knows no text, so stop strings are refused then.
    With `reports_progress` events tell how much of the prompt is computed. At most `draft_tokens` are guessed at a
    time, or as many as pay where it is None; they change no token. Neither does `prediction`, a text that the answer is
    likely to repeat in long parts; guesses are taken from it.
    """

    max_tokens: int | None = parameter(
        "int",
        256,
        0,
        MAX_INT,
        "Most tokens that an answer may have; -1: until the context is full; 0: only the prompt is computed.",
        stands_for={-1: None, -2: None},
        names={
            "openai": "max_completion_tokens",
            "responses": "max_output_tokens",
            "ollama": "num_predict",
            "llamacpp": "n_predict",
            "hub": "max_new_tokens",
        },
    )
    min_tokens: int = parameter(
        "int",
        0,
        0,
        MAX_INT,
        "End tokens and stop texts do not count before this many tokens.",
        names={"hub": "min_new_tokens"},
    )
    thinking_budget: int | None = parameter(
        "int",
        None,
        -1,
        MAX_INT,
        "Most tokens that the model thinks before it is made to answer; 0: none, where that can be; -1: any number.",
        spellings=("thinking_budget_tokens", "thinking_token_budget", "reasoning_budget_tokens", "reasoning_budget"),
    )
    temperature: float = parameter(
        "float",
        0.0,
        0.0,
        100.0,
        "0 takes the likeliest token; higher values make answers more varied.",
        names={"gguf": "temp"},
    )
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
    min_p: float = parameter("float", 0.0, 0.0, 1.0, "Drop tokens that are less likely than this times the likeliest.")
    top_n_sigma: float = parameter(
        "float",
        0.0,
        0.0,
        100.0,
        "Keep logits within this many standard deviations of the largest; 0 or -1 for all.",
        stands_for={-1: 0.0},
    )
    typical_p: float = parameter(
        "float", 1.0, 0.0, 1.0, "Choose among the most typical tokens that together go beyond this probability."
    )
    xtc_probability: float = parameter(
        "float", 0.0, 0.0, 1.0, "How often XTC drops all tokens above its threshold except the least likely of them."
    )
    xtc_threshold: float = parameter(
        "float", 0.1, 0.0, 1.0, "Probability from which on XTC may drop a token; above 0.5: never."
    )
    temperature_last: bool = parameter(
        "flag", False, 0, 1, "Divide by the temperature after the other rules, as llama.cpp does."
    )
    dynatemp_range: float = parameter(
        "float", 0.0, 0.0, 100.0, "How far the temperature goes down and up, depending on how sure the model is."
    )
    dynatemp_exponent: float = parameter(
        "float", 1.0, 0.0, 100.0, "Power of the relative entropy that sets the dynamic temperature."
    )
    mirostat: int = parameter(
        "int",
        0,
        0,
        2,
        "Version of Mirostat, which aims at a level of surprise and replaces the rules above; 0 for none.",
    )
    mirostat_tau: float = parameter("float", 5.0, 0.0, 100.0, "The surprise that Mirostat aims at, in bits.")
    mirostat_eta: float = parameter("float", 0.1, 0.0, 100.0, "How fast Mirostat adapts.")
    repetition_penalty: float = parameter(
        "float",
        1.0,
        0.0,
        100.0,
        "Above 1: tokens that came before become less likely.",
        open_low=True,
        names={"ollama": "repeat_penalty", "llamacpp": "repeat_penalty", "gguf": "penalty_repeat"},
    )
    presence_penalty: float = parameter(
        "float", 0.0, -100.0, 100.0, "Subtracted from the logit of every token that the answer already has."
    )
    frequency_penalty: float = parameter(
        "float", 0.0, -100.0, 100.0, "Subtracted from the logit of a token once for each time the answer has it."
    )
    repeat_last_n: int = parameter(
        "int",
        -1,
        -1,
        MAX_INT,
        "How many of the last tokens the penalties look at; -1 for all, 0 for none.",
        names={"gguf": "penalty_last_n"},
    )
    dry_multiplier: float = parameter(
        "float", 0.0, 0.0, 100.0, "DRY: penalty of a token that would continue a repetition; 0 for none."
    )
    dry_base: float = parameter(
        "float", 1.75, 1.0, 100.0, "DRY: the penalty grows by this factor with each further repeated token."
    )
    dry_allowed_length: int = parameter("int", 2, 0, MAX_INT, "DRY: repetitions shorter than this get no penalty.")
    dry_penalty_last_n: int = parameter(
        "int", -1, -1, MAX_INT, "DRY: how many of the last tokens are searched; -1 for all, 0 for none."
    )
    dry_sequence_breakers: tuple[str, ...] = parameter(
        "texts",
        ("\n", ":", '"', "*"),
        0,
        64,
        "DRY: repetitions do not count across this text; may be given several times.",
    )
    seed: int | None = parameter(
        "seed",
        None,
        -(2**63),
        MAX_SEED - 1,
        "The same seed gives the same answer again; -1 draws a seed.",
        stands_for={-1: None},
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
    reports_progress: bool = False
    draft_tokens: int | None = None
    prediction: str = ""

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
