"""DRY ("don't repeat yourself"): which tokens would continue a repetition, and how long it is already.

Kept up token by token over the answer's own history: integers only, so nothing depends on a batch. Knows no logits.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from mlxr.core.types import SamplingParams

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
_NO_IDS, _NO_PENALTIES = np.zeros(0, np.int32), np.zeros(0, np.float32)
_MAX_LOG = 88.0  # of a penalty in float32


class Repetition:
    """The history of one answer, searched for what its end repeats.

    `breakers` are sequences of tokens over which no repetition reaches; those of one token are never penalised.
    """

    __slots__ = ("_breakers", "_lengths", "_params", "_single", "_size", "_tokens", "_unbroken", "_window")

    def __init__(self, prompt: Sequence[int], params: SamplingParams, breakers: Collection[tuple[int, ...]]) -> None:
        self._params = params
        self._window = math.inf if params.dry_penalty_last_n < 0 else params.dry_penalty_last_n
        self._breakers, self._single = _index_breakers(frozenset(breakers))
        self._size = len(prompt)
        self._tokens: Ints = np.array(prompt, np.int32)
        self._unbroken = self._count_unbroken()
        # for each place but the last, how many tokens up to it are those at the end
        self._lengths: Ints = match_end(prompt)

    def add(self, token_id: int) -> None:
        """Go on with one more token."""
        if self._size == len(self._tokens):
            room = np.zeros(max(256, self._size), np.int32)
            self._tokens = np.concatenate([self._tokens, room])
            self._lengths = np.concatenate([self._lengths[: self._size], room])
        size, tokens, lengths = self._size, self._tokens, self._lengths
        first = self._find_start(size)
        lengths[first + 1 : size] = lengths[first : size - 1] + 1
        lengths[first : first + 1] = 1
        lengths[first:size] *= tokens[first:size] == token_id
        tokens[size] = token_id
        self._size = size + 1
        self._unbroken = 0 if self._ends_with_breaker(self._size) else self._unbroken + 1

    def list_penalties(self) -> tuple[Ints, Floats]:
        """Distinct token ids, and what their logits lose; both empty where nothing repeats."""
        params, first = self._params, self._find_start(self._size)
        last = self._size - 1
        reach = np.minimum(self._lengths[first:last], np.arange(1, last - first + 1, dtype=np.int32))
        reach = np.minimum(reach, min(self._unbroken, self._size))
        places = np.flatnonzero(reach >= params.dry_allowed_length)
        if not places.size:  # as after most tokens
            return _NO_IDS, _NO_PENALTIES
        ids, inverse = np.unique(self._tokens[first + 1 + places], return_inverse=True)
        longest = np.zeros(len(ids), np.int64)
        np.maximum.at(longest, inverse, reach[places])
        kept = np.array([token_id not in self._single for token_id in ids.tolist()])
        powers = np.minimum(longest[kept] - params.dry_allowed_length, find_largest_power(params.dry_base))
        penalties = np.minimum(params.dry_multiplier * params.dry_base**powers, np.finfo(np.float32).max)
        return ids[kept], penalties.astype(np.float32)

    def _find_start(self, size: int) -> int:
        return max(0, int(size - self._window)) if self._window < size else 0

    def _ends_with_breaker(self, size: int) -> bool:
        return any(
            len(breaker) <= size and self._tokens[size - len(breaker) : size].tolist() == list(breaker)
            for breaker in self._breakers.get(int(self._tokens[size - 1]), ())
        )

    def _count_unbroken(self) -> int:
        tokens = self._tokens[: self._size].tolist()
        ends = (place + 1 for place in reversed(range(self._size)) if tokens[place] in self._breakers)
        return self._size - next((end for end in ends if self._ends_with_breaker(end)), 0)


@lru_cache(16)
def _index_breakers(
    breakers: frozenset[tuple[int, ...]],
) -> tuple[dict[int, list[tuple[int, ...]]], frozenset[int]]:
    """The breakers by their last token, and those of one token. There are thousands, the same for most requests."""
    by_end: dict[int, list[tuple[int, ...]]] = {}
    for breaker in breakers:
        by_end.setdefault(breaker[-1], []).append(breaker)
    return by_end, frozenset(breaker[0] for breaker in breakers if len(breaker) == 1)


def find_largest_power(base: float) -> float:
    """The power of `base` that a float32 holds."""
    return _MAX_LOG / math.log(base) if base > 1.000001 else 0.0


def match_end(tokens: Sequence[int]) -> Ints:
    """For each place, how many tokens up to it are those at the end of `tokens`; 0 for the last place.

    The Z-algorithm over the reversed tokens, in linear time.
    """
    size = len(tokens)
    turned, found = list(reversed(tokens)), [0] * size
    left = right = 0  # the match that reaches furthest
    for place in range(1, size):
        length = min(right - place, found[place - left]) if place < right else 0
        while place + length < size and turned[length] == turned[place + length]:
            length += 1
        if place + length > right:
            left, right = place, place + length
        found[place] = length
    return np.array(found[::-1], np.int32)
