"""How much time guessing may take: what it has saved so far, and a small part of the time that all steps take.

So an engine whose guesses are seldom right loses no more than that part, whatever was estimated and however the
requests change, and one whose guesses pay has no bounds to speak of.
"""

from __future__ import annotations

_SHARE = 0.01  # of the time of all steps
_FIRST_STEPS = 8.0  # worth of time at the beginning, to find out
_MOST_STEPS = 16.0  # worth of time that is saved up at most


class Credit:
    """Seconds that may be spent on guesses."""

    __slots__ = ("_first_s", "seconds")

    def __init__(self) -> None:
        self._first_s: float | None = None
        self.seconds = 0.0

    def count_step(self, seconds: float, one_row_s: float | None) -> None:
        """A step took so long, what was guessed for it aside; a step of one row takes `one_row_s`."""
        if one_row_s is None:
            return
        if self._first_s is None:
            self._first_s = one_row_s * _FIRST_STEPS
            self.seconds += self._first_s
        self.seconds = min(self.seconds + seconds * _SHARE, one_row_s * _MOST_STEPS)

    def save(self, seconds: float) -> None:
        """Guesses have saved so many seconds, or taken them where below 0."""
        self.seconds += seconds
