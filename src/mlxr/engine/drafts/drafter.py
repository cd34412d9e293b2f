"""What the engine asks of whoever drafts for one answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Drafter(Protocol):
    """Follows one answer and guesses how it goes on. Its guesses may be wrong at any place, and cost time alone."""

    def add(self, token_id: int) -> None:
        """The answer has one more token."""
        ...

    def is_due(self) -> bool:
        """Whether there may be a guess for the next step; asked once in each, and answered at once."""
        ...

    def propose(self, most: int) -> list[int]:
        """Return the next tokens, at most `most`, as far as there is a guess; asking twice gives the same."""
        ...

    def estimate(self, tokens: int) -> list[float]:
        """How likely each of the first `tokens` proposed tokens is right, given that those before it are."""
        ...

    def release(self, *, has_ended: bool) -> None:
        """Give back what is held in memory that others could use: the answer has ended, or goes on later."""
        ...


# Of the tokens of an answer so far, a list that grows with it; and whether others may find what is computed of them.
DrafterMaker = Callable[[list[int], bool], Drafter]
