"""The order of requests when not all can go: priorities, aging, deadlines, and a queue that says when to come back."""

from __future__ import annotations

import re

import pytest
from fake_model import FakeModel, answer_of, expect_greedy, finish_of, make_engine, run_all

from mlxr.core.errors import InvalidRequest, QueueFull
from mlxr.core.types import FinishReason, SamplingParams
from mlxr.engine.request import EngineRequest
from mlxr.engine.scheduler import AGING_S, MAX_HINT_S, Throughput
from mlxr.engine.sequence import TokenEvent


class Clock:
    """A clock that stands still until told otherwise."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens)


def finished(events: list[TokenEvent]) -> list[int]:
    return [event.sequence_id for event in events if event.finish_reason]


def test_higher_priority_is_served_first_and_equals_in_order() -> None:
    engine = make_engine(max_sequences=1)
    low, first, second, high = (
        engine.submit(EngineRequest([number], params(3), priority=priority))
        for number, priority in enumerate((-1, 0, 0, 7))
    )
    assert finished(run_all(engine)) == [high, first, second, low]


@pytest.mark.parametrize(("waited_s", "order"), [(AGING_S * 2.9, "late first"), (AGING_S * 3.1, "early first")])
def test_waiting_makes_up_for_priority(waited_s: float, order: str) -> None:
    clock = Clock()
    engine = make_engine(max_sequences=1, clock=clock)
    engine.submit(EngineRequest([1], params(8), priority=9))
    engine.step()
    early = engine.submit(EngineRequest([2], params(2)))
    clock.now = waited_s
    late = engine.submit(EngineRequest([3], params(2), priority=3))
    assert finished(run_all(engine))[1:] == ([late, early] if order == "late first" else [early, late])


def test_higher_priority_takes_the_place_of_a_running_answer() -> None:
    model = FakeModel()
    engine = make_engine(model, max_sequences=2)
    old, new = (engine.submit(EngineRequest([number], params(12), priority=0)) for number in (1, 2))
    events = engine.step() + engine.step()
    urgent = engine.submit(EngineRequest([3], params(3), priority=1))
    events += engine.step()
    assert [event.sequence_id for event in events[-2:]] == [old, urgent]  # the newer one waits
    events += run_all(engine)
    assert finished(events) == [urgent, old, new]
    for sequence_id, number in ((old, 1), (new, 2), (urgent, 3)):
        assert answer_of(events, sequence_id) == expect_greedy([number], 12 if number < 3 else 3)
    assert engine.stats().preemptions == 1


def test_equal_priority_does_not_take_a_place() -> None:
    engine = make_engine(max_sequences=1)
    ids = [engine.submit(EngineRequest([number], params(5))) for number in (1, 2)]
    assert finished(run_all(engine)) == ids
    assert engine.stats().preemptions == 0


@pytest.mark.parametrize("priority", [-101, 101])
def test_priority_out_of_range_is_refused(priority: int) -> None:
    with pytest.raises(InvalidRequest, match=f"priority: must be from -100 to 100, got {priority}"):
        make_engine().submit(EngineRequest([1], params(1), priority=priority))


def test_deadline_ends_an_answer_where_it_is() -> None:
    clock = Clock()
    engine = make_engine(max_sequences=1, clock=clock)
    running = engine.submit(EngineRequest([1], params(50), deadline_s=3))
    waiting = engine.submit(EngineRequest([2], params(50), deadline_s=3))
    patient = engine.submit(EngineRequest([3], params(2), deadline_s=1000))
    events = []
    for _ in range(5):
        clock.now += 0.75
        events += engine.step()
        engine.check()
    late = [event for event in events if event.finish_reason is FinishReason.DEADLINE]
    assert [event.sequence_id for event in late] == [running, waiting]
    assert [event.usage.completion_tokens for event in late] == [3, 0]
    assert {event.error for event in late} == {
        "the deadline of 3 s has passed; raise deadline_s or ask for fewer tokens"
    }
    events += run_all(engine)
    assert answer_of(events, running) == expect_greedy([1], 3)
    assert finish_of(events, patient) is FinishReason.LENGTH
    assert engine.stats().late_answers == 2


@pytest.mark.parametrize("deadline_s", [0.0, -1.0, float("nan")])
def test_deadline_that_has_passed_is_refused(deadline_s: float) -> None:
    with pytest.raises(InvalidRequest, match="deadline_s: must be above 0 seconds"):
        make_engine().submit(EngineRequest([1], params(1), deadline_s=deadline_s))


def test_full_queue_refuses_and_recovers() -> None:
    engine = make_engine(max_sequences=1, max_waiting=2)
    ids = [engine.submit(EngineRequest([1], params(2))) for _ in range(2)]
    with pytest.raises(QueueFull, match=re.escape("2 requests are waiting and 2 may; try again in 1 s")):
        engine.submit(EngineRequest([1], params(2)))
    engine.step()
    ids.append(engine.submit(EngineRequest([1], params(2))))
    assert finished(run_all(engine)) == ids
    assert engine.stats().refused_requests == 1


def test_hint_follows_the_measured_pace() -> None:
    clock = Clock()

    def take_two_seconds(_: object) -> None:
        clock.now += 2

    engine = make_engine(FakeModel(on_forward=take_two_seconds), max_sequences=1, max_waiting=1, clock=clock)
    engine.submit(EngineRequest([1], params(5)))
    engine.step()  # four tokens are missing, two seconds each
    engine.submit(EngineRequest([1], params(2)))
    with pytest.raises(QueueFull) as caught:
        engine.submit(EngineRequest([1], params(1)))
    assert caught.value.retry_after_s == 8
    for _ in range(6):
        engine.step()
    for _ in range(2):
        engine.submit(EngineRequest([1], params(3)))
        engine.step()
    with pytest.raises(QueueFull) as caught:
        engine.submit(EngineRequest([1], params(1)))
    assert 1 <= caught.value.retry_after_s < 8


def test_hint_stays_within_bounds() -> None:
    pace = Throughput()
    assert pace.estimate_room_s(1000) == 1
    pace.count_step(100.0)
    assert pace.estimate_room_s(1000) == MAX_HINT_S
    assert pace.estimate_room_s(0) == 1
    pace.count_end(10.0, is_idle=False)
    pace.count_end(15.0, is_idle=True)
    assert pace.estimate_room_s(1000) == 5
    pace.count_end(1000.0, is_idle=False)  # the idle time before it does not count
    assert pace.estimate_room_s(1000) == 5
