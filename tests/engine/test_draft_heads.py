"""A head's pages keep step with the answers, and get the right states: a head that knows them is always right."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from fake_drafts import draft_eagerly, expect_right_guesses
from fake_head import FakeHead, TelltaleModel, make_head
from fake_model import FULL, STATE, FakeConfig, answer_of, expect_greedy, make_engine, run_all

from mlxr.core.errors import SettingError
from mlxr.core.types import SamplingParams
from mlxr.engine.engine import Engine
from mlxr.engine.request import EngineRequest
from mlxr.engine.speculative.drafters import KEPT_ROWS, Lookup, StateTail
from mlxr.engine.speculative.planner import DraftSource, HeadSource

PROMPT = [3, 1, 4, 1, 5]
LAYERS = {"full": (FULL, FULL), "recurrent": (FULL, STATE)}


@pytest.fixture(autouse=True)
def _no_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    """All guesses are the head's."""
    monkeypatch.setattr(Lookup, "propose", lambda *_: [])


def make_eager(right: float = 1.0, most_tokens: int = 5, layers: str = "full", **options: Any) -> Engine:
    model = TelltaleModel(FakeConfig(cache_layers=LAYERS[layers]))
    options = {"draft": make_head(right), **options}
    return draft_eagerly(make_engine(model, **options), 0.0, most_tokens)


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("most_tokens", [1, 3, 15])
@pytest.mark.parametrize("page_size", [2, 4, 32])
def test_a_head_that_knows_is_always_right(most_tokens: int, page_size: int, layers: str) -> None:
    engine = make_eager(1.0, most_tokens, layers, page_size=page_size)
    request = engine.submit(EngineRequest(PROMPT, SamplingParams(max_tokens=60)))
    assert answer_of(run_all(engine), request) == expect_greedy(PROMPT, 60)
    stats = engine.stats()
    assert stats.accepted_tokens == stats.drafted_tokens > 0
    if layers == "full":
        assert stats.steps <= 2 + -(-60 // (most_tokens + 1))


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("seed", range(8))
def test_its_pages_follow_forks_preemption_and_resumption(seed: int, layers: str) -> None:
    """In a small arena with many answers, no guess of a head that knows is ever wrong, whatever happens to pages."""
    chance = random.Random(seed)
    most, page_size = chance.choice([1, 4, 8]), chance.choice([1, 4] if layers == "full" else [4, 8])
    engine = make_eager(1.0, most, layers, page_size=page_size, pages=chance.choice([90, 128]))
    requests = {}
    shared = [chance.randrange(3) for _ in range(12)]
    for _ in range(6):
        prompt = [*shared[: chance.randrange(12)], *(chance.randrange(3) for _ in range(chance.randrange(1, 30)))]
        tokens, n = chance.randrange(1, 40), chance.choice([1, 3])
        requests[engine.submit(EngineRequest(prompt, SamplingParams(max_tokens=tokens, n=n)))] = prompt, tokens
    events = []
    while engine.has_work:
        events += engine.step()
        engine.check()
        if engine._scheduler.running and chance.random() < 0.1:
            engine._scheduler.preempt(chance.choice(engine._scheduler.running))
    expect_right_guesses(engine, requests, events)


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("right", [0.0, 0.5, 0.9])
def test_wrong_guesses_change_nothing_and_leave_nothing(right: float, layers: str) -> None:
    engine = make_eager(right, 5, layers)
    request = engine.submit(EngineRequest(PROMPT, SamplingParams(max_tokens=60)))
    assert answer_of(run_all(engine), request) == expect_greedy(PROMPT, 60)
    engine._planner.model.cache.check([])  # type: ignore[union-attr]
    again = [*PROMPT, *expect_greedy(PROMPT, 30), 7, 7]
    request = engine.submit(EngineRequest(again, SamplingParams(max_tokens=20)))
    assert answer_of(run_all(engine), request) == expect_greedy(again, 20)


def test_a_prompt_found_in_the_cache_has_its_head_there_too() -> None:
    """The head computes only the new part."""
    head = FakeHead()
    engine = make_eager(draft=HeadSource(head, b"head"), prefill_chunk_tokens=64, max_batch_tokens=64)
    prompt = [n % 7 for n in range(40)]
    run_all_of(engine, prompt)
    head.rows.clear()
    longer = [*prompt, *expect_greedy(prompt, 8), 5]
    run_all_of(engine, longer)
    assert head.rows[0] < 16
    assert engine.stats().accepted_tokens == engine.stats().drafted_tokens > 0


def run_all_of(engine: Engine, prompt: list[int]) -> None:
    request = engine.submit(EngineRequest(prompt, SamplingParams(max_tokens=8)))
    assert answer_of(run_all(engine), request) == expect_greedy(prompt, 8)


def test_states_of_a_long_prompt_are_kept_for_its_end_alone() -> None:
    config = FakeConfig(cache_layers=(FULL,), context_length=2 * KEPT_ROWS)
    head = FakeHead(config=config)
    model = TelltaleModel(config)
    engine = make_engine(
        model, pages=256, draft=HeadSource(head, b""), prefill_chunk_tokens=512, max_batch_tokens=512, page_size=8
    )
    engine = draft_eagerly(engine, 0.0, 5)
    run_all_of(engine, [n % 9 for n in range(KEPT_ROWS + 100)])
    assert head.rows[0] == KEPT_ROWS - 1
    assert engine.stats().accepted_tokens == engine.stats().drafted_tokens > 0


def test_requests_that_want_no_drafts_keep_no_states() -> None:
    engine = make_eager()
    request = engine.submit(EngineRequest(PROMPT, SamplingParams(max_tokens=9), draft_tokens=0))
    assert all(sequence.tail is None for sequence in engine._scheduler.waiting)
    assert answer_of(run_all(engine), request) == expect_greedy(PROMPT, 9)
    assert engine.stats().drafted_tokens == 0


def test_a_head_that_fails_is_left(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_eager(draft=HeadSource(FakeHead(fails=True)))
    request = engine.submit(EngineRequest(PROMPT, SamplingParams(max_tokens=10)))
    assert answer_of(run_all(engine), request) == expect_greedy(PROMPT, 10)
    assert "the draft model failed" in caplog.text


def test_a_layer_that_drafts_must_be_there_where_it_is_asked_for() -> None:
    from mlxr.core.model_settings import ModelSettings
    from mlxr.engine.speculative.planner import can_draft

    settings = ModelSettings(draft="mtp")
    assert can_draft(settings, "cpu", make_head())
    for draft in (None, DraftSource(TelltaleModel())):
        with pytest.raises(SettingError, match="draft: mtp cannot be used: the model has no layer that drafts"):
            can_draft(settings, "cpu", draft)


def test_a_prompt_whose_head_is_gone_begins_with_the_first_state() -> None:
    """The model finds its pages and the head finds none: all guesses are right, from fewer places."""
    head = FakeHead()
    engine = make_eager(draft=HeadSource(head, b"head"), prefill_chunk_tokens=64, max_batch_tokens=64)
    prompt = [n % 7 for n in range(40)]
    request = engine.submit(EngineRequest(prompt, SamplingParams(max_tokens=8), draft_tokens=0))
    answer = answer_of(run_all(engine), request)
    run_all_of(engine, [*prompt, *answer, 5])
    assert head.rows[0] < 16
    assert engine.stats().accepted_tokens == engine.stats().drafted_tokens > 0


def test_a_tail_has_the_last_states_one_after_another() -> None:
    tail, chance, first = StateTail(), random.Random(1), 0
    for _ in range(500):
        start = max(0, tail.stop + chance.choice([0, 0, 0, -3, 1]))
        rows = np.array([[float(n)] for n in range(start, start + chance.choice([1, 2, 40]))], np.float32)
        first, stop = (start if start > tail.stop else first), max(tail.stop, start + len(rows))
        tail.add(start, rows)
        assert tail.stop == stop
        assert tail.read(tail.start)[:, 0].tolist() == list(range(tail.start, stop))
        assert min(KEPT_ROWS, stop - first) <= stop - tail.start < KEPT_ROWS + 40
        if chance.random() < 0.2:
            first = chance.randrange(tail.start, stop)
            tail.forget(first)
            assert tail.start <= first
            assert tail.read(first)[:, 0].tolist() == list(range(first, stop))
            first = tail.start
