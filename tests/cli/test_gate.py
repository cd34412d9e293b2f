"""bench/gate.py on made-up timings: slower code fails, noise does not, and the trees take turns to begin."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from mlxr.core.errors import MlxrError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("gate")


def make_timings(ours_s: float, noise: float, seed: int = 1) -> Callable[[bool], float]:
    """Return a timer of either tree: ours, or 1 s for the other one, each up to `noise` times longer at random."""
    draw = random.Random(seed)
    return lambda is_ours: (ours_s if is_ours else 1.0) * (1 + noise * draw.random())


def run(gate: ModuleType, rounds: int = 200, **cases: Callable[[bool], float]) -> tuple[bool, str, dict[str, int]]:
    """Run cases; return True if the gate fails, its words, and the number of rounds of each case."""
    left, results, said = iter(range(rounds)), {}, []
    for name, ratios in gate.run_rounds(cases, lambda: next(left, None) is None):
        results[name] = ratios
    slower = gate.decide(results, said.append)
    return slower, "\n".join(said), {name: len(ratios.found) for name, ratios in results.items()}


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1, 0.2])
def test_a_tenth_more_of_decode_fails(gate: ModuleType, noise: float) -> None:
    slower, said, rounds = run(gate, decode=make_timings(1.1, noise), prefill=make_timings(1.0, noise))
    assert slower
    assert "decode: " in said
    assert said.count("SLOWER than allowed") == 1
    assert "alone" not in said
    assert all(count < 200 for count in rounds.values())


@pytest.mark.parametrize("ours_s", [0.8, 1.0, 1.02])
@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3])
def test_what_loses_little_passes(gate: ModuleType, ours_s: float, noise: float) -> None:
    slower, said, _ = run(gate, decode=make_timings(ours_s, noise), prefill=make_timings(1.0, noise, seed=2))
    assert not slower, said


def test_a_quiet_machine_needs_few_rounds(gate: ModuleType) -> None:
    assert run(gate, decode=make_timings(1.1, 0.01))[2] == {"decode": 8}
    assert run(gate, decode=make_timings(1.0, 0.01))[2] == {"decode": 8}


def test_a_single_wild_round_decides_nothing(gate: ModuleType) -> None:
    times = iter([9.0, *[1.0] * 1000])
    assert not run(gate, decode=lambda is_ours: next(times) if is_ours else 1.0)[0]


def test_when_the_time_is_over_the_median_decides_and_that_is_said(gate: ModuleType) -> None:
    slower, said, rounds = run(gate, 3, decode=make_timings(1.1, 0.01))
    assert (slower, rounds) == (True, {"decode": 3})
    assert "by the median alone" in said
    assert not run(gate, 3, decode=make_timings(1.01, 0.01))[0]


def test_who_begins_changes_from_round_to_round(gate: ModuleType) -> None:
    asked: list[bool] = []

    def measure(is_ours: bool) -> float:
        asked.append(is_ours)
        return 1.0

    run(gate, 3, decode=measure)
    assert asked == [True, False, False, True, True, False]


def test_the_interval_holds_the_median(gate: ModuleType) -> None:
    draw = random.Random(5)
    held = 0
    for _ in range(300):
        low, high = gate.Ratios([draw.gauss(1, 0.1) for _ in range(15)]).find_interval()
        held += low < 1 < high
    assert held > 290
    assert gate.Ratios([1.0] * 7).find_interval() == (0.0, float("inf"))


def test_a_step_that_sleeps_takes_longer(gate: ModuleType, gguf: Path) -> None:
    """The hook that shows the gate failing adds half of each step's time."""
    side = importlib.import_module("comparison.ours").Side()
    try:
        side.open(str(gguf), 1, {})
        side.start(64, 1, None)
        side.hold(1, 16)
        side.decode(8)
        seconds: dict[float, list[float]] = {0.0: [], 1.0: []}
        for share in (0.0, 1.0) * 6:  # in turns, as others may take the processor meanwhile
            side.drag(share)
            seconds[share].append(side.decode(8))
        assert min(seconds[1.0]) > 1.4 * min(seconds[0.0])
    finally:
        side.close()


def test_a_commit_is_found_or_the_reason_is_told(gate: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_git(*arguments: str) -> str:
        if arguments[0] == "describe":
            raise MlxrError("No names found")
        return f"commit of {arguments[-1]}"

    monkeypatch.setattr(gate, "run_git", run_git)
    assert gate.find_commit("v1") == "commit of v1^{commit}"
    with pytest.raises(MlxrError, match="there is no release to compare with, so name a commit"):
        gate.find_commit(None)
