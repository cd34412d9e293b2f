"""One request as the engine takes it: made where text becomes tokens, and never changed on its way to the answers.

Whatever a request may ask of the engine is a field of `EngineRequest`. It travels whole from the service, through the
thread that owns the engine, to each `Sequence` that answers it; code that needs a field reads it from there.

A `TokenConstraint` is the interface of a grammar: the engine asks for a mask before every token, applies it within its
one sampling call, and reports which token was chosen. The forward pass runs between the two; a constraint may prepare
the next mask meanwhile. Masks do not depend on how many tokens may still come. If an answer reaches its last token
without an end, its newest tokens are taken back and replaced by others that end it; so a constraint says in time which
tokens must not be shown yet. Knows no grammar and no text.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import KW_ONLY
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from mlxr.core.errors import TOO_COMPLEX, TooComplex
from mlxr.core.frozen import frozen
from mlxr.core.types import SamplingParams
from mlxr.engine.pictures import Pictures
from mlxr.models.adapter import Adapter

Mask = npt.NDArray[np.uint32]
FREE_TOKENS = 2**31  # more than an answer has


class TokenConstraint(Protocol):
    """A rule for the tokens of one answer. An exception of it ends that answer alone, with its text as the error.

    One thread at a time calls its methods.
    """

    @property
    def needs_end(self) -> bool:
        """True if an end token must end the answer, as it does under a grammar."""
        ...

    def count_free(self) -> int:
        """Return how many next tokens may be any, so that they need no mask; FREE_TOKENS: nothing is bounded any more.

        Called before a mask is asked for; signals from outside the answer, such as to end a thought, take effect here.
        """
        ...

    def fill_mask(self, mask: Mask) -> None:
        """Set bit i % 32 of mask[i // 32] for every token i that may come next, end tokens included.

        `mask` has a bit for every token of the model's vocabulary and comes all zero. Calling it twice is the same as
        calling it once.
        """
        ...

    def accept(self, token_id: int) -> None:
        """Take in that `token_id` was chosen and the answer goes on. An error may come with the next mask instead."""
        ...

    def look_ahead(self, tokens_left: int) -> int:
        """Return how many of the newest tokens may have to be taken back, if at most `tokens_left` may still come.

        Called before the first token and after each one. Tokens that once did not count never count later.
        """
        ...

    def close(self) -> Sequence[int]:
        """Return the tokens that end the answer in place of those that `look_ahead` counted last.

        They are no more than could come since the first of those. Empty also if nothing is to be replaced.
        """
        ...

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens could come next, one after another, as far as known; changes nothing."""
        ...

    def fork(self) -> TokenConstraint:
        """Return a copy with the same state, independent of this one."""
        ...


class MaskSource:
    """The constraint of one answer with its mask of the next token, (ceil(vocab_size / 32),) uint32.

    The answer may have `most_tokens` tokens; None: any number. Its `held_tokens` newest ones may be taken back. The
    next `free_tokens` may be any; above 0, the mask says nothing. When the constraint fails, the mask is empty
    and `error` says why.
    """

    def __init__(self, constraint: TokenConstraint, vocab_size: int, most_tokens: int | None = None) -> None:
        self._constraint, self._tokens_left = constraint, most_tokens
        self.mask: Mask = np.zeros(-(-vocab_size // 32), np.uint32)
        self.error: str | None = None
        self.free_tokens = self.held_tokens = 0
        self._is_filled = self._has_begun = False

    def fill(self) -> None:
        """Bring the mask up to date."""
        if self._is_filled:
            return
        self.mask.fill(0)
        try:
            self._begin()
            self.free_tokens = self._constraint.count_free()
            if not self.free_tokens:
                self._constraint.fill_mask(self.mask)
        except Exception as error:  # whatever it was, it concerns this answer alone
            self._fail(error)
        self._is_filled = True

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens the constraint allows, one after another; 0 after it failed."""
        if self.error is not None:
            return 0
        try:
            return self._constraint.count_allowed(token_ids)
        except Exception:  # filling the mask reports the error
            return 0

    def accept(self, token_id: int) -> None:
        """Tell the constraint that `token_id` was drawn."""
        self._is_filled = False
        try:
            self._begin()
            self._constraint.accept(token_id)
            if self._tokens_left is not None:
                self._tokens_left -= 1
                self.held_tokens = self._constraint.look_ahead(self._tokens_left)
        except Exception as error:
            self._fail(error)

    def close(self) -> Sequence[int]:
        """Return what ends the answer in place of its `held_tokens` newest tokens."""
        return self._constraint.close() if self.error is None else ()

    def _begin(self) -> None:
        if not self._has_begun and self._tokens_left is not None:
            self._constraint.look_ahead(self._tokens_left)
        self._has_begun = True

    def _fail(self, error: Exception) -> None:
        self.free_tokens = self.held_tokens = 0
        self.mask.fill(0)
        cause = TOO_COMPLEX if isinstance(error, TooComplex) else f"the constraint failed: {type(error).__name__}"
        self.error = f"{cause}: {error}"
        self._is_filled = True


Pooling = Literal["mean", "last", "cls", "rank", "none"]  # of the states of a text; see `Pool`


_USUAL_PARAMS = (
    SamplingParams()
)  # made once: they are checked whenever they are made, and texts to embed come by thousands


@frozen
class EngineRequest:
    """Asks for the answers to a prompt, or with a `pooling` for the embedding of a text."""

    token_ids: Sequence[int]  # the prompt, or the text to embed
    params: SamplingParams = _USUAL_PARAMS  # how tokens are chosen, and how many
    _: KW_ONLY
    priority: int = 0  # -100 to 100; a higher one is served first, see `Scheduler`
    client: str | None = None  # who asks: clients share the engine evenly; None: no client
    deadline_s: float | None = None  # after so many seconds the answers that still grow end with DEADLINE
    uses_cache: bool = True  # off: the prompt is computed without cached pages, and leaves none
    boundary_tokens: Collection[int] = ()  # where others may differ from here on: recurrent layers keep a state
    constraint: TokenConstraint | None = None  # each answer follows a fork of it
    scores_prompt: bool = False  # the first event of each answer has the prompt's tokens with log-probabilities
    adapter: Adapter | None = None  # updates the weights for this request alone
    pooling: Pooling | None = None  # how the states of a text to embed become one vector; None: it is a prompt
    unpooled: int = 0  # first states that are left out of a mean
    label_ids: tuple[int, ...] = ()  # of `rank`: tokens whose logits rank the text, where the model has no classifier
    second_start: int | None = None  # of two texts to rank: where the tokens of the second one begin
    dry_breaker_ids: Collection[tuple[int, ...]] = ()  # DRY counts no repetition across these sequences of tokens
    pictures: Pictures | None = None  # whose tokens are among those of the prompt
    draft_tokens: int | None = None  # most that are guessed at a time; None: as many as pay. Drafts change no token
    prediction_ids: Sequence[int] = ()  # what the answer is likely to repeat: drafts are taken from it
    reports_progress: bool = False  # events tell how much of the prompt is computed

    @property
    def answers(self) -> int:
        """The number of answers whose events are given out."""
        return 1 if self.pooling is not None else self.params.n
