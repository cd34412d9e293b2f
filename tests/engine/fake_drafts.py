"""Drafts for the fake model that are right, wrong or right up to some place, as chance has it."""

from __future__ import annotations

import random
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import TypeVar

from fake_model import VOCABULARY, FakeModel, Floats, expect_greedy, fake_logits

from mlxr.cache.arena import ModelArena
from mlxr.engine.engine import Engine
from mlxr.engine.sequence import TokenEvent
from mlxr.engine.speculative.draft_model import DraftModel
from mlxr.engine.speculative.planner import DraftSource, Planner
from mlxr.kernels.ragged import RaggedBatch

K = TypeVar("K", bound=Hashable)
Requests = Mapping[int, tuple[list[int], int]]  # the prompt of each and how many tokens it asks for


def expect_right_guesses(engine: Engine, requests: Requests, events: Sequence[TokenEvent]) -> None:
    """Assert that all answers are those of the model alone, and that every draft was right."""
    for request, (prompt, tokens) in requests.items():
        answers: dict[int, list[int | None]] = {}
        for event in events:
            if event.sequence_id == request:
                answers.setdefault(event.index, []).append(event.token_id)
        assert all(answer == expect_greedy(prompt, tokens) for answer in answers.values())
    stats = engine.stats()
    assert stats.accepted_tokens == stats.drafted_tokens > 0


class Guesser:
    """Knows the likeliest token, and says it with a chance of `right`."""

    def __init__(self, tokens: Collection[int], right: float) -> None:
        self._tokens, self._right = list(tokens), right

    def add(self, token_id: int) -> None:
        self._tokens.append(token_id)

    def is_due(self) -> bool:
        return True

    def propose(self, most: int) -> list[int]:
        history = list(self._tokens)
        chance = random.Random(str(history))
        for _ in range(most):
            is_right = chance.random() < self._right
            history.append(int(fake_logits(history).argmax()) if is_right else chance.randrange(VOCABULARY))
        return history[len(self._tokens) :]

    def estimate(self, tokens: int) -> list[float]:
        return [1.0] * tokens

    def release(self, *, has_ended: bool) -> None:
        """Nothing to release."""


class FakeDraftModel(FakeModel):
    """The fake model with the same logits, except for a random part of the texts."""

    right = 1.0

    def forward(self, batch: RaggedBatch, arena: ModelArena) -> Floats:
        logits = super().forward(batch, arena)
        for row in logits:
            if random.Random(row.tobytes()).random() >= self.right:
                row[:] = row[::-1]
        return logits


def make_costs_known(planner: Planner) -> None:
    """Make the planner believe that any step takes 1,000 seconds, and that there is time to try drafts."""
    costs = planner._costs
    for _ in range(3):
        costs.count(1, 1e3)
    for curve in (costs._plain, costs._waiting):
        curve.values, curve.slope = [1.0] * len(curve.values), 0.0
    planner._credit.seconds = 1e9


class EagerPlanner(Planner):
    """Drafts as much as there is room for, whatever it costs."""

    most_answers = 16

    def __init__(self, most_tokens: int, model: DraftModel | None = None) -> None:
        super().__init__(most_tokens, model)
        make_costs_known(self)
        if model is not None:
            model._rates.values = [1.0] * len(model._rates.values)

    def count(self, rows: int, seconds: float, answers: int | None = None, tokens: int = 0) -> None:
        """Ignore measurements."""

    def _choose(
        self, rates: Mapping[K, list[float]], answers: int, rows: int, room_rows: int, *, from_ahead: bool = False
    ) -> dict[K, int]:
        lengths: dict[K, int] = {}
        for key, own in rates.items():
            lengths[key] = min(len(own), room_rows - sum(lengths.values()))
        return {key: length for key, length in lengths.items() if length > 0}


def draft_eagerly(engine: Engine, right: float, most_tokens: int) -> Engine:
    """Make an engine that has drafts draft for every answer, with its draft model if it has one; return it."""
    planner = engine._planner
    if planner is not None:
        engine._planner = engine._scheduler._drafts = EagerPlanner(most_tokens, planner.model)
        if planner.model is None:
            engine._admission.open_drafter = lambda tokens, _: Guesser(tokens, right)
    return engine


def make_draft(right: float) -> DraftSource:
    """A draft model whose likeliest token is right with this chance."""
    model = FakeDraftModel()
    model.right = right
    return DraftSource(model, b"fake draft")
