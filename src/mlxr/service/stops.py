"""Stop strings over a stream of text pieces.

Knows no tokens and no engine. Text goes in as it is decoded; what can no longer belong to a stop string comes out.
The result does not depend on how the text was cut into pieces: the stop string whose last character comes first
wins, and of several that end at the same place the longest.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopScanner:
    """Holds back text that could begin one of `stops` until the next pieces decide."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Add a piece; returns the text that is now certain, and the stop string found (then nothing may follow)."""
        buffer = self._held + text
        found = self._find_first(buffer)
        if found is not None:
            start, stop = found
            self._held = ""
            return buffer[:start], stop
        keep = self._undecided_length(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep], None

    def flush(self) -> str:
        """The text still held back; called once, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _find_first(self, buffer: str) -> tuple[int, str] | None:
        """Start and text of the stop string that is complete first."""
        hits = [(start + len(stop), start, stop) for stop in self.stops if (start := buffer.find(stop)) >= 0]
        if not hits:
            return None
        _, start, stop = min(hits)
        return start, stop

    def _undecided_length(self, buffer: str) -> int:
        """Length of the longest end of `buffer` with which some stop string begins."""
        longest = max((len(stop) for stop in self.stops), default=1) - 1
        for length in range(min(longest, len(buffer)), 0, -1):
            end = buffer[len(buffer) - length :]
            if any(stop.startswith(end) for stop in self.stops):
                return length
        return 0
