"""Drafts change no answer: they are found in the text, planned by what pays, checked, and dropped without a trace."""

from __future__ import annotations

import random
from typing import Any

import pytest
from fake_constraint import FakeConstraint
from fake_drafts import draft_eagerly
from fake_model import FULL, STATE, FakeConfig, FakeModel, answer_of, expect_greedy, make_engine, run_all
from test_load_invariance import BREAKERS, draw_request, run_alone, sort_events

from mlxr.core.errors import SettingError
from mlxr.core.model_settings import ModelSettings
from mlxr.core.types import FinishReason, SamplingParams
from mlxr.engine.engine import Engine
from mlxr.engine.postprocess import Drawing
from mlxr.engine.request import EngineRequest
from mlxr.engine.speculative.costs import StepCosts
from mlxr.engine.speculative.drafters import Lookup
from mlxr.engine.speculative.planner import DraftSource, Planner, can_draft

PROMPT = [3, 1, 4, 1, 5]


@pytest.mark.parametrize("right", range(8))
def test_a_draft_may_be_wrong_at_any_place(right: int) -> None:
    """Only the first `right` of a draft's seven tokens are the ones that will be drawn."""
    expected = expect_greedy(PROMPT, 24)
    engine = draft_eagerly(make_engine(), 1.0, 7)

    class Wrong:
        def __init__(self, tokens: Any, _: bool) -> None:
            self.given = len(tokens)

        def add(self, _: int) -> None:
            self.given += 1

        def is_due(self) -> bool:
            return True

        def propose(self, most: int) -> list[int]:
            start = self.given - len(PROMPT)
            guess = expected[start : start + most]
            return [token if place < right else (token + 1) % 50 for place, token in enumerate(guess)]

        def estimate(self, tokens: int) -> list[float]:
            return [1.0] * tokens

        def release(self, *, has_ended: bool) -> None:
            """Nothing is held."""

    engine._admission.open_drafter = Wrong
    request = engine.submit(EngineRequest(PROMPT, SamplingParams(max_tokens=24)))
    events = run_all(engine)
    assert answer_of(events, request) == expected
    timings = events[-1].timings
    assert timings is not None
    assert (timings.accepted_tokens == timings.drafted_tokens) == (right == 7)
    steps = -(-23 // (right + 1))  # that decode: the last token of each is drawn without a right guess
    assert timings.accepted_tokens == engine.stats().accepted_tokens == 23 - steps
    assert engine.stats().decode_tokens == 23  # the last token of an answer is never computed
    assert engine.stats().steps == 1 + steps


def test_drafts_end_with_the_answer() -> None:
    """No token comes after an end token in the middle of a draft."""
    expected = expect_greedy(PROMPT, 12)
    stop = expected[7]
    length = expected.index(stop) + 1
    engine = draft_eagerly(make_engine(eos_ids=[stop]), 1.0, 15)
    request = engine.submit(EngineRequest(PROMPT, SamplingParams(max_tokens=40)))
    events = run_all(engine)
    assert answer_of(events, request) == expected[:length]
    assert events[-1].finish_reason is FinishReason.STOP


@pytest.mark.parametrize("constraint", [FakeConstraint(7), FakeConstraint(3, fails_at=5), FakeConstraint(2, ends_at=6)])
def test_a_grammar_follows_what_is_drawn(constraint: FakeConstraint) -> None:
    """It never hears of a dropped token, and a token that it refuses in the middle of a draft ends the answer."""
    found = []
    for right in (None, 0.9):
        engine = make_engine()
        if right is not None:
            draft_eagerly(engine, right, 6)
        engine.submit(
            EngineRequest(PROMPT, SamplingParams(max_tokens=20, temperature=1, seed=3), constraint=constraint)
        )
        found.append([(event.token_id, event.finish_reason, event.error) for event in run_all(engine)])
    assert found[0] == found[1]


@pytest.mark.parametrize("seed", range(25))
def test_random_requests_with_eager_drafts(seed: int) -> None:
    """With every rule of sampling and several answers, tokens and logprobs are those of an engine without drafts."""
    chance = random.Random(seed)
    request = draw_request(chance)
    engine = draft_eagerly(make_engine(page_size=chance.choice([1, 4, 7])), chance.random(), chance.randrange(1, 9))
    engine.submit(
        EngineRequest(request.prompt, request.params, constraint=request.constraint, dry_breaker_ids=BREAKERS)
    )
    found, alone = sort_events(run_all(engine)), run_alone(request)
    assert {index: [event.token_id for event in events] for index, events in found.items()} == {
        index: [event.token_id for event in events] for index, events in alone.items()
    }


def test_rejected_tokens_are_never_found_in_the_cache() -> None:
    """A prompt with the drafted tokens in place of the drawn ones finds only the pages of tokens that were drawn."""
    engine = draft_eagerly(make_engine(page_size=2), 0.5, 8)
    answer = answer_of(run_all(engine), engine.submit(EngineRequest(PROMPT, SamplingParams(max_tokens=30))))
    for cut in range(1, len(answer)):
        wrong = [*PROMPT, *answer[:cut], (answer[cut] + 1) % 50, 9, 9]
        request = engine.submit(EngineRequest(wrong, SamplingParams(max_tokens=3)))
        events = run_all(engine)
        assert answer_of(events, request) == expect_greedy(wrong, 3)
        assert events[-1].usage.cached_tokens <= len(PROMPT) + cut


def test_text_that_repeats_itself_takes_fewer_steps() -> None:
    """By the settings' own drafts, and a clock by which a step of many tokens takes as long as one."""
    now = iter(range(10**6))
    prompt = [7, 8, 9, 10] * 4
    bias = dict.fromkeys((7,), 1000.0)  # the answer is 7 again and again
    engine = make_engine(clock=lambda: float(next(now)))
    request = engine.submit(EngineRequest(prompt, SamplingParams(max_tokens=60, logit_bias=bias)))
    assert answer_of(run_all(engine), request) == [7] * 60
    assert engine.stats().steps < 20


def test_lookup_finds_the_longest_and_latest_match() -> None:
    lookup = Lookup([1, 2, 3, 4, 5, 9, 2, 3, 6, 1, 2, 3])
    assert lookup.propose(3) == [4, 5, 9]  # after 1 2 3, not after the later 2 3
    lookup.add(4)
    assert lookup.propose(2) == [5, 9]
    lookup.add(8)
    assert lookup.propose(4) == []
    for token in (2, 3):
        lookup.add(token)
    assert lookup.propose(1) == [4]  # 1 2 3 4 8 2 3: of two equally long matches the later one, which went on with 4


def test_lookup_goes_on_with_itself() -> None:
    assert Lookup([5, 1, 2, 1, 2]).propose(5) == [1, 2, 1, 2, 1]
    assert Lookup([]).propose(5) == Lookup([1]).propose(5) == []


def test_lookup_counts_how_often_it_is_right() -> None:
    """Its estimate falls as its guesses prove wrong, even while no draft is computed."""
    chance = random.Random(1)
    free, copied = Lookup([]), Lookup([])
    text = [chance.randrange(4) for _ in range(400)]
    for token in text:
        free.add(token)
    for token in [*range(50), *range(50), *range(50)]:
        copied.add(token)
    free.propose(1)
    assert free.estimate(1)[0] < 0.5
    assert copied.estimate(1)[0] > 0.9


def test_drafts_are_as_long_as_they_pay() -> None:
    class Sure:
        def __init__(self, rate: float) -> None:
            self.rate = rate

        def add(self, token_id: int) -> None:
            raise AssertionError

        def is_due(self) -> bool:
            return True

        def propose(self, most: int) -> list[int]:
            return list(range(most))

        def estimate(self, tokens: int) -> list[float]:
            return [self.rate] * tokens

        def release(self, *, has_ended: bool) -> None:
            """Nothing is held."""

    planner = Planner(8)
    for rows in range(1, 40):
        for _ in range(40):
            planner.count(1, 1.0, 1)
            planner.count(rows, 1.0 + 0.01 * rows if rows < 5 else 3.0, 1)

    def plan(drafters: dict[str, tuple[Sure, int]], room_rows: int) -> dict[str, list[int]]:
        return planner.plan(drafters, room_rows, len(drafters), len(drafters), lambda _, draft: draft)

    sure, unsure = Sure(1.0), Sure(0.001)
    assert len(plan({"a": (Sure(0.7), 100)}, 100)["a"]) == 3  # four rows cost no more than one
    assert len(plan({"a": (sure, 2)}, 100)["a"]) == 2
    assert plan({"a": (unsure, 100)}, 100) == {}
    both = plan({"a": (unsure, 100), "b": (sure, 100)}, 100)
    assert list(both) == ["b"]
    assert plan({"a": (sure, 100)}, 0) == plan({"a": (sure, 0)}, 100) == {}


def test_costs_follow_what_is_measured() -> None:
    costs = StepCosts(8)
    for _ in range(60):
        costs.count(1, 1.0)
        costs.count(4, 2.0, is_plain=False)
    assert costs.estimate(4) == pytest.approx(2.0, rel=0.1)
    for _ in range(60):  # everything becomes slower alike, and only few steps of one row are there
        costs.count(4, 6.0)
    assert costs.estimate(4) == pytest.approx(2.0, rel=0.3)


def test_drafts_are_refused_by_name_where_they_cannot_be() -> None:
    recurrent = DraftSource(FakeModel(FakeConfig(cache_layers=(STATE,))))
    refused = [
        ("metal", None, (FULL, STATE), "device metal"),
        ("cpu", recurrent, (FULL,), "the draft model has recurrent"),
    ]
    for device, draft, layers, text in refused:
        assert not can_draft(ModelSettings(), device, draft, layers)
        with pytest.raises(SettingError, match=f"draft: ngram cannot be used: .*{text}"):
            can_draft(ModelSettings(draft="ngram"), device, draft, layers)
    assert can_draft(ModelSettings(draft="ngram"), "metal", None, (FULL,))
    assert not can_draft(ModelSettings(), "metal", None, (FULL,))
    with pytest.raises(SettingError, match="draft: little cannot be used: no such model was loaded"):
        can_draft(ModelSettings(draft="little"), "cpu", None)
    assert not can_draft(ModelSettings(draft="off"), "cpu", None)


def test_a_step_that_fails_while_it_draws_ends_its_answers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Engine = draft_eagerly(make_engine(FakeModel(FakeConfig())), 1.0, 4)
    draws = 0

    def fail(*args: Any) -> Any:
        nonlocal draws
        draws += 1
        if draws == 4:
            raise RuntimeError("no luck")
        return original(*args)

    original = Drawing._sample
    monkeypatch.setattr(Drawing, "_sample", fail)
    request = engine.submit(EngineRequest(PROMPT, SamplingParams(max_tokens=20)))
    events = run_all(engine)
    assert answer_of(events, request) == expect_greedy(PROMPT, 3)
    assert events[-1].finish_reason is FinishReason.ERROR


@pytest.mark.parametrize("right", [0.0, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("page_size", [4, 32])
def test_states_begin_anew_where_a_draft_was_wrong(right: float, page_size: int) -> None:
    """Right tokens are computed again from the state before, with the next draft; nothing is written twice."""
    expected = expect_greedy(PROMPT, 60)
    model = FakeModel(FakeConfig(cache_layers=(STATE, FULL)))
    engine = draft_eagerly(make_engine(model, page_size=page_size), right, 6)
    request = engine.submit(EngineRequest(PROMPT, SamplingParams(max_tokens=60)))
    events = run_all(engine)
    assert answer_of(events, request) == expected
    stats = engine.stats()
    assert stats.steps < 60 or right == 0.0
    assert (stats.accepted_tokens == stats.drafted_tokens) == (right == 1.0)
    assert 40 < stats.decode_tokens <= 59  # the end of an answer that ends within a draft is never written
    again = engine.submit(EngineRequest([*PROMPT, *expected[:40], 9], SamplingParams(max_tokens=9)))
    events = run_all(engine)
    assert answer_of(events, again) == expect_greedy([*PROMPT, *expected[:40], 9], 9)
    if page_size == 4:
        assert events[-1].usage.cached_tokens > 0  # the snapshots lie where pages end
