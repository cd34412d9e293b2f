"""Fair queueing by client, and the throughput that estimates of time go by.

The queue is fair in seconds: each request is taken to have come when the client's earlier ones would have been done,
had the engine worked for this client alone. So of two clients the one that asked for less comes first, and whoever
sends much waits behind its own requests. Numbers go in after each step. Knows no sequences and no pages.
"""

from __future__ import annotations

from dataclasses import dataclass

_WEIGHT = 0.1  # of the newest value in running means: some ten steps or requests back still count
_GUESSED_TOKEN_S = 0.001  # until a step has been measured
ANSWER_TOKENS = 16  # what an answer counts for; how long it will be is not known, and its tokens share their steps
_UNMEASURED_S = 1.0  # hint before anything has been measured
MAX_HINT_S = 600.0


@dataclass(slots=True)
class _Account:
    open: int = 0
    until_s: float = 0.0


class FairQueue:
    """The accounts of all clients that have requests in the engine; requests without a client have none."""

    def __init__(self) -> None:
        self.token_s = _GUESSED_TOKEN_S
        self._accounts: dict[tuple[str, int], _Account] = {}

    def enter(self, client: str | None, priority: int, now: float, tokens: int, answers: int) -> float:
        """Count a request of so many tokens to compute; return when it is taken to have come, `now` or later."""
        if client is None:
            return now
        account = self._accounts.setdefault((client, priority), _Account())
        start_s = max(now, account.until_s)
        account.open += 1
        account.until_s = start_s + (tokens + ANSWER_TOKENS * answers) * self.token_s
        return start_s

    def leave(self, client: str | None, priority: int) -> None:
        """A request has ended. A client without any owes nothing."""
        if client is None:
            return
        account = self._accounts[client, priority]
        account.open -= 1
        if not account.open:
            del self._accounts[client, priority]

    def count_step(self, seconds: float, tokens: int) -> None:
        """Take in that a step with so many tokens took `seconds`."""
        self.token_s += _WEIGHT * (seconds / tokens - self.token_s)


class Throughput:
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
