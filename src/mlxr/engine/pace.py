"""How fast an engine works, from what it did lately: the ground for telling a refused caller when to come back.

Knows no requests; numbers go in after each step.
"""

from __future__ import annotations

_WEIGHT = 0.1  # of the newest value in the running means: some ten steps or requests back still count
_UNMEASURED_S = 1.0  # hint before anything has been measured
MAX_HINT_S = 600.0


class Pace:
    """Running means of the seconds per step and of the seconds between two requests that end."""

    __slots__ = ("_between_ends_s", "_last_end", "_step_s")

    def __init__(self) -> None:
        self._step_s: float | None = None
        self._between_ends_s: float | None = None
        self._last_end: float | None = None

    def count_step(self, seconds: float) -> None:
        """Take in that a step took `seconds`."""
        self._step_s = _blend(self._step_s, seconds)

    def count_end(self, now: float, *, is_idle: bool) -> None:
        """A request ended at `now`. When nothing is left to do, the time until the next end will tell nothing."""
        if self._last_end is not None:
            self._between_ends_s = _blend(self._between_ends_s, now - self._last_end)
        self._last_end = None if is_idle else now

    def estimate_room_s(self, steps_to_end: int) -> float:
        """Seconds until a waiting request can be expected to get its turn, from 1 to MAX_HINT_S.

        The measured time between two ends, or as long as that is unknown, `steps_to_end` (steps until the first of the
        running answers must end) at the measured pace.
        """
        if self._between_ends_s is not None:
            hint_s = self._between_ends_s
        elif self._step_s is not None:
            hint_s = steps_to_end * self._step_s
        else:
            hint_s = _UNMEASURED_S
        return min(max(hint_s, 1.0), MAX_HINT_S)


def _blend(mean: float | None, value: float) -> float:
    return value if mean is None else mean + _WEIGHT * (value - mean)
