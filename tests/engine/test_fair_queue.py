"""Clients share the engine: a busy client waits for its own requests, any other waits for a step or two."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from typing import NoReturn, cast

import pytest
from fake_model import FakeConfig, FakeModel, answer_of, expect_greedy, make_engine

from mlxr.core.types import SamplingParams
from mlxr.engine.engine import Engine
from mlxr.engine.request import EngineRequest, TokenConstraint
from mlxr.engine.scheduler import MAX_OVERTAKING_S, FairQueue
from mlxr.engine.sequence import TokenEvent
from mlxr.kernels.ragged import RaggedBatch

TOKEN_S = 0.001


class World:
    """An engine whose steps take a millisecond per token, or `token_s`, on a clock of its own."""

    def __init__(self, token_s: float = TOKEN_S, **sizes: int) -> None:
        self.now, self._token_s = 0.0, token_s
        self.step_tokens: list[int] = []
        sizes = {"pages": 512, "page_size": 4, "max_batch_tokens": 32, "prefill_chunk_tokens": 32} | sizes
        model = FakeModel(FakeConfig(context_length=1024), on_forward=self._spend)
        self.engine: Engine = make_engine(model, clock=lambda: self.now, **sizes)
        self.first_s: dict[int, float] = {}
        self.events: list[TokenEvent] = []

    def _spend(self, batch: RaggedBatch) -> None:
        self.step_tokens.append(len(batch.token_ids))
        self.now += len(batch.token_ids) * self._token_s

    def submit(self, client: str | None, stem: int, tokens: int, answer: int = 4, priority: int = 0) -> int:
        prompt = [(stem + index * (stem + 3)) % 50 for index in range(tokens)]
        return self.engine.submit(
            EngineRequest(prompt, SamplingParams(max_tokens=answer), client=client, priority=priority)
        )

    def step(self) -> None:
        events = self.engine.step()
        self.engine.check()
        for event in events:
            self.first_s.setdefault(event.sequence_id, self.now)
        self.events += events

    def run(self) -> None:
        while self.engine.has_work:
            self.step()

    def expect_short_one_soon(self, steps: int) -> None:
        """Assert that after so many steps a short request of another client is answered within three; then end all."""
        for _ in range(steps):
            self.step()
        asked_s = self.now
        short = self.submit("short", 7, 10)
        self.run()
        assert self.first_s[short] - asked_s < 3 * 32 * TOKEN_S

    def order(self, ids: Iterable[int]) -> list[int]:
        """The requests in the order of their first tokens."""
        return sorted(ids, key=self.first_s.__getitem__)


def test_a_short_request_does_not_wait_for_a_flood() -> None:
    world = World()
    flood = [world.submit("flood", stem, 200) for stem in range(20)]
    world.expect_short_one_soon(steps=10)
    assert world.order(flood) == flood


def test_a_long_prompt_lets_short_ones_by() -> None:
    world = World()
    world.submit("long", 1, 900)
    world.expect_short_one_soon(steps=5)


def test_a_long_prompt_takes_the_room_of_those_who_left_little_by_little() -> None:
    world = World()
    world.submit("long", 1, 900)
    while not world.step_tokens or world.step_tokens[-1] < 32:
        world.step()
    for number in range(7):
        world.submit(f"short {number}", number + 2, 2, answer=2)
    world.step_tokens.clear()
    for _ in range(6):
        world.step()
    assert world.step_tokens == [4 + 7 * 2, 4 + 7, 8, 16, 32, 32]


def test_two_floods_get_the_same() -> None:
    world = World(max_sequences=4)
    mine = [world.submit("a", stem, 100) for stem in range(10)]
    theirs = [world.submit("b", stem + 20, 100) for stem in range(10)]
    world.run()
    order = world.order([*mine, *theirs])
    for count in range(2, 20, 2):
        assert abs(len(set(order[:count]) & set(mine)) - count // 2) <= 1


def test_answers_beyond_the_share_make_place() -> None:
    world = World(max_sequences=4)
    flood = [world.submit("flood", stem, 20, answer=100) for stem in range(8)]
    world.expect_short_one_soon(steps=10)
    assert world.engine.stats().preemptions >= 1
    for stem, request in enumerate(flood):
        prompt = [(stem + index * (stem + 3)) % 50 for index in range(20)]
        assert answer_of(world.events, request) == expect_greedy(prompt, 100)


def test_one_client_keeps_the_order_and_the_priorities() -> None:
    world = World(max_sequences=1)
    ids = [world.submit("one", stem, 50) for stem in range(5)]
    urgent = world.submit("one", 9, 50, priority=1)
    world.run()
    assert world.order([*ids, urgent]) == [urgent, *ids]


def test_requests_without_a_client_come_first_come_first_served() -> None:
    world = World(max_sequences=1)
    ids = [world.submit(None, stem, 50) for stem in range(5)]
    world.run()
    assert world.order(reversed(ids)) == ids


def test_accounts_end_with_the_last_request() -> None:
    fair_queue = FairQueue()
    fair_queue.token_s = 1.0
    assert [fair_queue.enter("a", 0, 10.0, 5, 0) for _ in range(3)] == [10.0, 15.0, 20.0]
    assert fair_queue.enter("a", 1, 10.0, 5, 0) == 10.0
    assert fair_queue.enter("b", 0, 11.0, 5, 0) == 11.0
    for _ in range(3):
        fair_queue.leave("a", 0)
    assert fair_queue.enter("a", 0, 12.0, 5, 0) == 12.0
    fair_queue.count_step(2.0, 1)
    assert fair_queue.token_s == pytest.approx(1.1)


@pytest.mark.parametrize(("token_s", "tokens"), [(0.00005, 512), (0.0002, 200), (0.01, 64)])
def test_shared_steps_take_little_time_but_not_too_few_tokens(token_s: float, tokens: int) -> None:
    fair_queue = FairQueue()
    assert fair_queue.limit_chunk(512) == 512  # nothing is known
    fair_queue.count_step(10.0, 63)
    assert fair_queue.limit_chunk(512) == 512  # nor by a step that reads the weights for only a few tokens
    fair_queue.count_step(64 * token_s, 64)
    assert fair_queue.limit_chunk(512) == tokens
    assert fair_queue.limit_chunk(96) == (96 if token_s < 0.001 else 12)


def test_the_answer_of_one_waits_little_for_prompts_of_others() -> None:
    world = World(0.0002, max_batch_tokens=512, prefill_chunk_tokens=512)
    flood = [world.submit("flood", 1, 900), world.submit("flood", 2, 900)]
    world.step()
    assert world.step_tokens == [512]  # alone it has all of a step
    world.submit("other", 5, 2, answer=8)
    world.step()  # the prompt of the other one, and half of what two clients have
    for _ in range(2):
        world.step()
    assert world.step_tokens[1:] == [100 + 2, 200 + 1, 200 + 1]
    world.submit("third", 7, 200)
    world.step()
    assert world.step_tokens[-1] == 100 + 100 + 2
    world.run()
    assert world.order(flood) == flood


def test_many_clients_have_more_than_a_few_tokens_each() -> None:
    world = World(0.01, max_batch_tokens=512, prefill_chunk_tokens=512, max_sequences=16)
    world.submit("first", 1, 64, answer=1)
    world.step()
    for number in range(12):
        world.submit(f"client {number}", number + 2, 60, answer=1)
    world.step()
    assert world.step_tokens == [64, 12 * (64 // 8)]
    world.run()


def test_a_request_that_ends_early_owes_no_more() -> None:
    world = World(max_sequences=1)
    for stem in range(10):
        world.engine.cancel(world.submit("a", stem, 500))
    late, other = world.submit("a", 1, 10), world.submit("b", 2, 10)
    world.run()
    assert world.order([other, late]) == [late, other]


def test_a_request_that_cannot_be_made_leaves_no_account() -> None:
    class Broken:
        end_tokens = (0,)
        needs_end = False

        def fork(self) -> NoReturn:
            raise RuntimeError("no fork")

    world = World(max_sequences=1)
    for _ in range(10):
        with pytest.raises(RuntimeError, match="no fork"):
            world.engine.submit(
                EngineRequest([1] * 500, SamplingParams(), client="a", constraint=cast(TokenConstraint, Broken()))
            )
    late, other = world.submit("a", 1, 10), world.submit("b", 2, 10)
    world.run()
    assert world.order([other, late]) == [late, other]


def run_storm(seed: int, sizes: dict[str, int]) -> tuple[World, dict[int, float]]:
    """Run 24 clients for 110 virtual seconds; they ask again as soon as they are answered, which is more than fits.

    Checks at each admission that nobody is overlooked; returns the world and when each request came.
    """
    world, chance = World(token_s=0.05, **sizes), random.Random(seed)
    scheduler = world.engine._scheduler
    came_s: dict[int, float] = {}
    asking: dict[int, int] = {}
    open_answers = Counter[int]()
    places = 0

    def ask(client: int) -> None:
        nonlocal places
        places += 1
        # every other client has a new name for each request, as connections do
        name = f"client {client}" if client % 2 else f"connection {places}"
        answers = chance.choice([1, 1, 1, 2, 4])
        params = SamplingParams(max_tokens=chance.choice([1, 4, 20]), n=answers, seed=client)
        prompt = [chance.randrange(50) for _ in range(chance.choice([2, 9, 30, 120]))]
        request = world.engine.submit(
            EngineRequest(prompt, params, client=name, priority=chance.choice([0, 0, 0, -1, 1]))
        )
        came_s[request], asking[request], open_answers[request] = world.now, client, answers

    for client in range(24):
        ask(client)
    seen = 0
    while world.now < 110:
        ranks = {sequence: sequence.rank[0] for sequence in scheduler.waiting}
        served = {sequence.request.client for sequence in scheduler.running}
        world.step()
        admitted = [ranks[sequence] for sequence in scheduler.running if sequence in ranks]
        served |= {sequence.request.client for sequence in scheduler.running}
        for waiting in scheduler.waiting:
            if waiting.request.client not in served and waiting in ranks:
                assert all(rank <= ranks[waiting] + MAX_OVERTAKING_S for rank in admitted)
        for event in world.events[seen:]:
            if event.finish_reason is not None:
                open_answers[event.sequence_id] -= 1
                if not open_answers[event.sequence_id]:
                    ask(asking[event.sequence_id])
        seen = len(world.events)
    return world, came_s


@pytest.mark.parametrize("sizes", [{"max_sequences": 6}, {"max_sequences": 8, "pages": 72}])
def test_nobody_is_overlooked_in_a_storm(sizes: dict[str, int]) -> None:
    """A request that comes more than 30 s after another, by the clock that priorities shift, never begins before it.

    So a request waits at most for those that were there and those that come within that time, which are as many as may
    wait; and each of them ends.
    """
    world, came_s = run_storm(1, sizes)
    assert len(came_s) > 50, "the storm is one"
    assert world.engine.stats().preemptions > 0
    world.run()
    assert world.first_s.keys() == came_s.keys()
