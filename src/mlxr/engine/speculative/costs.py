"""Measures what steps cost while the engine works, in steps of one row without drafts, and bounds the cost of guessing.

Steps become slower as contexts grow and when other programs run, all of them alike. Therefore two things are measured
apart: the seconds of one row as they are now, and how many times as long other steps take.

If steps run ahead, one that has drafts cannot: it waits for the host. So there are two curves then, of steps without
drafts and of those that wait, and the cost of waiting is the distance between the two. Otherwise they are one.

`Credit` is the time that guessing may take: what it has saved so far, and a small part of the time that all steps take.
So an engine whose guesses are seldom right loses no more than that part, whatever was estimated and however the
requests change, and one whose guesses pay is hardly bounded.
"""

from __future__ import annotations

MOST_ROWS = 16  # of a step that has drafts: beyond, a step is bound by multiplying
_PRIOR_SLOPE = 0.1  # of one more row, before it is measured
_PRIOR_WAIT = 0.15  # of a step that waits where others run ahead
_SCALE_WEIGHT = 0.2  # of the newest step for the seconds of one row
_FIRST_STEPS = 3  # without drafts, until the time of a step is known: the first ones may make what later ones need
_SURPRISE = 2.0  # steps that take this many times what was expected count as this many
_LATE_WEIGHT = 0.25  # of steps slower than expected, beside quicker ones: other programs make steps slow, never quick
_LASTING = 16  # steps for which a bound stays valid
_MOST_COUNTS = 16.0  # of a size: the newest measurement weighs as much as one of so many
_EARLY_COUNTS = 3.0  # of a size, up to which slow steps weigh as much as quick ones
_FRESH = 8  # measurements until all estimates are made anew
_KEPT = 0.9  # of the weight of earlier measurements when that is done: what is not measured again is forgotten
_SHARE = 0.01  # of the time of all steps
_CREDIT_STEPS = 8.0  # worth of time at the beginning, for trials
_MOST_CREDIT_STEPS = 16.0  # worth of time that is saved up at most


class Curve:
    """Estimates of a cost by size, from 1 to `most`: at first `first`, and `slope` more for each further one.

    An estimate is the mean of what was measured of its size, as far as that is recent; otherwise it lies on the
    straight line through all that was measured. So no size keeps what one odd measurement made of it. If it is
    `anchored`, size 1 costs `first` for ever.
    """

    def __init__(self, most: int, first: float, slope: float, *, anchored: bool = False) -> None:
        self._prior, self.slope, self._anchored = (first, slope), slope, anchored
        self.values = [max(0.0, first + slope * (size - 1)) for size in range(most + 1)]
        self._means = list(self.values)
        self._counts = [0.0] * (most + 1)
        self._counts[1] = _MOST_COUNTS if anchored else 0.0
        self._seen = [False] * (most + 1)
        self._fresh = self._total = 0

    @property
    def is_measured(self) -> bool:
        """True once a measurement counts; a slow first time of a size does not."""
        return self._total > 0

    def count(self, size: int, cost: float) -> None:
        """Take in the measured cost of a size. A slow first time is left out: it may have made what later ones need."""
        if not 0 < size < len(self.values) or (self._anchored and size == 1):
            return
        expected, count = self.values[size], self._counts[size]
        if not self._seen[size]:
            self._seen[size] = True
            if cost > expected:
                return
        cost = min(max(cost, expected / _SURPRISE), expected * _SURPRISE)
        if not count:
            self._means[size] = expected
        is_late = cost > self._means[size] and count > _EARLY_COUNTS
        self._means[size] += (cost - self._means[size]) / (count + 1) * (_LATE_WEIGHT if is_late else 1.0)
        self._counts[size] = min(count + 1, _MOST_COUNTS)
        self._total += 1
        self._fresh += 1
        if self._fresh >= _FRESH or self._total <= _FRESH:
            self._draw_line()
        else:
            self.values[size] += (self._means[size] - self.values[size]) * count / (count + 1)

    def estimate(self, size: int) -> float:
        """Return the cost of any size."""
        last = len(self.values) - 1
        return self.values[size] if size <= last else self.values[last] + self.slope * (size - last)

    def _draw_line(self) -> None:
        """Estimate all sizes anew, from the measurements and the line through them."""
        if self._fresh >= _FRESH:
            self._fresh = 0
            for size in range(1 + self._anchored, len(self._counts)):
                self._counts[size] *= _KEPT
        first, slope = self._prior
        points = [(1.0, 1.0, first), (1.0, 5.0, first + 4 * slope)]
        points += [(count, size, self._means[size]) for size, count in enumerate(self._counts) if count > 0]
        total = sum(weight for weight, _, _ in points)
        mean_size = sum(weight * size for weight, size, _ in points) / total
        mean_cost = sum(weight * cost for weight, _, cost in points) / total
        spread = sum(weight * (size - mean_size) ** 2 for weight, size, _ in points)
        joint = sum(weight * (size - mean_size) * (cost - mean_cost) for weight, size, cost in points)
        self.slope = max(0.0, joint / spread)
        for size in range(1, len(self.values)):
            count, line = self._counts[size], max(mean_cost + self.slope * (size - mean_size), mean_cost / 4)
            self.values[size] = (count * self._means[size] + line) / (count + 1)
        if self._anchored:
            self.values[1] = first


