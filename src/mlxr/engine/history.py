"""Which tokens a request has seen, and how often its answer used each: what the penalties look at.

Kept up token by token, so that a step costs the same after ten thousand tokens as after ten. Knows no penalties.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]


class TokenHistory:
    """The distinct tokens of prompt and answer in order of appearance, with their counts in the answer."""

    __slots__ = ("_counts", "_ids", "_rows")

    def __init__(self, prompt: Iterable[int]) -> None:
        distinct = list(dict.fromkeys(prompt))
        self._rows = {token_id: row for row, token_id in enumerate(distinct)}
        self._ids: Ints = np.array(distinct, dtype=np.int32)
        self._counts: Ints = np.zeros(len(distinct), dtype=np.int32)

    @property
    def ids(self) -> Ints:
        """Distinct token ids; valid until the next `add`."""
        return self._ids[: len(self._rows)]

    @property
    def counts(self) -> Ints:
        """How often the answer has each of `ids`, 0 for tokens of the prompt alone; valid until the next `add`."""
        return self._counts[: len(self._rows)]

    def add(self, token_id: int) -> None:
        """Count one more token of the answer."""
        row = self._rows.setdefault(token_id, len(self._rows))
        if row == len(self._ids):
            self._grow()
        self._ids[row] = token_id
        self._counts[row] += 1

    def _grow(self) -> None:
        room = np.zeros(max(16, len(self._ids)), dtype=np.int32)
        self._ids, self._counts = np.concatenate([self._ids, room]), np.concatenate([self._counts, room])
