"""A watcher of an engine, which computes the changes between two looks as the server does."""

from __future__ import annotations

from mlxr.engine.engine import Engine
from mlxr.models.footprint import StepWork
from mlxr.server.live import Change, compare


class Look:
    """Begins to watch; `first` is the reading at that moment."""

    def __init__(self, engine: Engine, work: StepWork) -> None:
        self._engine, self._work = engine, work
        self.first = self._last = engine.live.read(work)
        assert self.first.is_first

    def read(self) -> Change:
        """Return the changes since the last call."""
        before, self._last = self._last, self._engine.live.read(self._work)
        assert not self._last.is_first
        return compare(before, self._last, 1.0, 1.0)
