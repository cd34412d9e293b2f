"""How often guesses are right, by how sure the guesser was: running means for one answer, and for all of an engine.

A guess is compared with the token of the answer whether it was verified or not: that token is the one that was drawn.
"""

from __future__ import annotations

from bisect import bisect_right

_BOUNDS = (0.3, 0.5, 0.7, 0.85, 0.95, 0.99)  # of the probability that the draft model gives its token
_FIRST_GUESSES = (0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)  # before anything is counted
_FIRST_VALUES = (*_FIRST_GUESSES, 0.7, 0.7)
_FIRST_COUNT, _COMMON_COUNT = 5, 10  # comparisons, as many as which those weigh, and what all answers have counted
_RESTED_COUNT = 3  # as many as which all earlier ones weigh after a rest
_WEIGHT, _COMMON_WEIGHT = 0.05, 0.02  # of the newest comparison, once there were many
_FIRST, _LATER = len(_FIRST_GUESSES), len(_FIRST_GUESSES) + 1


class Rates:
    """Begins with what `common` has counted of all answers, and counts there, too."""

    __slots__ = ("_common", "_counts", "values")

    def __init__(self, common: Rates | None = None) -> None:
        self._common = common
        self.values: list[float] = [*(_FIRST_VALUES if common is None else common.values)]
        self._counts = [_FIRST_COUNT if common is None else _COMMON_COUNT] * len(self.values)

    @property
    def first(self) -> float:
        """How likely the first token of a draft is right, however sure."""
        return self.values[_FIRST]

    @property
    def later(self) -> float:
        """How likely another one is, if those before it are."""
        return self.values[_LATER]

    def estimate(self, probability: float) -> float:
        """How likely a token is right to which the draft model gives this probability."""
        return self.values[bisect_right(_BOUNDS, probability)]

    def rest(self) -> None:
        """There were no comparisons for long: what was counted before says less about the next ones."""
        self._counts = [min(count, _RESTED_COUNT) for count in self._counts]

    def count(self, probability: float, *, is_right: bool, is_first: bool) -> None:
        """A token was compared with the answer's; those before it were right."""
        for number in (bisect_right(_BOUNDS, probability), _FIRST if is_first else _LATER):
            self._counts[number] += 1
            weight = max(_COMMON_WEIGHT if self._common is None else _WEIGHT, 1 / self._counts[number])
            self.values[number] += weight * (is_right - self.values[number])
        if self._common is not None:
            self._common.count(probability, is_right=is_right, is_first=is_first)
