"""What a step costs by the number of its rows, compared with one row: measured while the engine works.

Steps become slower as contexts grow and when other programs run, all of them alike. Therefore the measured seconds set
two things apart: the seconds of one row as they are now, and how many times that a step of so many rows takes.
"""

from __future__ import annotations

_PRIOR_SLOPE = 0.1  # of one more row, before it is measured
_SCALE_WEIGHT, _SHAPE_WEIGHT = 0.2, 0.05  # of the newest step
_UNUSUAL = 4.0  # times: what is so much slower the first time made something, what is so much faster shows that
_SURPRISE = 2.0  # steps that take this many times what was expected count as this many
_LATE_WEIGHT = 0.25  # of what is later than expected beside what is sooner: other programs make steps late, never soon
_LASTING = 16  # steps for which what was found out stands


class StepCosts:
    """Running means; `most_rows` is the largest number of rows that is told apart."""

    __slots__ = ("_bounds", "_counts", "_factors", "_one_row_s", "_steps")

    def __init__(self, most_rows: int) -> None:
        self._factors = [1.0 + _PRIOR_SLOPE * max(0, rows - 1) for rows in range(most_rows + 1)]
        self._counts = [0] * (most_rows + 1)
        self._one_row_s: float | None = None
        self._bounds: dict[int, float] = {}
        self._steps = 0

    def count(self, rows: int, seconds: float, *, is_plain: bool = True) -> None:
        """Take in a step that decoded, with so many rows; a plain one, without drafts, tells how fast all steps are.

        If steps with drafts told that too, they would be compared with themselves.
        """
        if not 1 <= rows < len(self._factors) or seconds <= 0:
            return
        factor = self._factors[rows]
        if self._one_row_s is None or (is_plain and seconds * _UNUSUAL < self._one_row_s * factor):
            self._one_row_s = seconds / factor
        one_row_s = self._one_row_s
        if not self._counts[rows] and seconds > one_row_s * factor * _UNUSUAL:
            self._counts[rows] += 1
            return
        surprise = min(max(seconds / (one_row_s * factor), 1 / _SURPRISE), _SURPRISE)
        change = (surprise - 1) * (_LATE_WEIGHT if surprise > 1 else 1.0)
        self._counts[rows] += 1
        self._steps += 1
        if self._steps % _LASTING == 0:
            self._bounds.clear()
        if rows > 1:
            early = 1 / (1 + self._counts[rows])
            self._factors[rows] *= 1 + (early * (surprise - 1) if early > _SHAPE_WEIGHT else _SHAPE_WEIGHT * change)
        if is_plain and (rows == 1 or self._counts[rows] > 2):
            self._one_row_s *= 1 + _SCALE_WEIGHT * change

    def estimate(self, rows: int) -> float:
        """The cost of a step with so many rows, in steps of one row."""
        last = len(self._factors) - 1
        if rows <= last:
            return self._factors[rows]
        return self._factors[last] + _PRIOR_SLOPE * (rows - last)

    def find_bound(self, answers: int, least_gain: float) -> float:
        """How likely drafted tokens must be right, so that some number of them makes the tokens of a second more.

        In a step of so many answers; as many times more as `least_gain`.
        """
        bound = self._bounds.get(answers)
        if bound is None:
            share, room = least_gain / self._factors[answers], len(self._factors) - answers
            bound = min(
                (answers * (share * self._factors[answers + more] - 1) / more for more in range(1, room)), default=1.0
            )
            self._bounds[answers] = bound
        return bound

    def read_seconds(self, rows: int) -> float | None:
        """The seconds of a step with so many rows; None before any was measured."""
        return None if self._one_row_s is None else self._one_row_s * self.estimate(rows)
