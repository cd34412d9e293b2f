"""The answer that a request expects is a source of drafts, and is compared with the real one token by token."""

from __future__ import annotations

import random

import pytest
from fake_drafts import EagerPlanner, make_draft
from fake_model import answer_of, expect_greedy, make_engine, run_all

from mlxr.core.types import SamplingParams
from mlxr.engine.engine import Engine
from mlxr.engine.request import EngineRequest
from mlxr.engine.speculative.drafters import Lookup, PredictedLookup, Prediction, expect

PROMPT = [3, 1, 4, 1, 5]
TEXT = [7, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]


@pytest.mark.parametrize(
    ("answer", "right", "goes_on"),
    [
        ([], 0, 7),
        (TEXT[:5], 5, 5),
        ([*TEXT[:5], 99], 5, None),
        ([*TEXT[:5], 99, 6, 7], 5, 8),  # in place of one
        ([*TEXT[:5], 99, 98, 97, 5, 6, 7], 6, 8),  # before it
        ([*TEXT[:5], 9, 10, 11], 6, 12),  # without four
        ([99, 98, 2, 3], 0, 4),  # its beginning was wrong
        (TEXT, 16, None),
        ([*TEXT, 2, 3, 4], 17, 5),  # once more from an earlier place
    ],
)
def test_the_place_is_found_again(answer: list[int], right: int, goes_on: int | None) -> None:
    prediction = Prediction(TEXT, answer)
    assert prediction.right_tokens == right
    assert prediction.propose(1) == ([] if goes_on is None else [goes_on])


def test_of_equal_places_the_next_one_counts() -> None:
    text = [1, 2, 10, 11, 12, 13, 14, 1, 2, 20, 21, 22, 23, 24, 1, 2, 30]
    assert Prediction(text, [*text[:7], 9, 1, 2]).propose(2) == [20, 21]
    assert Prediction(text, [*text[:14], 9, 1, 2]).propose(2) == [30]
    assert Prediction([5, 1, 2, 8, 6, 1, 2, 9], [0, 6, 1, 2]).propose(1) == [9]  # as more of it is the same


def test_the_better_source_guesses() -> None:
    """The expected answer comes first; once its guesses are wrong again and again, repetitions of the text do."""
    prediction = Prediction([1, 2, 3])
    lookup = PredictedLookup([4, 5, 6, 4, 5], prediction)
    assert lookup.is_due()
    assert lookup.propose(9) == [1, 2, 3]
    assert lookup.estimate(2) == [prediction.rate] * 2
    lookup.add(6)
    assert lookup.propose(2) == [4, 5]
    assert lookup.estimate(1) == Lookup([4, 5, 6, 4, 5, 6]).estimate(1)
    other = object()
    assert expect(other, [], prediction) is other  # type: ignore[arg-type]


def make_eager(*, has_model: bool) -> Engine:
    engine = make_engine(draft=make_draft(0.5) if has_model else None)
    assert engine._planner is not None
    engine._planner = engine._scheduler._drafts = EagerPlanner(8, engine._planner.model)
    return engine


@pytest.mark.parametrize("has_model", [False, True])
@pytest.mark.parametrize("changes", [0, 2])
def test_an_answer_that_was_expected_takes_fewer_steps(changes: int, *, has_model: bool) -> None:
    expected = expect_greedy(PROMPT, 60)
    text = list(expected)
    for change in range(changes):
        text[20 * (change + 1)] = (text[20 * (change + 1)] + 1) % 50
    engine = make_eager(has_model=has_model)
    request = engine.submit(EngineRequest(PROMPT, SamplingParams(max_tokens=60), prediction_ids=text))
    events = run_all(engine)
    assert answer_of(events, request) == expected
    assert engine.stats().steps < 20 + 4 * changes
    timings = events[-1].timings
    assert timings is not None
    assert timings.expected_tokens + timings.missed_tokens == 60
    assert timings.expected_tokens >= 60 - 4 * changes


@pytest.mark.parametrize("seed", range(8))
def test_the_counts_depend_on_the_answer_alone(seed: int) -> None:
    """They are the same without drafts, and for each of several answers."""
    chance = random.Random(seed)
    text = tuple(token for token in expect_greedy(PROMPT, 40) if chance.random() < 0.9)
    params = SamplingParams(max_tokens=40, temperature=chance.choice([0.0, 0.5]), seed=1, n=2)
    found = []
    for engine in (make_eager(has_model=False), make_eager(has_model=True), make_engine(drafts=False)):
        engine.submit(EngineRequest(PROMPT, params, prediction_ids=text))
        last = [event for event in run_all(engine) if event.timings is not None]
        found.append([(event.index, event.timings.expected_tokens, event.timings.missed_tokens) for event in last])
    assert [sorted(rows) for rows in found] == [sorted(found[0])] * 3
