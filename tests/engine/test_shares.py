"""Clients share the engine: whoever sends much waits for himself, and whoever sends little waits for a step or two."""

from __future__ import annotations

import pytest
from fake_model import FakeConfig, FakeModel, answer_of, expect_greedy, make_engine, run_all

from mlxr.core.types import SamplingParams
from mlxr.engine.engine import Engine
from mlxr.engine.sequence import TokenEvent
from mlxr.engine.shares import Shares
from mlxr.kernels.ragged import RaggedBatch

TOKEN_S = 0.001


class World:
    """An engine whose steps take a millisecond per token on a clock of its own."""

    def __init__(self, **sizes: int) -> None:
        self.now = 0.0
        sizes = {"pages": 512, "page_size": 4, "max_batch_tokens": 32, "prefill_chunk_tokens": 32} | sizes
        model = FakeModel(FakeConfig(context_length=1024), on_forward=self._spend)
        self.engine: Engine = make_engine(model, clock=lambda: self.now, **sizes)
        self.first_s: dict[int, float] = {}
        self.events: list[TokenEvent] = []

    def _spend(self, batch: RaggedBatch) -> None:
        self.now += len(batch.token_ids) * TOKEN_S

    def submit(self, client: str | None, stem: int, tokens: int, answer: int = 4, priority: int = 0) -> int:
        prompt = [(stem + index * (stem + 3)) % 50 for index in range(tokens)]
        return self.engine.submit(prompt, SamplingParams(max_tokens=answer), client=client, priority=priority)

    def step(self) -> None:
        events = self.engine.step()
        self.engine.check()
        for event in events:
            self.first_s.setdefault(event.sequence_id, self.now)
        self.events += events

    def run(self) -> None:
        while self.engine.has_work:
            self.step()


def test_a_short_request_does_not_wait_for_a_flood() -> None:
    world = World()
    flood = [world.submit("flood", stem, 200) for stem in range(20)]
    for _ in range(10):
        world.step()
    asked_s = world.now
    short = world.submit("short", 7, 10)
    world.run()
    assert world.first_s[short] - asked_s < 3 * 32 * TOKEN_S
    assert sorted(flood, key=world.first_s.__getitem__) == flood


def test_a_long_prompt_lets_short_ones_by() -> None:
    world = World()
    world.submit("long", 1, 900)
    for _ in range(5):
        world.step()
    asked_s = world.now
    short = world.submit("short", 7, 10)
    world.run()
    assert world.first_s[short] - asked_s < 3 * 32 * TOKEN_S


def test_two_floods_get_the_same() -> None:
    world = World(max_sequences=4)
    mine = [world.submit("a", stem, 100) for stem in range(10)]
    theirs = [world.submit("b", stem + 20, 100) for stem in range(10)]
    world.run()
    order = sorted([*mine, *theirs], key=world.first_s.__getitem__)
    for count in range(2, 20, 2):
        assert abs(len(set(order[:count]) & set(mine)) - count // 2) <= 1


def test_answers_beyond_the_share_make_place() -> None:
    world = World(max_sequences=4)
    flood = [world.submit("flood", stem, 20, answer=100) for stem in range(8)]
    for _ in range(10):
        world.step()
    asked_s = world.now
    short = world.submit("short", 7, 10)
    world.run()
    assert world.first_s[short] - asked_s < 3 * 32 * TOKEN_S
    assert world.engine.stats().preemptions >= 1
    for stem, request in enumerate(flood):
        prompt = [(stem + index * (stem + 3)) % 50 for index in range(20)]
        assert answer_of(world.events, request) == expect_greedy(prompt, 100)


def test_one_client_keeps_the_order_and_the_priorities() -> None:
    world = World(max_sequences=1)
    ids = [world.submit("one", stem, 50) for stem in range(5)]
    urgent = world.submit("one", 9, 50, priority=1)
    world.run()
    order = sorted(world.first_s, key=world.first_s.__getitem__)
    assert order == [urgent, *ids]


def test_requests_without_a_client_come_first_come_first_served() -> None:
    world = World(max_sequences=1)
    ids = [world.submit(None, stem, 50) for stem in range(5)]
    world.run()
    assert sorted(world.first_s, key=world.first_s.__getitem__) == ids


def test_accounts_end_with_the_last_request() -> None:
    shares = Shares()
    shares.token_s = 1.0
    assert [shares.enter("a", 0, 10.0, 5, 0) for _ in range(3)] == [10.0, 15.0, 20.0]
    assert shares.enter("a", 1, 10.0, 5, 0) == 10.0
    assert shares.enter("b", 0, 11.0, 5, 0) == 11.0
    for _ in range(3):
        shares.leave("a", 0)
    assert shares.enter("a", 0, 12.0, 5, 0) == 12.0
    shares.count_step(2.0, 1)
    assert shares.token_s == pytest.approx(1.1)


def test_a_request_that_ends_early_owes_no_more() -> None:
    world = World()
    for stem in range(10):
        world.engine.cancel(world.submit("a", stem, 500))
    late = world.submit("a", 1, 10)
    other = world.submit("b", 2, 10)
    run_all(world.engine)
    assert late < other
