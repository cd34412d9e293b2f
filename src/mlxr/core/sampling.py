"""The table of sampling parameters: a class whose fields are the rows, with their checks, names and help.

A new sampler is a row of `SamplingParams`, declared with `parameter`, and a rule in `kernels/sample` with its
reference; flags, fields of requests in every API (dialect), options of models and their defaults follow from the row.
`read_params` turns the names that clients use into fields.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field, fields, replace
from numbers import Real
from types import MappingProxyType
from typing import Any, Literal, cast

from mlxr.core.errors import InvalidRequest
from mlxr.core.frozen import frozen

Kind = Literal["int", "float", "flag", "seed", "texts"]
Dialect = Literal["openai", "responses", "anthropic", "ollama", "llamacpp", "hub", "gguf"]
NOTHING: Mapping[Any, Any] = MappingProxyType({})
MAX_SEED = 2**64
SMALLEST_FLOAT = 2.0**-126  # kernels compute in 32 bits, where smaller numbers can be 0


@frozen(kw_only=True)
class Parameter:
    """A row of the table: the values of a parameter, its help text, and its name in each dialect."""

    name: str = ""
    kind: Kind
    default: Any
    low: float
    high: float  # the largest number; of texts: the largest count
    help: str
    open_low: bool = False  # `low` itself is excluded
    stands_for: Mapping[float, Any] = field(default_factory=lambda: NOTHING)  # value sent to value meant
    names: Mapping[Dialect, str] = field(default_factory=lambda: NOTHING)  # in dialects that do not use `name`
    spellings: tuple[str, ...] = ()  # further names, which all dialects understand

    @property
    def flag(self) -> str:
        """The flag on the command line."""
        return "--" + self.name.replace("_", "-")

    def list_names(self, *dialects: Dialect) -> list[str]:
        """Return its names in these dialects, the preferred name last; `name` itself is understood everywhere."""
        chosen = dict.fromkeys([self.name, *(self.names.get(dialect, self.name) for dialect in dialects)])
        return [*self.spellings, *chosen]

    def check(self, value: Any, name: str | None = None) -> Any:
        """Return the value as SamplingParams keeps it; raises InvalidRequest with `name`, by default the row's own."""
        if self.kind == "texts":
            return self._check_texts(value, name or self.name)
        if self.kind == "flag":
            if not isinstance(value, bool):
                raise InvalidRequest(name or self.name, f"must be true or false, got {value!r:.80}")
            return value
        if value is None and (self.default is None or None in self.stands_for.values()):
            return None
        if isinstance(value, bool) or not isinstance(value, Real):
            raise InvalidRequest(name or self.name, f"must be a number, got {value!r:.80}")
        if self.kind == "float" and 0 < abs(cast(float, value)) < SMALLEST_FLOAT:
            value = 0.0
        if value in self.stands_for:
            return self.stands_for[float(value)]
        self._check_range(value, name or self.name)
        if self.kind == "float":
            return value
        whole = int(cast(float, value))
        if whole != value:
            raise InvalidRequest(name or self.name, f"must be a whole number, got {value!r:.80}")
        return whole % MAX_SEED if self.kind == "seed" else whole

    def _check_range(self, value: Any, name: str) -> None:
        inside = not math.isnan(value) and value <= self.high
        if not (inside and (value > self.low if self.open_low else value >= self.low)):
            begin = "above" if self.open_low else "at least"
            raise InvalidRequest(name, f"must be {begin} {self.low} and at most {self.high}, got {value!r:.80}")

    def _check_texts(self, value: Any, name: str) -> tuple[str, ...]:
        if isinstance(value, str) or not all(isinstance(text, str) for text in value):
            raise InvalidRequest(name, f"must be a tuple of strings, got {value!r:.80}")
        if len(value) > self.high or any(not text for text in value):
            raise InvalidRequest(name, f"takes at most {self.high:g} strings, none of them empty")
        return tuple(value)


def parameter(kind: Kind, default: Any, low: float, high: float, text: str, **more: Any) -> Any:
    """The declaration of a row, as the default of a dataclass field; `text` is its help, `more` its other fields."""
    row = Parameter(kind=kind, default=default, low=low, high=high, help=text, **more)
    return field(default=default, metadata={"parameter": row})


