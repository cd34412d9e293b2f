"""Preemption when pages run out: which answers give theirs back and compute them again, and that no answer changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_model import FakeModel, answer_of, expect_greedy, make_engine, run_all

from mlxr.core.types import SamplingParams
from mlxr.engine.request import EngineRequest


def params(max_tokens: int, seed: int | None = None) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0 if seed is None else 1.0, seed=seed)


def test_newest_gives_its_pages_back_and_resumes() -> None:
    model = FakeModel()
    engine = make_engine(model, pages=8)
    ids = [engine.submit(EngineRequest([number] * 3, params(29))) for number in range(3)]
    events = []
    while not engine.stats().preemptions:
        events += engine.step()
        engine.check()
        assert engine.has_work
    growing = {event.sequence_id for event in engine.step()}
    assert growing == set(ids[:2])
    events = [event for event in events if event.sequence_id == ids[2]] + run_all(engine)
    assert answer_of(events, ids[2]) == expect_greedy([2] * 3, 29)
    assert engine.stats().recomputed_tokens > 0


@pytest.mark.parametrize("sharing", [True, False])
@pytest.mark.parametrize("pages", [8, 9, 11, 16, 24])
def test_all_finish_with_their_own_answers(pages: int, sharing: bool) -> None:
    engine = make_engine(pages=pages, max_sequences=8, prefix_sharing=sharing)
    ids = [engine.submit(EngineRequest([number, 5, number], params(29, seed=number))) for number in range(10)]
    events = run_all(engine)
    assert engine.stats().preemptions > 0
    for number, sequence_id in enumerate(ids):
        alone = make_engine(kv_cache="simple", pages=1)
        own = alone.submit(EngineRequest([number, 5, number], params(29, seed=number)))
        assert answer_of(events, sequence_id) == answer_of(run_all(alone), own)


def test_oldest_is_never_preempted() -> None:
    model = FakeModel()
    engine = make_engine(model, pages=8)
    oldest = engine.submit(EngineRequest([1], params(32)))
    for number in range(2, 8):
        engine.submit(EngineRequest([number], params(20)))
    steps = 0
    while True:
        events = engine.step()
        steps += 1
        assert events[0].sequence_id == oldest
        if events[0].finish_reason:
            break
    assert steps == 32  # not a step without a token of it
    run_all(engine)


def test_pages_still_in_the_cache_are_not_computed_again() -> None:
    engine = make_engine(pages=24, max_sequences=2)
    first = engine.submit(EngineRequest([1], params(24)))
    second = engine.submit(EngineRequest(range(20), params(24)))
    events = engine.step() + engine.step()
    engine._scheduler.preempt(engine._scheduler.running[-1])
    engine.check()
    assert engine.stats().cached_pages == 5
    events += run_all(engine)
    assert engine.stats().recomputed_tokens < 5  # the half-written page at most
    assert answer_of(events, first) == expect_greedy([1], 24)
    assert answer_of(events, second) == expect_greedy(range(20), 24)


def test_pages_come_back_from_the_store(tmp_path: Path) -> None:
    engine = make_engine(pages=8, max_sequences=2, store_folder=tmp_path)
    first = engine.submit(EngineRequest([1], params(32)))
    second = engine.submit(EngineRequest(range(20), params(12)))
    events = engine.step() + engine.step()
    while not engine.stats().preemptions:
        events += engine.step()
        assert engine.has_work
    engine.cache.flush()
    events += run_all(engine)
    engine.close()
    assert engine.stats().cache.disk_hit_tokens > 0
    assert answer_of(events, first) == expect_greedy([1], 32)
    assert answer_of(events, second) == expect_greedy(range(20), 12)


def test_waiting_requests_do_not_push_out_those_that_run() -> None:
    """Room is promised for what running answers will soon need, so a lack of pages does not come right at once."""
    engine = make_engine(pages=16, max_sequences=8)
    for number in range(8):
        engine.submit(EngineRequest([number] * 9, params(4)))
    run_all(engine)
    assert engine.stats().preemptions == 0
