"""How many tokens to draft for each answer of a step: as many as make the tokens of a second more.

Knows estimates and measured costs alone. Whatever it decides, no answer changes.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

from mlxr.engine.drafts.costs import StepCosts
from mlxr.engine.drafts.drafter import Drafter

K = TypeVar("K", bound=Hashable)
_LEAST_GAIN = 1.05  # drafts must promise this much, as estimates are never exact
_MOST_ROWS = 16  # of a step that has drafts: beyond, a step is bound by multiplying


class Planner:
    """Chooses the lengths of drafts, at most `most_tokens` for one answer."""

    __slots__ = ("_costs", "_most_tokens")

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._costs = StepCosts(_MOST_ROWS)

    def count(self, rows: int, seconds: float) -> None:
        """Take in a step that only decoded."""
        self._costs.count(rows, seconds)

    def allows(self, answers: int) -> bool:
        """Whether a step of so many answers has room for drafts."""
        return answers < _MOST_ROWS

    def plan(self, drafters: Mapping[K, tuple[Drafter, int]], room_rows: int) -> dict[K, list[int]]:
        """Drafts for answers that decode: each with its drafter and the most tokens that it has room for.

        Drafts take `room_rows` rows at most, besides the one of each answer. The likeliest tokens come first.
        """
        offers = {}
        for key, (drafter, most) in drafters.items():
            proposed = drafter.propose(min(most, self._most_tokens)) if most > 0 else []
            if proposed:
                offers[key] = proposed, drafter.estimate(len(proposed))
        lengths = self._choose({key: rates for key, (_, rates) in offers.items()}, len(drafters), room_rows)
        return {key: offers[key][0][:length] for key, length in lengths.items()}

    def _choose(self, rates: Mapping[K, list[float]], answers: int, room_rows: int) -> dict[K, int]:
        """How many tokens of each offer to take, given how likely each is right if those before it are."""
        steps: list[tuple[float, int, K]] = []
        for key, own in rates.items():
            chance = 1.0
            for place, rate in enumerate(own):
                chance *= rate
                steps.append((chance, place, key))
        steps.sort(key=lambda step: -step[0])  # stable: a token never stands before those that it follows
        estimate, tokens = self._costs.estimate, float(answers)
        best, chosen = answers / estimate(answers) * _LEAST_GAIN, 0
        for count, (chance, _, _) in enumerate(steps[: max(0, min(room_rows, _MOST_ROWS - answers))], 1):
            tokens += chance
            if tokens / estimate(answers + count) > best:
                best, chosen = tokens / estimate(answers + count), count
        lengths: dict[K, int] = {}
        for _, place, key in steps[:chosen]:
            lengths[key] = place + 1
        return lengths
