"""The choice of the tokens of one answer: its parameters, history and random stream, turned into rows for `sample`.

The random number of a token depends only on the request's seed, the number of the answer and the token's place in it,
so neither the batch nor an interrupted step can change what is drawn. `TokenHistory` counts the last tokens for the
penalties, and `Repetition` finds what DRY ("don't repeat yourself") penalises; both are kept up token by token, so a
step costs the same after ten thousand tokens as after ten. Knows no logits.
"""

from __future__ import annotations

import math
import secrets
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from mlxr.core.types import SamplingParams
from mlxr.engine.request import FREE_TOKENS, Mask, MaskSource
from mlxr.kernels.sample import SampleRow, takes_likeliest

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
_NO_IDS, _NO_PENALTIES = np.zeros(0, np.int32), np.zeros(0, np.float32)
_MAX_LOG = 88.0  # of a penalty in float32
Doubles = npt.NDArray[np.float64]
_UNIFORMS = 64  # made at a time
_STEP_TOKENS = 64  # of one answer are drawn in a step at most, drafts included
_NO_HISTORY_PENALTIES = (1.0, 0.0, 0.0)


class TokenHistory:
    """The distinct tokens among the last `window` of prompt and answer (None: among all), in no particular order, with
    their counts in the answer."""

    def __init__(self, prompt: Sequence[int], window: int | None = None) -> None:
        self._window = window
        recent = prompt if window is None else prompt[max(len(prompt) - window, 0) :]
        # of a window that can be full: its tokens, and True for those of the answer
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
        """The count of each of `ids` in the answer, 0 for tokens of the prompt alone; valid until the next `add`."""
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
        """Forget one occurrence; after the last one, the row at the end takes the place of the token's row."""
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


class Repetition:
    """The tokens of prompt and answer, searched for earlier places that their end repeats.

    No repetition reaches over `breakers`, which are sequences of tokens; those of one token are never penalised.
    """

    def __init__(self, prompt: Sequence[int], params: SamplingParams, breakers: Collection[tuple[int, ...]]) -> None:
        self._params = params
        self._window = math.inf if params.dry_penalty_last_n < 0 else params.dry_penalty_last_n
        self._breakers, self._single = _index_breakers(frozenset(breakers))
        self._size = len(prompt)
        self._tokens: Ints = np.array(prompt, np.int32)
        self._unbroken = self._count_unbroken()
        # for each place but the last, how many tokens up to it equal those at the end
        self._lengths: Ints = match_end(prompt)

    def add(self, token_id: int) -> None:
        """Add one more token."""
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
        """Return distinct token ids, and what their logits lose; both empty if nothing repeats."""
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
    """Return the breakers by their last token, and those of one token. Most requests have the same thousands."""
    by_end: dict[int, list[tuple[int, ...]]] = {}
    for breaker in breakers:
        by_end.setdefault(breaker[-1], []).append(breaker)
    return by_end, frozenset(breaker[0] for breaker in breakers if len(breaker) == 1)


def find_largest_power(base: float) -> float:
    """Return the largest power of `base` that a float32 holds, or 0 if `base` is hardly above 1."""
    return _MAX_LOG / math.log(base) if base > 1.000001 else 0.0