MAX_TOP_LOGPROBS = 128
MAX_STOP_STRINGS = 64
MAX_INT = 2**31 - 1
SMALLEST_TOP_P = 1e-9  # keeps only the likeliest token
MAX_ANSWERS = 128


def _check_count(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidRequest(name, f"must be at least {low} and at most {high}, got {value}")


@frozen
class SamplingParams:
    """The rules by which a request chooses tokens and stops: the table of sampling parameters, and a few more fields.

    `docs/sampling.md` explains the rules and their order. `seed` None draws a seed, `max_tokens` None means as far as
    the context and the cache reach. The prompt gets `n` answers, each from its own random stream; the first is the one
    that `n` = 1 gives. With `best_of` above `n`, that many are computed and the `n` with the highest mean
    log-probability returned, the best first. The engine, which knows no text, ranks whole answers, so stop strings are
    refused then.
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
    logprobs: int | None = None  # None reports none, 0 the chosen token's, n also the n best of each step
    n: int = 1
    best_of: int | None = None

    @property
    def streams(self) -> int:
        """The number of answers to compute: `best_of`, or `n` without it."""
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


ALL_TOKENS = -1  # value of `max_tokens`: until the context is full
BY_SPELLING: Mapping[str, Parameter] = {
    name: row for row in PARAMETERS for name in (row.name, *row.names.values(), *row.spellings)
}  # every name that any dialect has for a parameter

# The defaults of `mlxr run`, `mlxr chat` and the page, for people who read the answers, if neither they nor the model
# set others. The dialects have the defaults of their own servers.
EVERYDAY: Mapping[str, float] = {"temperature": 0.7, "top_k": 40, "top_p": 0.95, "min_p": 0.05}

GGUF_PREFIX = "general.sampling."
# The parameters that GGUF has keys for (gguf-py's `Keys.General`), by its name there.
_GGUF_ROWS: Mapping[str, Parameter] = {
    row.list_names("gguf")[-1]: row
    for row in PARAMETERS
    if row.name
    in (
        *("temperature", "top_k", "top_p", "min_p", "xtc_probability", "xtc_threshold"),
        *("repetition_penalty", "repeat_last_n", "mirostat", "mirostat_tau", "mirostat_eta"),
    )
}
_DIGITS = 6  # files keep 32 bits of a number


def read_file_defaults(metadata: Mapping[str, object]) -> dict[str, object]:
    """The sampling parameters that a file recommends, from its GGUF keys, under the names that models are made with.

    Invalid values are ignored: a bad recommendation must not prevent the use of a model.
    """
    found: dict[str, object] = {}
    for name, row in _GGUF_ROWS.items():
        value = metadata.get(GGUF_PREFIX + name)
        try:
            checked = None if value is None else row.check(value)
        except InvalidRequest:
            continue
        if checked is not None:
            found[row.list_names("ollama")[-1]] = float(f"{checked:.{_DIGITS}g}") if row.kind == "float" else checked
    return found


def name_file_defaults(generation: Mapping[str, object]) -> dict[str, object]:
    """GGUF keys and values of the recommendations of a `generation_config.json`; none if it says not to sample."""
    if generation.get("do_sample") is False:
        return {}
    values = {name: generation.get(row.list_names("hub")[-1]) for name, row in _GGUF_ROWS.items()}
    numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
    return {
        GGUF_PREFIX + name: float(value) if _GGUF_ROWS[name].kind == "float" else value
        for name, value in numbers.items()
        if not isinstance(value, bool)
    }


def read_params(*layers: Mapping[str, object], prefix: str = "") -> dict[str, Any]:
    """Fields of SamplingParams from values under the names of any dialect; later layers win over earlier ones.

    None counts as not given, one text as a list of it, and other names are ignored. Raises InvalidRequest with the name
    that was used, after `prefix`.
    """
    found: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items():
            row = BY_SPELLING.get(name)
            if row is not None and value is not None:
                found[row.name] = row.check(_list_texts(value) if row.kind == "texts" else value, prefix + name)
    return found


def _list_texts(value: object) -> object:
    if isinstance(value, str):
        return (value,) if value else ()
    return tuple(text for text in value if text != "") if isinstance(value, list | tuple) else (value,)
