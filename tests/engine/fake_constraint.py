"""A constraint without a grammar: the allowed tokens depend on the sum of the accepted ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fake_model import VOCABULARY, fake_logits

from mlxr.core.types import SamplingParams
from mlxr.engine.request import Mask, MaskSource
from mlxr.engine.sampler import Sampler
from mlxr.kernels.context import Context
from mlxr.kernels.sample import SampleResult, sample


class FakeConstraint:
    """After tokens whose sum is s, allows the tokens t with (s + t) % `divisor` == 0, and accepts no others.

    From token number `fails_at` on `fill_mask` raises `failure`, after `accepts` tokens `accept` raises, and after
    `ends_at` tokens nothing is allowed. After a multiple of `safe_every` tokens an answer may be closed with the tokens
    `way`.
    """

    def __init__(
        self,
        divisor: int = 3,
        fails_at: int | None = None,
        accepts: int | None = None,
        ends_at: int | None = None,
        way: tuple[int, ...] = (),
        safe_every: int = 1,
        failure: Exception | None = None,
    ) -> None:
        self.divisor, self.fails_at, self.accepts, self.ends_at = divisor, fails_at, accepts, ends_at
        self.way, self.safe_every = way, safe_every
        self.failure = failure or RuntimeError("lost the thread")
        self.accepted: list[int] = []
        self.certain: int | None = None  # the last place from which it can be closed
        self.fills = 0

    needs_end = True

    def count_free(self) -> int:
        return 0

    def fill_mask(self, mask: Mask) -> None:
        assert not mask.any()
        self.fills += 1
        if self.fails_at is not None and len(self.accepted) >= self.fails_at:
            raise self.failure
        if self.ends_at is not None and len(self.accepted) >= self.ends_at:
            return
        for token_id in range(VOCABULARY):
            if (sum(self.accepted) + token_id) % self.divisor == 0:
                mask[token_id // 32] |= 1 << token_id % 32

    def accept(self, token_id: int) -> None:
        if self.accepts is not None and len(self.accepted) >= self.accepts:
            raise ValueError(f"token {token_id} is one too many")
        assert (sum(self.accepted) + token_id) % self.divisor == 0
        self.accepted.append(token_id)

    def look_ahead(self, tokens_left: int) -> int:
        if len(self.accepted) % self.safe_every == 0 and len(self.way) <= tokens_left:
            self.certain = len(self.accepted)
        return 0 if self.certain is None else len(self.accepted) - self.certain

    def close(self) -> Sequence[int]:
        return self.way

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        total = sum(self.accepted)
        for place, token_id in enumerate(token_ids):
            total += token_id
            if total % self.divisor:
                return place
        return len(token_ids)

    def fork(self) -> FakeConstraint:
        twin = FakeConstraint(
            self.divisor, self.fails_at, self.accepts, self.ends_at, self.way, self.safe_every, self.failure
        )
        twin.accepted, twin.certain = list(self.accepted), self.certain
        return twin


def expect_constrained(
    prompt: Sequence[int], tokens: int, constraint: FakeConstraint | None, index: int = 0, **params: Any
) -> list[SampleResult]:
    """Compute the expected answer without an engine, a cache or a batch."""
    masks = None if constraint is None else MaskSource(constraint.fork(), VOCABULARY)
    sampler = Sampler(SamplingParams(**params), prompt, index, masks)
    history, answer = list(prompt), []
    for _ in range(tokens):
        (result,) = sample(Context("reference"), fake_logits(history)[None], [sampler.row()])
        sampler.accept(result.token_id, result.surprise)
        history.append(result.token_id)
        answer.append(result)
    return answer
