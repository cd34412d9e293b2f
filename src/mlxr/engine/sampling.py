"""How one request chooses its tokens: its parameters, its history and its own random stream, as rows for `sample`.

The random number of a token depends on the request's seed, the number of the answer and the token's place in it alone,
so neither the batch nor an interrupted step can change what is drawn. Knows no logits.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from mlxr.core.types import SamplingParams
from mlxr.engine.constraint import FREE_TOKENS, Mask, MaskSource
from mlxr.engine.history import TokenHistory
from mlxr.engine.repetition import Repetition
from mlxr.kernels.sample import SampleRow, takes_likeliest

Doubles = npt.NDArray[np.float64]
_UNIFORMS = 64  # made at a time
_STEP_TOKENS = 64  # of one answer are drawn in a step at most, drafts included
_NO_PENALTIES = (1.0, 0.0, 0.0)


def draw_uniform(seed: int, index: int, answer: int = 0) -> float:
    """Number `index` of the stream (`seed`, `answer`), in [0, 1) with 53 random bits.

    Counter-based: Philox-4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) with the seed as
    key; the low word of the counter is the place, the next one the answer. The raw output is used because NumPy
    promises it never to change.
    """
    return float(draw_uniforms(seed, index, 1, answer)[0])


def draw_uniforms(seed: int, index: int, count: int, answer: int = 0, word: int = 0) -> Doubles:
    """`draw_uniform` of `count` neighbouring places; `word` 1 to 3 are further numbers of the same places."""
    words = np.random.Philox(key=seed, counter=index + (answer << 64)).random_raw(4 * count)  # four to a place
    drawn: Doubles = (words[word::4] >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return drawn


class Sampler:
    """Sampling state of one answer to a request; `seed` is the one asked for, or else drawn from the system once."""

    __slots__ = (
        "_answer",
        "_bias_ids",
        "_bias_values",
        "_drawn_tokens",
        "_fixed",
        "_history",
        "_is_random",
        "_repetition",
        "_stop_ids",
        "_surprise_bound",
        "_uniforms",
        "_uniforms_start",
        "masks",
        "params",
        "seed",
    )

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
        self._fixed: SampleRow | None = None  # where all rows are the same one
        self._uniforms: list[float] = []
        self._uniforms_start = 0  # the place of the first of them
        self._is_random = not takes_likeliest(params)
        self._surprise_bound = 2 * params.mirostat_tau
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        window = None if params.repeat_last_n < 0 else params.repeat_last_n
        self._history = TokenHistory(prompt, window) if penalties != _NO_PENALTIES and window != 0 else None
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
        """Whether the choice of a token depends on its place and its logits alone, not on the tokens before it."""
        follows = self._history or self._repetition or self._is_bound or self._stop_ids or self.params.mirostat
        return not follows

    @property
    def _is_bound(self) -> bool:
        """Whether the constraint, if any, may have a word in the tokens of the next step."""
        if self.masks is None:
            return False
        self.masks.fill()
        return self.masks.free_tokens < _STEP_TOKENS

    def row(self, ahead: int = 0) -> SampleRow:
        """What the operator needs for the next token; asking twice gives the same.

        Or for a token so many places `ahead`, where the sampler knows it.
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
        """The mask without end tokens, unless they are all that it leaves."""
        narrow = mask.copy()
        for token_id in self._stop_ids:
            narrow[token_id // 32] &= np.uint32(~(1 << token_id % 32) & 0xFFFFFFFF)
        return narrow if narrow.any() else mask

    def _uniform(self, ahead: int) -> float:
        """The number of the next token, or of one that comes `ahead` of it."""
        place = self._drawn_tokens + ahead - self._uniforms_start
        if place >= len(self._uniforms):
            self._uniforms_start, place = self._drawn_tokens, ahead
            self._uniforms = draw_uniforms(self.seed, self._drawn_tokens, _UNIFORMS, self._answer).tolist()
        return self._uniforms[place]

    @property
    def error(self) -> str | None:
        """Why nothing more can be chosen, if the constraint failed."""
        return None if self.masks is None else self.masks.error

    def accept(self, token_id: int, surprise: float = 0.0, *, goes_on: bool = True) -> None:
        """The token that was chosen with `row`, its surprise to Mirostat, and whether another one is wanted."""
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
            if self.masks.free_tokens >= FREE_TOKENS:  # no longer than for one token more than needed
                self.masks = None
                self._set_bias(dict.fromkeys(self._stop_ids, -math.inf))
