"""Drafts for the fake model that are right, wrong or right up to some place, as chance has it."""

from __future__ import annotations

import random
from collections.abc import Collection, Hashable, Mapping
from typing import TypeVar

from fake_model import VOCABULARY, fake_logits

from mlxr.engine.drafts import Drafter, Planner
from mlxr.engine.engine import Engine

K = TypeVar("K", bound=Hashable)


class Guesser:
    """Knows the likeliest token, and says it with a chance of `right`."""

    def __init__(self, tokens: Collection[int], right: float) -> None:
        self._tokens, self._right = list(tokens), right

    def add(self, token_id: int) -> None:
        self._tokens.append(token_id)

    def propose(self, most: int) -> list[int]:
        history = list(self._tokens)
        chance = random.Random(str(history))
        for _ in range(most):
            is_right = chance.random() < self._right
            history.append(int(fake_logits(history).argmax()) if is_right else chance.randrange(VOCABULARY))
        return history[len(self._tokens) :]

    def estimate(self, tokens: int) -> list[float]:
        return [1.0] * tokens


class EagerPlanner(Planner):
    """Drafts as much as there is room for, whatever it costs."""

    def plan(self, drafters: Mapping[K, tuple[Drafter, int]], room_rows: int) -> dict[K, list[int]]:
        drafts: dict[K, list[int]] = {}
        for key, (drafter, most) in drafters.items():
            length = min(most, self._most_tokens, room_rows - sum(map(len, drafts.values())))
            if length > 0:
                drafts[key] = drafter.propose(length)
        return drafts


def draft_eagerly(engine: Engine, right: float, most_tokens: int) -> Engine:
    """The engine, whose answers always have drafts from now on, if it drafts at all."""
    if engine._planner is not None:
        engine._planner = engine._scheduler._drafts = EagerPlanner(most_tokens)
        engine._open_drafter = lambda tokens: Guesser(tokens, right)
    return engine
