"""The last states that a model made of an answer: what a head that drafts has not read yet.

States are large, so only the last ones are kept; a head that reads later begins with these. Rows are arrays of the
steps that made them, and are never copied before they are read.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from mlxr.engine.runner import Floats

MOST_ROWS = 256  # that are kept of an answer, and handed over after a step


class StateTail:
    """States of the positions from `start` to `stop` of one answer, one after another."""

    __slots__ = ("_pieces", "stop")

    def __init__(self) -> None:
        self._pieces: deque[Floats] = deque()
        self.stop = 0

    @property
    def start(self) -> int:
        """The first position whose state is kept; `stop` if none is."""
        return self.stop - sum(map(len, self._pieces))

    def add(self, start: int, rows: Floats) -> None:
        """Take in the states of positions from `start` on. Those that are known are left; after a gap all else goes."""
        if start > self.stop:
            self._pieces.clear()
            self.stop = start
        fresh = rows[self.stop - start :]
        if not len(fresh):
            return
        self._pieces.append(fresh)
        self.stop += len(fresh)
        while self.stop - self.start - len(self._pieces[0]) >= MOST_ROWS:
            self._pieces.popleft()

    def read(self, first: int) -> Floats:
        """The states of the positions from `first` on, which is not before `start`."""
        rows = np.concatenate(self._pieces)
        return rows[first - self.start :]

    def forget(self, first: int) -> None:
        """Let go of what lies before position `first` altogether."""
        while self._pieces and self.start + len(self._pieces[0]) <= first:
            self._pieces.popleft()

    def clear(self) -> None:
        """Let go of everything."""
        self._pieces.clear()
        self.stop = 0

    def follow(self, leader: StateTail) -> None:
        """Begin with what another answer to the same prompt has."""
        self._pieces, self.stop = leader._pieces.copy(), leader.stop
