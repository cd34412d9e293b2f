"""How the rotation frequencies of a model are stretched to a longer context; plain numbers, checked when made.

Kinds, named as GGUF names them:
- `linear`: every frequency is divided by the factor (position interpolation, Chen et al. 2023, arXiv:2306.15595).
- `yarn`: a ramp between that and none, and an attention factor (Peng et al. 2023, arXiv:2309.00071).
- `longrope`: every frequency is divided by a factor of its own, from one list up to the original context and from
  another beyond it (Ding et al. 2024, arXiv:2402.13753). Which list serves is settled once, by the longest context that
  will be served: keys that are cached must not change their meaning.

Others are another base (`stretch_base`) or factors for each pair (`llama3_factors`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Context, Decimal
from typing import Literal, get_args

from mlxr.core.errors import ModelError

ScalingKind = Literal["linear", "yarn", "longrope"]
SCALING_KINDS: tuple[str, ...] = get_args(ScalingKind)
_NEEDS_ORIGINAL_CONTEXT = ("yarn", "longrope")
_POSITIVE = ("factor", "attention_factor", "beta_fast", "beta_slow")
_DIGITS = Context(prec=40)
MAX_FACTOR = 1e6


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """One scaling rule. Fields that a kind does not use keep their defaults; ModelError for values that make no sense.

    `attention_factor` multiplies cos and sin (with yarn: `yarn_attention_factor` unless the model states its own, with
    longrope `longrope_attention_factor`). `short_factors` and `long_factors` are longrope's, one for each pair.
    `original_context` is in tokens. `truncate` rounds the ends of yarn's ramp to whole dimensions.
    """

    kind: ScalingKind
    factor: float
    original_context: int | None = None
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in SCALING_KINDS:
            raise ModelError(f"rope scaling {self.kind!r} is not known; known are {', '.join(SCALING_KINDS)}")
        named = [(name, getattr(self, name)) for name in _POSITIVE]
        named += [("short_factors", value) for value in self.short_factors]
        named += [("long_factors", value) for value in self.long_factors]
        for name, value in named:
            if not 0 < value <= MAX_FACTOR:  # also refuses NaN
                raise ModelError(
                    f"rope scaling {self.kind}: {name} is {value}, expected above 0 and at most {MAX_FACTOR}"
                )
        if self.kind in _NEEDS_ORIGINAL_CONTEXT and (self.original_context is None or self.original_context < 1):
            raise ModelError(f"rope scaling {self.kind}: original_context is {self.original_context}, expected tokens")
        if self.kind == "yarn" and self.beta_fast < self.beta_slow:
            raise ModelError(f"rope scaling yarn: beta_fast {self.beta_fast} is below beta_slow {self.beta_slow}")
        if self.kind == "longrope" and (not self.short_factors or len(self.short_factors) != len(self.long_factors)):
            raise ModelError(
                f"rope scaling longrope: {len(self.short_factors)} short_factors and {len(self.long_factors)} "
                "long_factors, expected as many of each"
            )

    def list_factors(self, context: int) -> tuple[float, ...]:
        """Longrope's factors for contexts of up to `context` tokens."""
        assert self.original_context is not None  # checked when made
        return self.long_factors if context > self.original_context else self.short_factors


@dataclass(frozen=True, slots=True)
class QueryTemperature:
    """Queries at position p are multiplied by 1 + beta * ln(1 + floor((p + offset) / period)); with an offset of 0 in
    Ministral 3, of 1 in Llama 4. Raises ModelError for values that make no sense."""

    beta: float
    period: int
    offset: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.beta <= MAX_FACTOR:  # also refuses NaN
            raise ModelError(f"query temperature: beta is {self.beta}, expected from 0 to {MAX_FACTOR}")
        if self.period < 1 or self.offset < 0:
            raise ModelError(
                f"query temperature: period {self.period} and offset {self.offset}, expected 1 and 0 or more"
            )


def power(base: float, numerator: int, denominator: int) -> float:
    """`base` to the power of a fraction, rounded once from 40 digits, so that it is the same on every machine."""
    return float(_DIGITS.power(Decimal(base), _DIGITS.divide(Decimal(numerator), Decimal(denominator))))


def logarithm(value: float) -> float:
    """The natural logarithm, rounded once from 40 digits."""
    return float(_DIGITS.ln(Decimal(value)))


def stretch_base(theta: float, factor: float, rot_dim: int) -> float:
    """The base with which high frequencies stay and the lowest is divided by `factor` ("NTK-aware" scaling)."""
    return theta * power(factor, rot_dim, rot_dim - 2)


def yarn_attention_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """The attention factor yarn recommends: 0.1 ln(factor) + 1, or the quotient of two such with given weights."""

    def scale(weight: float) -> float:
        return 0.1 * weight * logarithm(factor) + 1.0 if factor > 1 else 1.0

    if mscale and mscale_all_dim:
        return scale(mscale) / scale(mscale_all_dim)
    return scale(1.0)


def longrope_attention_factor(factor: float, original_context: int) -> float:
    """The attention factor that longrope recommends for a model made `factor` times as long as its original context."""
    if factor <= 1 or original_context <= 1:
        return 1.0
    return math.sqrt(1.0 + logarithm(factor) / logarithm(original_context))
