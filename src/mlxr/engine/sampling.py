"""How one request chooses its tokens: its parameters, its history and its own random stream, as rows for `sample`.

The random number of a token depends on the request's seed, the number of the answer and the token's place in it alone,
so neither the batch nor an interrupted step can change what is drawn. Knows no logits.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mlxr.core.types import SamplingParams
from mlxr.engine.constraint import MaskSource
from mlxr.engine.history import TokenHistory
from mlxr.kernels.sample import NO_IDS, SampleRow

Doubles = npt.NDArray[np.float64]
_UNIFORMS = 64  # made at a time
_NO_PENALTIES = (1.0, 0.0, 0.0)


def draw_uniform(seed: int, index: int, answer: int = 0) -> float:
    """Number `index` of the stream (`seed`, `answer`), in [0, 1) with 53 random bits.

    Counter-based: Philox-4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) with the seed as
    key; the low word of the counter is the place, the next one the answer. The raw output is used because NumPy
    promises it never to change.
    """
    return float(draw_uniforms(seed, index, 1, answer)[0])


def draw_uniforms(seed: int, index: int, count: int, answer: int = 0) -> Doubles:
    """`draw_uniform` of `count` neighbouring places."""
    words = np.random.Philox(key=seed, counter=index + (answer << 64)).random_raw(4 * count)  # four to a place
    drawn: Doubles = (words[::4] >> np.uint64(11)).astype(np.float64) * 2.0**-53
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
        "_uniforms",
        "_uniforms_start",
        "masks",
        "params",
        "seed",
    )

    def __init__(
        self, params: SamplingParams, prompt: Sequence[int], answer: int = 0, masks: MaskSource | None = None
    ) -> None:
        self.params = params
        self.masks = masks
        self._answer = answer
        self.seed = secrets.randbits(64) if params.seed is None else params.seed
        self._drawn_tokens = 0
        self._fixed: SampleRow | None = None  # where all rows are the same one
        self._uniforms: list[float] = []
        self._uniforms_start = 0  # the place of the first of them
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        window = None if params.repeat_last_n < 0 else params.repeat_last_n
        self._history = TokenHistory(prompt, window) if penalties != _NO_PENALTIES and window != 0 else None
        self._bias_ids = np.array(list(params.logit_bias), dtype=np.int32)
        self._bias_values = np.array(list(params.logit_bias.values()), dtype=np.float32)

    def row(self) -> SampleRow:
        """What the operator needs for the next token; asking twice gives the same."""
        if self._fixed is None:
            row = self._make_row()
            if self._history is None and self.masks is None and self.params.temperature == 0:
                self._fixed = row
            return row
        return self._fixed

    def _make_row(self) -> SampleRow:
        params, history = self.params, self._history
        if self.masks is not None:
            self.masks.fill()
        return SampleRow(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            history_ids=NO_IDS if history is None else history.ids,
            history_counts=NO_IDS if history is None else history.counts,
            bias_ids=self._bias_ids,
            bias_values=self._bias_values,
            uniform=self._uniform(0) if params.temperature > 0 else 0.0,
            following_uniform=self._uniform(1) if params.temperature > 0 else None,
            top_logprobs=params.logprobs or 0,
            mask=None if self.masks is None else self.masks.mask,
        )

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

    def accept(self, token_id: int, *, goes_on: bool = True) -> None:
        """The token that was chosen with `row`, and whether another one is wanted."""
        self._drawn_tokens += 1
        if self._history is not None:
            self._history.add(token_id)
        if self.masks is not None and goes_on:
            self.masks.accept(token_id)
