"""Drafts make answers nearly as much faster as is possible, by a clock that a table of costs moves."""

from __future__ import annotations

import statistics
from collections import Counter

import pytest
import simulated_drafts
from simulated_drafts import (
    CPU_FLAT,
    CPU_STEEP,
    CPU_TILES,
    H200,
    MACHINES,
    Clock,
    Machine,
    answer,
    make_simulation,
    measure_gain,
)

from mlxr.engine.speculative.costs import Curve, StepCosts
from mlxr.engine.speculative.drafters import Lookup, Rates

MOST_TOKENS = 15


@pytest.fixture(autouse=True)
def _no_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    """All guesses are the model's."""
    monkeypatch.setattr(Lookup, "propose", lambda *_: [])


@pytest.mark.slow
@pytest.mark.parametrize("sureness", [0.1, 0.7])
def test_a_gpu_asks_a_draft_model_that_is_right_in_most_cases(sureness: float) -> None:
    """This holds however sure it says it is, though steps without drafts run ahead and are shorter."""
    gains = [measure_gain(H200, lambda _: 0.7, seed, sureness=sureness) for seed in range(4)]
    assert min(gains) > 1.65
    assert statistics.mean(gains) > 0.92 * H200.best_gain(0.7, MOST_TOKENS)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("agrees", "share"), [(0.5, 0.93), (0.7, 0.92), (0.9, 0.84)])
@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
@pytest.mark.slow
def test_drafts_are_about_as_long_as_is_best(machine: Machine, agrees: float, share: float) -> None:
    """This includes the time to learn, in the first of three answers; the more a draft brings, the more that counts."""
    gains = [measure_gain(machine, lambda _: agrees, seed) for seed in range(3)]
    assert statistics.mean(gains) > share * machine.best_gain(agrees, MOST_TOKENS)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("batches", [(1, 1, 1), (1,) * 9, (2, 2), (1, 2, 4, 1), (8,)], ids=str)
@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_drafts_that_are_never_right_cost_little(machine: Machine, batches: tuple[int, ...]) -> None:
    tokens = 1200 // len(batches)
    assert measure_gain(machine, lambda _: 0.0, 1, batches=batches, tokens=min(tokens, 400)) > 0.97


@pytest.mark.parametrize("machine", [H200, CPU_STEEP], ids=lambda machine: machine.name)
@pytest.mark.slow
def test_drafts_that_are_seldom_right_cost_little(machine: Machine) -> None:
    assert machine.best_gain(0.3, MOST_TOKENS) == 1
    assert statistics.mean(measure_gain(machine, lambda _: 0.3, seed) for seed in range(3)) > 0.97


@pytest.mark.parametrize("machine", [CPU_FLAT, CPU_STEEP], ids=lambda machine: machine.name)
def test_short_answers_have_drafts(machine: Machine) -> None:
    """The first draft of each answer also reads the prompt, so its time says nothing about later drafts."""
    gain = measure_gain(machine, lambda _: 0.9, 1, batches=(1,) * 30, tokens=24)
    assert gain > 0.75 * machine.best_gain(0.9, MOST_TOKENS)


@pytest.mark.parametrize("machine", [H200, CPU_FLAT, CPU_TILES], ids=lambda machine: machine.name)
def test_the_model_is_asked_again_once_it_is_right(machine: Machine) -> None:
    """A long answer; the draft model guesses none of its first half."""
    gains = [
        measure_gain(machine, lambda place: 0.7 if place > 400 else 0.0, seed, batches=(1,), tokens=800)
        for seed in range(2)
    ]
    assert min(gains) > 1.05


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_the_model_is_left_once_it_is_wrong(machine: Machine) -> None:
    """The gain in the first half of an answer is not lost in the second."""
    best = 2 / (1 + 1 / machine.best_gain(0.7, MOST_TOKENS))
    gain = measure_gain(machine, lambda place: 0.0 if place > 400 else 0.7, 1, batches=(1,), tokens=800)
    assert gain > 0.9 * best


def test_readings_that_compiled_do_not_end_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft model's first three prompts take seconds, as do numbers of rows that come for the first time."""
    monkeypatch.setattr(simulated_drafts, "PROMPT_TOKENS", 64)
    take, met, compiled_s = Clock.take, Counter[tuple[str, int]](), 0.0

    def compile_first(clock: Clock, kind: str, size: int, milliseconds: float) -> None:
        nonlocal compiled_s
        made = (kind, 0 if kind == "read" else size)
        met[made] += 1
        if met[made] <= (3 if kind == "read" else 1):
            compiled_s += 3.0
            clock.now += 3.0
        take(clock, kind, size, milliseconds)

    monkeypatch.setattr(Clock, "take", compile_first)
    engine, clock, texts = make_simulation(H200, lambda _: 0.7, 1)
    for number in range(4):
        answer(engine, clock, texts, [number], 400, None)
    compiled_s = 0.0
    seconds = sum(answer(engine, clock, texts, [number], 400, None) for number in range(4, 8))
    assert 4 * 400 * H200.plain_ms / 1e3 / (seconds - compiled_s) > 1.65


def test_the_first_time_tells_nothing_where_it_was_slow() -> None:
    curve = Curve(8, 1.0, 0.1)
    curve.count(3, 50.0)
    assert curve.estimate(3) == pytest.approx(1.2)
    curve.count(4, 1.1)
    assert curve.estimate(4) < 1.3


def test_what_is_not_measured_again_comes_back_to_the_line() -> None:
    """A number of rows that was slow long ago is taken to cost about as much as the others do."""
    curve = Curve(8, 1.0, 0.1)
    for _ in range(20):
        curve.count(4, 3.0)
    assert curve.estimate(4) > 2.5
    for _ in range(600):
        curve.count(3, 1.2)
        curve.count(5, 1.4)
    assert curve.estimate(4) == pytest.approx(1.3, abs=0.1)
    assert curve.estimate(20) == pytest.approx(curve.estimate(8) + 12 * curve.slope)


def test_steps_that_wait_have_costs_of_their_own_where_others_run_ahead() -> None:
    costs = StepCosts(16, runs_ahead=True)
    for _ in range(40):
        costs.count(1, 1.0)
        for rows in range(1, 5):
            costs.count(rows, 1.25 + 0.02 * rows, is_plain=False)
    assert costs.read_seconds(1) == pytest.approx(1.0)
    assert costs.read_seconds(1, waits=True) == pytest.approx(1.27, abs=0.02)
    assert costs.estimate(4) == pytest.approx(1.33, abs=0.03)
    assert costs.estimate_plain(4) > 1.2  # as nothing was measured, not what a step takes that waits
    assert StepCosts(16).read_seconds(1) is None


def test_after_a_rest_new_comparisons_count_more() -> None:
    common = Rates()
    rates = Rates(common)
    for _ in range(100):
        rates.count(0.1, is_right=False, is_first=True)
    assert rates.first < 0.05
    before = common.first
    rates.rest()
    for _ in range(3):
        rates.count(0.1, is_right=True, is_first=True)
    assert rates.first > 0.4
    assert common.first < before + 0.1
    assert Rates(common).first == common.first
