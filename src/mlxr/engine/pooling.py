"""From the hidden states of a text's tokens to one vector for the text, chunk by chunk.

The states are added up one after another in float64, so that neither the chunks nor the batch can change a bit.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Pooling = Literal["mean", "last", "cls"]


class Pool:
    """Hidden states of one text after the final norm: their mean, the last one, or the first (`cls`)."""

    __slots__ = ("_pooling", "_tokens", "_total")

    def __init__(self, pooling: Pooling) -> None:
        self._pooling = pooling
        self._total: npt.NDArray[np.float64] | None = None
        self._tokens = 0

    def count_wanted(self, tokens: int, *, is_first: bool, completes: bool) -> int:
        """Return the number of states that are needed at the end of a chunk of `tokens` tokens.

        `is_first` if it begins the text, `completes` if it ends it.
        """
        if self._pooling == "last":
            return int(completes)
        return tokens if self._pooling == "mean" or is_first else 0

    def add(self, hidden: Floats, *, is_first: bool) -> None:
        """The wanted states of the next chunk, (tokens, hidden size). The first comes again after a preemption."""
        if is_first:
            self._total, self._tokens = None, 0
        hidden = hidden[:1] if self._pooling == "cls" else hidden
        for state in hidden.astype(np.float64):
            self._total = state if self._total is None else self._total + state
        self._tokens += len(hidden)

    def read(self) -> Floats:
        """Return the mean of what was added, a vector (hidden size,)."""
        if self._total is None:
            raise ValueError("nothing was added to the pool")
        return (self._total / self._tokens).astype(np.float32)
