"""Moments of one answer, and the times between them. Knows no clock: whoever calls says what time it is."""

from __future__ import annotations

from mlxr.core.types import Timings


class Stopwatch:
    """From the request to the end of an answer; times lost by preemption count where they fall."""

    __slots__ = ("_asked_s", "_first_token_s", "_started_s")

    def __init__(self, asked_s: float) -> None:
        self._asked_s = asked_s
        self._started_s: float | None = None
        self._first_token_s: float | None = None

    def start(self, now_s: float) -> None:
        """The prompt is being computed; only the first time counts."""
        if self._started_s is None:
            self._started_s = now_s

    def count_token(self, now_s: float) -> None:
        """A token is there; only the first one counts."""
        if self._first_token_s is None:
            self._first_token_s = now_s

    def follow(self, other: Stopwatch) -> None:
        """The prompt is computed by another answer to the same request."""
        self._started_s = other._started_s

    def read(self, now_s: float) -> Timings:
        """The times if the answer ends now; what was never reached took no time."""
        started_s = now_s if self._started_s is None else self._started_s
        first_token_s = now_s if self._first_token_s is None else self._first_token_s
        return Timings(started_s - self._asked_s, first_token_s - started_s, now_s - first_token_s)
