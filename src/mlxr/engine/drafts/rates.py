"""How often guesses are right, by how sure the guesser was: running means for one answer, and for all of an engine."""

from __future__ import annotations

from bisect import bisect_right

_BOUNDS = (0.3, 0.5, 0.7, 0.85, 0.95, 0.99)  # of the probability that the draft model gives its token
_FIRST_GUESSES = (0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)  # before anything is counted
_WEIGHT, _COMMON_WEIGHT = 0.1, 0.05  # of the newest comparison


class Rates:
    """Begins with what `common` has counted of all answers, and counts there, too."""

    __slots__ = ("_common", "_weight", "first", "values")

    def __init__(self, common: Rates | None = None) -> None:
        self._common, self._weight = common, _COMMON_WEIGHT if common is None else _WEIGHT
        self.values: list[float] = list(_FIRST_GUESSES if common is None else common.values)
        self.first: float = 0.7 if common is None else common.first  # of the first token of a draft, however sure

    def estimate(self, probability: float) -> float:
        """How likely a token is right to which the draft model gives this probability."""
        return self.values[bisect_right(_BOUNDS, probability)]

    def count(self, probability: float, *, is_right: bool, is_first: bool) -> None:
        """A token was compared with the answer's; those before it were right."""
        number, weight = bisect_right(_BOUNDS, probability), self._weight
        self.values[number] += weight * (is_right - self.values[number])
        if is_first:
            self.first += weight * (is_right - self.first)
        if self._common is not None:
            self._common.count(probability, is_right=is_right, is_first=is_first)