def match_end(tokens: Sequence[int]) -> Ints:
    """Return for each place how many tokens up to it equal those at the end of `tokens`; 0 for the last place.

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


def draw_uniform(seed: int, index: int, answer: int = 0) -> float:
    """Return number `index` of the stream (`seed`, `answer`), in [0, 1) with 53 random bits.

    Counter-based: Philox-4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) with the seed as
    key; the low word of the counter is the place, the next one the answer. The raw output is used because NumPy
    promises it never to change.
    """
    return float(draw_uniforms(seed, index, 1, answer)[0])


def draw_uniforms(seed: int, index: int, count: int, answer: int = 0, word: int = 0) -> Doubles:
    """Do `draw_uniform` for `count` neighbouring places; `word` 1 to 3 are further numbers of the same places."""
    words = np.random.Philox(key=seed, counter=index + (answer << 64)).random_raw(4 * count)  # four to a place
    drawn: Doubles = (words[word::4] >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return drawn


class Sampler:
    """Sampling state of one answer to a request; `seed` is the one asked for, or else drawn from the system once."""

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        answer: int = 0,
        masks: MaskSource | None = None,
        stop_ids: Collection[int] = (),
        dry_breaker_ids: Collection[tuple[int, ...]] = (),
    ) -> None:
        self.params = params
        self.masks = masks
        self._answer = answer
        self.seed = secrets.randbits(64) if params.seed is None else params.seed
        self._drawn_tokens = 0
        self._fixed: SampleRow | None = None  # the row of all tokens, if it never changes
        self._uniforms: list[float] = []
        self._uniforms_start = 0  # the place of the first of them
        self._is_random = not takes_likeliest(params)
        self._surprise_bound = 2 * params.mirostat_tau
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        window = None if params.repeat_last_n < 0 else params.repeat_last_n
        self._history = TokenHistory(prompt, window) if penalties != _NO_HISTORY_PENALTIES and window != 0 else None
        searches = params.dry_multiplier > 0 and params.dry_penalty_last_n != 0
        self._repetition = Repetition(prompt, params, dry_breaker_ids) if searches else None
        self._stop_ids = tuple(stop_ids) if params.min_tokens else ()
        self._set_bias(dict.fromkeys(self._stop_ids, -math.inf) if masks is None else {})

    def _set_bias(self, stops: Mapping[int, float]) -> None:
        bias = {**self.params.logit_bias, **stops}
        self._bias_ids = np.array(list(bias), dtype=np.int32)
        self._bias_values = np.array(list(bias.values()), dtype=np.float32)

    @property
    def knows_ahead(self) -> bool:
        """True if the choice of a token depends only on its place and its logits, not on the tokens before it."""
        follows = self._history or self._repetition or self._is_bound or self._stop_ids or self.params.mirostat
        return not follows

    @property
    def _is_bound(self) -> bool:
        """True if the constraint, if any, may forbid tokens of the next step."""
        if self.masks is None:
            return False
        self.masks.fill()
        return self.masks.free_tokens < _STEP_TOKENS

    def row(self, ahead: int = 0) -> SampleRow:
        """Return what `sample` needs for the next token; calling it twice gives the same.

        With `ahead`, it is for a token so many places later, which works only if `knows_ahead`.
        """
        if self._fixed is None:
            row = self._make_row(ahead)
            changes = self._history or self._repetition or self.masks or self._stop_ids or self._is_random
            if not changes:
                self._fixed = row
            return row
        return self._fixed

    def _make_row(self, ahead: int) -> SampleRow:
        params, history = self.params, self._history
        row = SampleRow(params, bias_ids=self._bias_ids, bias_values=self._bias_values)
        if history is not None:
            row.history_ids, row.history_counts = history.ids, history.counts
        if self._repetition is not None:
            row.dry_ids, row.dry_penalties = self._repetition.list_penalties()
        if self._is_random:
            row.uniform, row.following_uniform = self._uniform(ahead), self._uniform(ahead + 1)
            row.surprise_bound = self._surprise_bound
        if params.xtc_probability > 0:
            place = self._drawn_tokens + ahead
            row.chance = float(draw_uniforms(self.seed, place, 1, self._answer, word=1)[0])
        row.top_logprobs = params.logprobs or 0
        if self.masks is not None:
            self.masks.fill()
            mask = self.masks.mask
            if self.masks.free_tokens:
                row.mask = self._drop_stops(np.full_like(mask, 0xFFFFFFFF)) if self._stop_ids else None
            else:
                row.mask = self._drop_stops(mask) if self._stop_ids else mask
        return row

    def _drop_stops(self, mask: Mask) -> Mask:
        """Return the mask without end tokens, unless they are all that it leaves."""
        narrow = mask.copy()
        for token_id in self._stop_ids:
            narrow[token_id // 32] &= np.uint32(~(1 << token_id % 32) & 0xFFFFFFFF)
        return narrow if narrow.any() else mask

    def _uniform(self, ahead: int) -> float:
        """Return the random number of the next token, or of the one `ahead` places later."""
        place = self._drawn_tokens + ahead - self._uniforms_start
        if place >= len(self._uniforms):
            self._uniforms_start, place = self._drawn_tokens, ahead
            self._uniforms = draw_uniforms(self.seed, self._drawn_tokens, _UNIFORMS, self._answer).tolist()
        return self._uniforms[place]

    @property
    def error(self) -> str | None:
        """The reason that no more tokens can be chosen, if the constraint failed."""
        return None if self.masks is None else self.masks.error

    def accept(self, token_id: int, surprise: float = 0.0, *, goes_on: bool = True) -> None:
        """Take in the token that was chosen with `row`, its surprise to Mirostat, and whether another one is wanted."""
        self._drawn_tokens += 1
        self._surprise_bound -= self.params.mirostat_eta * (surprise - self.params.mirostat_tau)
        if self._history is not None:
            self._history.add(token_id)
        if self._repetition is not None:
            self._repetition.add(token_id)
        if self._stop_ids and self._drawn_tokens >= self.params.min_tokens:
            self._stop_ids = ()
            self._set_bias({})
        if self.masks is not None and goes_on:
            self.masks.accept(token_id)
            if self.masks.free_tokens >= FREE_TOKENS:  # seen at most one token late
                self.masks = None
                self._set_bias(dict.fromkeys(self._stop_ids, -math.inf))
