"""A draft model's cache keeps step with the answers: a model that has the same logits is always right."""

from __future__ import annotations

import random

import pytest
from fake_drafts import draft_eagerly, expect_right_guesses, make_draft
from fake_model import FakeConfig, FakeModel, answer_of, expect_greedy, make_engine, run_all

from mlxr.core.types import SamplingParams
from mlxr.engine.engine import Engine
from mlxr.engine.request import EngineRequest
from mlxr.engine.speculative.drafters import Lookup
from mlxr.engine.speculative.planner import DraftSource

PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(autouse=True)
def _no_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    """All guesses are the model's."""
    monkeypatch.setattr(Lookup, "propose", lambda *_: [])


def make_eager(right: float = 1.0, most_tokens: int = 5, **options: int) -> Engine:
    return draft_eagerly(make_engine(draft=make_draft(right), **options), 0.0, most_tokens)


@pytest.mark.parametrize("most_tokens", [1, 3, 15])
@pytest.mark.parametrize("page_size", [1, 4, 32])
def test_a_draft_of_the_same_model_is_always_right(most_tokens: int, page_size: int) -> None:
    engine = make_eager(1.0, most_tokens, page_size=page_size)
    request = engine.submit(EngineRequest(PROMPT, SamplingParams(max_tokens=60)))
    assert answer_of(run_all(engine), request) == expect_greedy(PROMPT, 60)
    stats = engine.stats()
    assert stats.accepted_tokens == stats.drafted_tokens > 0
    assert stats.steps <= 2 + -(-60 // (most_tokens + 1))


@pytest.mark.parametrize("seed", range(12))
def test_its_pages_follow_forks_preemption_and_resumption(seed: int) -> None:
    """In a small arena with many answers, no guess of the same model is ever wrong, whatever happens to its pages."""
    chance = random.Random(seed)
    engine = make_eager(1.0, chance.choice([1, 4, 8]), page_size=chance.choice([1, 4]), pages=chance.choice([90, 128]))
    requests = {}
    for _ in range(6):
        prompt = [chance.randrange(3) for _ in range(chance.randrange(1, 30))]
        tokens, n = chance.randrange(1, 40), chance.choice([1, 3])
        requests[engine.submit(EngineRequest(prompt, SamplingParams(max_tokens=tokens, n=n)))] = prompt, tokens
    events = run_all(engine)
    expect_right_guesses(engine, requests, events)


@pytest.mark.parametrize("right", [0.0, 0.5, 0.9])
def test_wrong_guesses_change_nothing_and_leave_nothing(right: float) -> None:
    engine = make_eager(right)
    request = engine.submit(EngineRequest(PROMPT, SamplingParams(max_tokens=60)))
    assert answer_of(run_all(engine), request) == expect_greedy(PROMPT, 60)
    engine._planner.model.cache.check([])  # type: ignore[union-attr]
    again = [*PROMPT, *expect_greedy(PROMPT, 30), 7, 7]
    request = engine.submit(EngineRequest(again, SamplingParams(max_tokens=20)))
    assert answer_of(run_all(engine), request) == expect_greedy(again, 20)


def test_many_answers_get_their_drafts_in_one_step_for_each_place() -> None:
    source = make_draft(1.0)
    model = source.model
    assert isinstance(model, FakeModel)
    engine = draft_eagerly(make_engine(draft=source, max_batch_tokens=64), 0.0, 3)
    for start in range(4):
        engine.submit(EngineRequest([start, *PROMPT], SamplingParams(max_tokens=9)))
    run_all(engine)
    widths = [batch.sequences for batch in model.batches]
    assert widths == [4, 4, 4] * 2  # 1 + (1 + 3) + (1 + 3): of each place one step for all


def test_texts_beyond_the_draft_models_context_and_vocabulary_go_on_without_it() -> None:
    short = DraftSource(FakeModel(FakeConfig(context_length=20)))
    narrow = DraftSource(FakeModel(FakeConfig(vocab_size=10)))
    for draft in (short, narrow):
        engine = draft_eagerly(make_engine(draft=draft), 0.0, 5)
        request = engine.submit(EngineRequest(PROMPT, SamplingParams(max_tokens=40)))
        assert answer_of(run_all(engine), request) == expect_greedy(PROMPT, 40)


def test_a_draft_model_that_fails_is_left(caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("out of luck")

    engine = draft_eagerly(make_engine(draft=DraftSource(FakeModel(on_forward=fail))), 0.0, 5)
    request = engine.submit(EngineRequest(PROMPT, SamplingParams(max_tokens=10)))
    assert answer_of(run_all(engine), request) == expect_greedy(PROMPT, 10)
    assert "the draft model failed" in caplog.text
    assert engine._planner is not None
    assert engine._planner.model is None
