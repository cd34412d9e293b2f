"""The field `samplers` of llama.cpp's requests: which rules choose a token, and in which order.

Rules that the list leaves out are off. The order here is fixed but for the temperature, so a list in another order is
refused: it would give other tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from mlxr.core.errors import InvalidRequest
from mlxr.core.sampling import BY_SPELLING
from mlxr.server.parameter_fields import ParameterFields

# llama.cpp's names in the order of its default, and the values with which the rule does nothing.
RULES: Mapping[str, Mapping[str, Any]] = {
    "penalties": {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    "dry": {"dry_multiplier": 0.0},
    "top_n_sigma": {"top_n_sigma": 0.0},
    "top_k": {"top_k": 0},
    "typ_p": {"typical_p": 1.0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "xtc": {"xtc_probability": 0.0},
    "temperature": {"temperature": 1.0, "dynatemp_range": 0.0},
}
_LETTERS = dict(zip("edskypmxt", RULES, strict=True))
_ALIASES = {"temp": "temperature", "nucleus": "top_p", "typ": "typ_p", "typical": "typ_p", "typicalp": "typ_p"}
_ALIASES |= {name.replace("_", ""): name for name in RULES}
_FEELS_TEMPERATURE = frozenset({"typ_p", "top_p", "min_p", "xtc"})


class SamplerFields(ParameterFields):
    """Sampling parameters that `samplers` can switch off."""

    samplers: Annotated[list[str], Field(max_length=64)] | Annotated[str, Field(max_length=64)] | None = Field(
        None, description="Rules in the order in which they choose a token; the others are off."
    )

    def list_given(self) -> dict[str, object]:
        """The values that the request sets, with those that switch off what `samplers` leaves out."""
        given = super().list_given()
        if self.samplers is None or given.get("mirostat"):
            return given
        chain = read_samplers(self.samplers)
        off = {name: value for rule, values in RULES.items() if rule not in chain for name, value in values.items()}
        kept = {name: value for name, value in given.items() if BY_SPELLING[name].name not in off}
        if "temperature" in chain:
            kept.setdefault("temperature_last", comes_last(chain))
        return {**kept, **off}

    def list_left_out(self) -> Iterator[str]:
        """Samplers that do not exist here."""
        for name in self.samplers or ():
            if _find_rule(name, is_letter=isinstance(self.samplers, str)) is None:
                yield f"samplers.{name}"


def read_samplers(samplers: Sequence[str]) -> list[str]:
    """The rules that a list of names, or a text of letters, stands for; those that do not exist here are left out.

    Raises InvalidRequest for an order that is not the one here.
    """
    found = (_find_rule(name, is_letter=isinstance(samplers, str)) for name in samplers)
    chain = [rule for rule in found if rule is not None]
    others = [rule for rule in chain if rule != "temperature"]
    in_order = others == [rule for rule in RULES if rule in others]
    if not in_order or chain.count("temperature") > 1 or comes_last(chain) is None:
        raise InvalidRequest(
            "samplers",
            f"must be in the order {', '.join(RULES)}, each at most once; the temperature may come before the rules "
            "that leave tokens out",
        )
    return chain


def comes_last(chain: Sequence[str]) -> bool | None:
    """Whether the temperature comes after the rules that it changes; None if it stands among them."""
    if "temperature" not in chain:
        return False
    place = chain.index("temperature")
    before, after = (not _FEELS_TEMPERATURE.isdisjoint(part) for part in (chain[:place], chain[place:]))
    return None if before and after else not after


def _find_rule(name: str, *, is_letter: bool) -> str | None:
    return _LETTERS.get(name) if is_letter else _ALIASES.get(name.lower().replace("_", "").replace("-", ""))
