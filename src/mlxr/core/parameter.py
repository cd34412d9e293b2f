"""Describes one sampling parameter: its values, its help text, and what each dialect calls it.

The table of all of them is the class `SamplingParams`, each of whose rows is declared with `parameter`; `core.sampling`
reads it. Flags, fields of requests, options of models and checks follow from the rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from types import MappingProxyType
from typing import Any, Literal, cast

from mlxr.core.errors import InvalidRequest

Kind = Literal["int", "float", "flag", "seed", "texts"]
Dialect = Literal["openai", "responses", "anthropic", "ollama", "llamacpp", "hub", "gguf"]
NOTHING: Mapping[Any, Any] = MappingProxyType({})
MAX_SEED = 2**64
SMALLEST_FLOAT = 2.0**-126  # kernels compute in 32 bits, where what is smaller can be 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A row. `stands_for` maps numbers that clients send to what they mean here, such as a `top_k` of -1 to 0.

    Numbers lie from `low` to `high`, above `low` if `open_low`; of texts there are at most `high`. `names` holds the
    dialects that do not use `name`; `spellings` are further names that all of them understand.
    """

    name: str = ""
    kind: Kind
    default: Any
    low: float
    high: float
    help: str
    open_low: bool = False
    stands_for: Mapping[float, Any] = field(default_factory=lambda: NOTHING)
    names: Mapping[Dialect, str] = field(default_factory=lambda: NOTHING)
    spellings: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        """As written on the command line."""
        return "--" + self.name.replace("_", "-")

    def list_names(self, *dialects: Dialect) -> list[str]:
        """Return the names of it in these dialects, the preferred name last; `name` itself is understood everywhere."""
        chosen = dict.fromkeys([self.name, *(self.names.get(dialect, self.name) for dialect in dialects)])
        return [*self.spellings, *chosen]

    def check(self, value: Any, name: str | None = None) -> Any:
        """The value as SamplingParams keeps it; raises InvalidRequest with `name`, by default the row's own."""
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


def parameter(
    kind: Kind,
    default: Any,
    low: float,
    high: float,
    text: str,
    *,
    open_low: bool = False,
    stands_for: Mapping[float, Any] = NOTHING,
    names: Mapping[Dialect, str] = NOTHING,
    spellings: tuple[str, ...] = (),
) -> Any:
    """The declaration of a row, as the default of a dataclass field; `text` is its help."""
    row = Parameter(
        kind=kind,
        default=default,
        low=low,
        high=high,
        help=text,
        open_low=open_low,
        stands_for=stands_for,
        names=names,
        spellings=spellings,
    )
    return field(default=default, metadata={"parameter": row})
