"""Drafts that bring nothing cost next to nothing: the planner asks seldom, and refuses what cannot pay."""

from __future__ import annotations

from fake_drafts import Guesser
from fake_model import make_engine, run_all

from mlxr.core.types import SamplingParams
from mlxr.engine.request import EngineRequest
from mlxr.engine.speculative.costs import StepCosts
from mlxr.engine.speculative.planner import Planner

PROMPT = [3, 1, 4, 1, 5]


class Silent(Guesser):
    """Never has a guess; counts how often it is asked, and keeps the tokens that it is told."""

    def __init__(self, tokens: list[int]) -> None:
        super().__init__(tokens, 1.0)
        self.asked = 0

    @property
    def told(self) -> list[int]:
        return self._tokens

    def is_due(self) -> bool:
        self.asked += 1
        return False


def test_who_never_guesses_is_seldom_asked_but_told_all_tokens() -> None:
    opened: list[Silent] = []

    def open_silent(tokens: list[int], _: bool) -> Silent:
        opened.append(Silent(tokens))
        return opened[-1]

    engine = make_engine()
    engine._admission.open_drafter = open_silent
    engine.submit(EngineRequest(PROMPT, SamplingParams(max_tokens=200)))
    answer = [event.token_id for event in run_all(engine)]
    drafter = opened[0]
    assert 10 < drafter.asked < len(answer) // 3
    assert drafter.told == [*PROMPT, *answer][: len(drafter.told)]
    assert len(drafter.told) > len(PROMPT) + len(answer) - 12  # all tokens up to the last time it was asked
    engine.submit(EngineRequest([9, *PROMPT], SamplingParams(max_tokens=3)))
    run_all(engine)
    assert opened[1].asked > 0  # a new answer asks at once, whatever was found before


def test_what_cannot_pay_is_not_planned() -> None:
    """The bound is the least chance at which drafts of some length make more tokens in a second."""
    costs = StepCosts(4)
    for rows, seconds in ((1, 1.0), (2, 1.5), (3, 2.0), (4, 2.5)):
        for _ in range(80):
            costs.count(1, 1.0)
            costs.count(rows, seconds, is_plain=False)
    bound = costs.find_bound(1, 1.0)
    assert 0.4 < bound < 0.6

    class Likely(Guesser):
        def estimate(self, tokens: int) -> list[float]:
            return [self._right] * tokens

    planner = Planner(4)
    planner._costs = costs
    bound = costs.find_bound(1, 1.05)
    assert planner.is_due(Likely(PROMPT, bound + 0.01), 1)
    assert not planner.is_due(Likely(PROMPT, bound - 0.01), 1)


def test_one_answer_of_several_gains_what_its_row_costs() -> None:
    """If one more row costs as much as one more answer, drafts for a single answer do not end the others sooner."""
    planner = Planner(4)
    for rows in range(2, 9):
        for _ in range(60):
            planner._costs.count(1, 1.0)
            planner._costs.count(rows, 1.0 + 0.2 * (rows - 1), is_plain=False)
    sure = [0.95, 0.95]
    assert planner._choose({"a": sure}, 1, 1, 8)
    assert planner._choose(dict.fromkeys("abcd", sure), 4, 4, 8)
    assert not planner._choose({"a": sure}, 4, 4, 8)


def test_costs_that_were_measured_out_of_order_are_no_reason_to_draft() -> None:
    """If two answers took less time than one, drafts for one of them still promise nothing."""
    planner = Planner(4)
    for second_s in (1.0, 0.6):
        planner._costs._plain.values[2] = second_s
        assert not planner._choose({"a": [1.0] * 4}, 2, 2, 8)
