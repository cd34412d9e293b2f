"""How one request chooses its tokens: its parameters, its history and its own random stream, as rows for `sample`.

The random number of a token depends on the request's seed, the number of the answer and the token's place in it alone,
so neither the batch nor an interrupted step can change what is drawn. Knows no logits.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import numpy as np

from mlxr.core.types import SamplingParams
from mlxr.engine.constraint import MaskSource
from mlxr.engine.history import TokenHistory
from mlxr.kernels.sample import SampleRow

_NO_PENALTIES = (1.0, 0.0, 0.0)


def draw_uniform(seed: int, index: int, answer: int = 0) -> float:
    """Number `index` of the stream (`seed`, `answer`), in [0, 1) with 53 random bits.

    Counter-based: Philox-4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) with the seed as
    key; the low word of the counter is the place, the next one the answer. The raw output is used because NumPy
    promises it never to change.
    """
    counter = index + (answer << 64)
    return float(int(np.random.Philox(key=seed, counter=counter).random_raw()) >> 11) * 2.0**-53


class Sampler:
    """Sampling state of one answer to a request; `seed` is the one asked for, or else drawn from the system once."""

    __slots__ = ("_answer", "_bias_ids", "_bias_values", "_drawn_tokens", "_history", "masks", "params", "seed")

    def __init__(
        self, params: SamplingParams, prompt: Sequence[int], answer: int = 0, masks: MaskSource | None = None
    ) -> None:
        self.params = params
        self.masks = masks
        self._answer = answer
        self.seed = secrets.randbits(64) if params.seed is None else params.seed
        self._drawn_tokens = 0
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        self._history = TokenHistory(prompt if penalties != _NO_PENALTIES else ())
        self._bias_ids = np.array(list(params.logit_bias), dtype=np.int32)
        self._bias_values = np.array(list(params.logit_bias.values()), dtype=np.float32)

    def row(self) -> SampleRow:
        """What the operator needs for the next token; asking twice gives the same."""
        params = self.params
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
            history_ids=self._history.ids,
            history_counts=self._history.counts,
            bias_ids=self._bias_ids,
            bias_values=self._bias_values,
            uniform=draw_uniform(self.seed, self._drawn_tokens, self._answer) if params.temperature > 0 else 0.0,
            top_logprobs=params.logprobs or 0,
            mask=None if self.masks is None else self.masks.mask,
        )

    @property
    def error(self) -> str | None:
        """Why nothing more can be chosen, if the constraint failed."""
        return None if self.masks is None else self.masks.error

    def accept(self, token_id: int, *, goes_on: bool = True) -> None:
        """The token that was chosen with `row`, and whether another one is wanted."""
        self._drawn_tokens += 1
        self._history.add(token_id)
        if self.masks is not None and goes_on:
            self.masks.accept(token_id)
