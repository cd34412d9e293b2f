"""How clients share an engine: whoever sends much queues behind himself, not before the others.

This is fair queueing in seconds. Each request is taken to have come when the client's earlier ones would have been
done, had the engine worked for this client alone; so of two clients the one that asked for less comes first. Knows
no sequences and no pages.
"""

from __future__ import annotations

from dataclasses import dataclass

_WEIGHT = 0.1  # of the newest step in the running mean
_GUESSED_TOKEN_S = 0.001  # until a step has been measured
ANSWER_TOKENS = 16  # what an answer counts for; how long it will be is not known, and its tokens share their steps


@dataclass(slots=True)
class _Account:
    open: int = 0
    until_s: float = 0.0


class Shares:
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
