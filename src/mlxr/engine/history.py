"""Which of the last tokens a request has seen, and how often its answer used each: what the penalties look at.

Kept up token by token, so that a step costs the same after ten thousand tokens as after ten. Knows no penalties.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]


class TokenHistory:
    """The distinct tokens among the last `window` of prompt and answer (None: among all), with their counts in the
    answer. Their order says nothing.
    """

    __slots__ = ("_counts", "_held", "_ids", "_recent", "_rows", "_window")

    def __init__(self, prompt: Sequence[int], window: int | None = None) -> None:
        self._window = window
        recent = prompt if window is None else prompt[max(len(prompt) - window, 0) :]
        # the tokens in the window and whether each is of the answer, where one will have to leave
        self._recent = None if window is None else deque((token_id, False) for token_id in recent)
        self._held = Counter(recent) if window is not None else Counter[int]()  # occurrences in the window
        distinct = list(dict.fromkeys(recent))
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
        """Count one more token of the answer; the oldest one leaves a window that is full."""
        if self._window == 0:
            return
        if self._recent is not None:
            if len(self._recent) == self._window:
                self._drop(*self._recent.popleft())
            self._recent.append((token_id, True))
            self._held[token_id] = self._held.get(token_id, 0) + 1
        row = self._rows.setdefault(token_id, len(self._rows))
        if row == len(self._ids):
            self._grow()
        if self._ids[row] != token_id:
            self._ids[row], self._counts[row] = token_id, 0
        self._counts[row] += 1

    def _drop(self, token_id: int, is_of_answer: bool) -> None:
        """Forget one occurrence; after the last one the row at the end takes the token's place."""
        row = self._rows[token_id]
        self._counts[row] -= is_of_answer
        self._held[token_id] -= 1
        if self._held[token_id]:
            return
        del self._held[token_id], self._rows[token_id]
        last = len(self._rows)
        if row < last:
            moved = int(self._ids[last])
            self._ids[row], self._counts[row] = moved, self._counts[last]
            self._rows[moved] = row
        self._ids[last] = -1

    def _grow(self) -> None:
        room = np.full(max(16, len(self._ids)), -1, dtype=np.int32)
        self._ids, self._counts = np.concatenate([self._ids, room]), np.concatenate([self._counts, room])
