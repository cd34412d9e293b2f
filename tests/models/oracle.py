"""Drafts for a model whose answers are known: right up to a random place, as long as there is room."""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

from mlxr.engine.engine import Engine
from mlxr.engine.speculative.planner import Planner

K = TypeVar("K", bound=Hashable)
MOST_TOKENS = 6


class Oracle:
    """Continues as one of the `texts` that begin like `tokens`, a list that grows."""

    def __init__(self, tokens: list[int], texts: Iterable[list[int]]) -> None:
        self._tokens = tokens
        self._texts = [text for text in texts if text[: len(tokens)] == tokens]

    def add(self, token_id: int) -> None:
        """Nothing to add: the list already has the token."""

    def is_due(self) -> bool:
        return True

    def propose(self, most: int) -> list[int]:
        start = len(self._tokens)
        text = next(text for text in self._texts if text[:start] == self._tokens)
        chance = random.Random(start)
        return [token if chance.random() < 0.8 else 0 for token in text[start : start + most]]

    def estimate(self, tokens: int) -> list[float]:
        return [1.0] * tokens

    def release(self, *, has_ended: bool) -> None:
        """Nothing to release."""


class EagerPlanner(Planner):
    """Takes all drafts that there is room for."""

    def _choose(
        self, rates: Mapping[K, list[float]], answers: int, rows: int, room_rows: int, *, from_ahead: bool = False
    ) -> dict[K, int]:
        lengths: dict[K, int] = {}
        for key, own in rates.items():
            lengths[key] = min(len(own), room_rows - sum(lengths.values()))
        return {key: length for key, length in lengths.items() if length > 0}


def draft_by_oracle(engine: Engine, texts: list[list[int]]) -> None:
    """Let all answers of the engine have drafts from now on; `texts` are prompts with their answers, and may grow."""
    engine._planner = engine._scheduler._drafts = EagerPlanner(MOST_TOKENS)
    engine._admission.open_drafter = lambda tokens, _: Oracle(tokens, texts)


def draft_eagerly(engine: Engine, most_tokens: int) -> Engine:
    """Make the engine draft for all answers as much as there is room for, at any cost; return it."""
    planner = engine._planner
    assert planner is not None
    eager = EagerPlanner(most_tokens, planner.model)
    eager.most_answers = 16
    for _ in range(3):
        eager._costs.count(1, 1e3)
    eager._credit.seconds = 1e9
    eager.count = lambda *_, **__: None  # type: ignore[method-assign]
    if planner.model is not None:
        planner.model._rates.values = [1.0] * len(planner.model._rates.values)
    engine._planner = engine._scheduler._drafts = eager
    return engine
