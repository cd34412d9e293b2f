"""Which tokens may come next in an answer: what a grammar must offer to the engine, and its state in one answer.

The engine asks for a mask before every token, applies it within its one sampling call, and tells which token was
chosen. Knows no grammar and no text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.uint32]


class TokenConstraint(Protocol):
    """A rule for the tokens of one answer. What it raises ends that answer alone, with its text as the error.

    `fill_mask` may run on another thread than the other methods, but never at the same time.
    """

    def fill_mask(self, mask: Mask) -> None:
        """Set bit i % 32 of mask[i // 32] for every token i that may come next, end tokens included.

        `mask` has a bit for every token of the model's vocabulary and comes all zero. Asking twice is the same as
        asking once.
        """
        ...

    def accept(self, token_id: int) -> None:
        """`token_id` was chosen, and the answer goes on after it."""
        ...

    def fork(self) -> TokenConstraint:
        """One more of the same state, which goes its own way."""
        ...


class MaskSource:
    """The constraint of one answer with its mask of the next token, (ceil(vocab_size / 32),) uint32.

    When the constraint fails the mask is empty and `error` says why.
    """

    __slots__ = ("_constraint", "error", "mask")

    def __init__(self, constraint: TokenConstraint, vocab_size: int) -> None:
        self._constraint = constraint
        self.mask: Mask = np.zeros(-(-vocab_size // 32), np.uint32)
        self.error: str | None = None

    def fill(self) -> None:
        """Bring the mask up to date."""
        self.mask.fill(0)
        if self.error is not None:
            return
        try:
            self._constraint.fill_mask(self.mask)
        except Exception as error:  # whatever it was, it concerns this answer alone
            self.mask.fill(0)
            self.error = _describe(error)

    def accept(self, token_id: int) -> None:
        """Go on after `token_id`; a failure shows in `error`, and in the next mask."""
        try:
            self._constraint.accept(token_id)
        except Exception as error:
            self.error = _describe(error)


class MaskFiller:
    """Fills the masks of a step while its batch is being computed."""

    @contextmanager
    def filling(self, masks: Sequence[MaskSource]) -> Iterator[None]:
        """All `masks` are filled when the block ends, whichever way."""
        for source in masks:
            source.fill()
        yield

    def close(self) -> None:
        """No mask will be asked for any more."""


def _describe(error: Exception) -> str:
    return f"the constraint failed: {type(error).__name__}: {error}"