class StepCosts:
    """The seconds of one row, and the curves of steps; `most_rows` is the largest number of rows that is told apart."""

    def __init__(self, most_rows: int, *, runs_ahead: bool = False) -> None:
        self._plain = Curve(most_rows, 1.0, _PRIOR_SLOPE, anchored=True)
        self._waiting = Curve(most_rows, 1.0 + _PRIOR_WAIT, _PRIOR_SLOPE) if runs_ahead else self._plain
        self._one_row_s: float | None = None
        self._bounds: dict[int, float] = {}
        self._steps = self._plain_steps = 0

    def count(self, rows: int, seconds: float, *, is_plain: bool = True) -> None:
        """Take in a step that decoded, with so many rows.

        A plain one, without drafts, tells how fast all steps are. If steps with drafts told that too, they would be
        compared with themselves.
        """
        if not 1 <= rows < len(self._plain.values) or seconds <= 0:
            return
        curve = self._plain if is_plain else self._waiting
        expected = curve.estimate(rows)
        self._steps += 1
        if self._steps % _LASTING == 0:
            self._bounds.clear()
        if is_plain:
            self._plain_steps += 1
            one_row_s = seconds / expected
            if self._plain_steps <= _FIRST_STEPS:
                self._one_row_s = min(one_row_s, self._one_row_s or one_row_s)
            else:
                assert self._one_row_s is not None
                change = min(max(one_row_s / self._one_row_s, 1 / _SURPRISE), _SURPRISE) - 1
                self._one_row_s *= 1 + _SCALE_WEIGHT * change * (_LATE_WEIGHT if change > 0 else 1.0)
        if self.is_known and self._one_row_s is not None:
            curve.count(rows, seconds / self._one_row_s)

    @property
    def is_known(self) -> bool:
        """True once enough steps without drafts were measured to tell what pays."""
        return self._plain_steps >= _FIRST_STEPS

    def estimate(self, rows: int) -> float:
        """Return the cost of a step with drafts and so many rows."""
        return self._waiting.estimate(rows)

    def estimate_plain(self, rows: int) -> float:
        """Return the cost of a step without drafts."""
        return self._plain.estimate(rows)

    @property
    def row_slope(self) -> float:
        """The approximate cost of one more row."""
        return self._waiting.slope

    def find_bound(self, answers: int, least_gain: float) -> float:
        """Return the least probability of drafted tokens at which some number of them gives more tokens per second.

        More means `least_gain` times as many, in a step of so many answers, which waits.
        """
        bound = self._bounds.get(answers)
        if bound is None:
            values = self._waiting.values
            share, room = least_gain / values[answers], len(values) - answers
            bound = min((answers * (share * values[answers + more] - 1) / more for more in range(1, room)), default=1.0)
            self._bounds[answers] = bound
        return bound

    def read_seconds(self, rows: int, *, waits: bool = False) -> float | None:
        """Return the seconds of a step with so many rows, without drafts unless it `waits`; None before they are
        known."""
        if self._one_row_s is None or not self.is_known:
            return None
        return self._one_row_s * (self.estimate(rows) if waits else self.estimate_plain(rows))


class Credit:
    """Seconds that may be spent on guesses."""

    def __init__(self) -> None:
        self._first_s: float | None = None
        self.seconds = 0.0

    def count_step(self, seconds: float, one_row_s: float | None) -> None:
        """Add a part of a step's seconds, without those of its guesses; a step of one row takes `one_row_s`."""
        if one_row_s is None:
            return
        if self._first_s is None:
            self._first_s = one_row_s * _CREDIT_STEPS
            self.seconds += self._first_s
        self.seconds = min(self.seconds + seconds * _SHARE, one_row_s * _MOST_CREDIT_STEPS)

    def save(self, seconds: float) -> None:
        """Add seconds that guesses have saved, or taken where below 0."""
        self.seconds += seconds
