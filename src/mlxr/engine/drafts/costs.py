"""What a step costs by the number of its rows, compared with one row: measured while the engine works.

Steps become slower as contexts grow and when other programs run, all of them alike. Therefore the measured seconds set
two things apart: the seconds of one row as they are now, and how many times that a step of so many rows takes.
"""

from __future__ import annotations

_PRIOR_SLOPE = 0.1  # of one more row, before it is measured
_SCALE_WEIGHT, _SHAPE_WEIGHT = 0.2, 0.05  # of the newest step
_UNUSUAL = 4.0  # times: what is so much slower the first time made something, what is so much faster shows that
_SURPRISE = 2.0  # steps that take this many times what was expected count as this many


class StepCosts:
    """Running means; `most_rows` is the largest number of rows that is told apart."""

    __slots__ = ("_counts", "_factors", "_one_row_s")

    def __init__(self, most_rows: int) -> None:
        self._factors = [1.0 + _PRIOR_SLOPE * max(0, rows - 1) for rows in range(most_rows + 1)]
        self._counts = [0] * (most_rows + 1)
        self._one_row_s: float | None = None

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
        self._counts[rows] += 1
        if rows > 1:
            weight = max(_SHAPE_WEIGHT, 1 / (1 + self._counts[rows]))
            self._factors[rows] *= 1 + weight * (surprise - 1)
        if is_plain and (rows == 1 or self._counts[rows] > 2):
            self._one_row_s *= 1 + _SCALE_WEIGHT * (surprise - 1)

    def estimate(self, rows: int) -> float:
        """The cost of a step with so many rows, in steps of one row."""
        last = len(self._factors) - 1
        if rows <= last:
            return self._factors[rows]
        return self._factors[last] + _PRIOR_SLOPE * (rows - last)

    def read_seconds(self, rows: int) -> float | None:
        """The seconds of a step with so many rows; None before any was measured."""
        return None if self._one_row_s is None else self._one_row_s * self.estimate(rows)
