"""Requests with constraints: masks are applied within the batch, states survive everything, failures stay alone."""

from __future__ import annotations

import pytest
from fake_constraint import FakeConstraint, expect_constrained
from fake_drafts import draft_eagerly
from fake_model import FakeModel, answer_of, expect_greedy, finish_of, make_engine, run_all

from mlxr.core.errors import InvalidRequest, TooComplex
from mlxr.core.types import FinishReason, SamplingParams, TokenLogprob
from mlxr.engine.request import EngineRequest
from mlxr.engine.sequence import TokenEvent

PROMPT = [3, 1, 4, 1, 5]
GREEDY = SamplingParams(max_tokens=12)


def expect(prompt: list[int], tokens: int, constraint: FakeConstraint, **params: object) -> list[int]:
    return [result.token_id for result in expect_constrained(prompt, tokens, constraint, **params)]


def tokens_of(events: list[TokenEvent], request_id: int, index: int = 0) -> list[int]:
    return answer_of([event for event in events if event.index == index], request_id)


def test_answers_follow_their_constraints_in_one_batch() -> None:
    model = FakeModel()
    engine = make_engine(model)
    free = engine.submit(EngineRequest(PROMPT, GREEDY))
    constraints = {
        engine.submit(EngineRequest(PROMPT, GREEDY, constraint=FakeConstraint(divisor))): divisor
        for divisor in (2, 3, 7)
    }
    events = run_all(engine)
    assert answer_of(events, free) == expect_greedy(PROMPT, 12)
    for request_id, divisor in constraints.items():
        assert answer_of(events, request_id) == expect(PROMPT, 12, FakeConstraint(divisor))
    assert any(batch.sequences == 4 for batch in model.batches)


def test_the_constraint_given_stays_as_it_was_and_serves_again() -> None:
    engine, constraint = make_engine(), FakeConstraint()
    first, second = (engine.submit(EngineRequest(PROMPT, GREEDY, constraint=constraint)) for _ in range(2))
    events = run_all(engine)
    assert answer_of(events, first) == answer_of(events, second)
    assert (constraint.accepted, constraint.fills) == ([], 0)


def test_each_of_n_answers_has_its_own_state() -> None:
    engine = make_engine()
    params = {"temperature": 1.0, "seed": 5}
    request_id = engine.submit(
        EngineRequest(PROMPT, SamplingParams(max_tokens=9, n=4, **params), constraint=FakeConstraint(4))
    )
    events = run_all(engine)
    answers = [tokens_of(events, request_id, index) for index in range(4)]
    assert answers == [expect(PROMPT, 9, FakeConstraint(4), index=index, **params) for index in range(4)]
    assert len(set(map(tuple, answers))) == 4


def test_logprobs_are_those_among_the_tokens_allowed() -> None:
    engine = make_engine()
    params = SamplingParams(max_tokens=3, logprobs=2)
    engine.submit(EngineRequest(PROMPT, params, constraint=FakeConstraint(7)))
    for event, expected in zip(
        run_all(engine), expect_constrained(PROMPT, 3, FakeConstraint(7), logprobs=2), strict=True
    ):
        assert (event.logprob, list(event.top)) == (expected.logprob, expected.top)


def test_preempted_answers_resume_as_if_nothing_had_happened() -> None:
    engine = make_engine()
    params = {"temperature": 1.0, "seed": 8}
    request_id = engine.submit(
        EngineRequest(PROMPT, SamplingParams(max_tokens=20, n=2, **params), constraint=FakeConstraint())
    )
    events = []
    while engine.has_work:
        events += engine.step()
        if engine.stats().steps % 3 == 0 and engine.stats().running_sequences:
            engine._scheduler.preempt(engine._scheduler.running[-1])
    assert engine.stats().preemptions > 5
    for index in (0, 1):
        assert tokens_of(events, request_id, index) == expect(PROMPT, 20, FakeConstraint(), index=index, **params)


def test_an_interrupted_step_can_be_repeated() -> None:
    model = FakeModel()
    engine = make_engine(model)
    calls = 0

    def interrupt_every_other(batch: object) -> None:
        nonlocal calls
        calls += 1
        if calls % 2:
            raise KeyboardInterrupt

    model.on_forward = interrupt_every_other
    request_id = engine.submit(EngineRequest(PROMPT, GREEDY, constraint=FakeConstraint()))
    events: list[TokenEvent] = []
    while engine.has_work:
        try:
            events += engine.step()
        except KeyboardInterrupt:
            engine.check()
    assert answer_of(events, request_id) == expect(PROMPT, 12, FakeConstraint())


@pytest.mark.parametrize(
    ("constraint", "tokens", "error"),
    [
        (FakeConstraint(fails_at=0), 0, "the constraint failed: RuntimeError: lost the thread"),
        (FakeConstraint(fails_at=4), 4, "the constraint failed: RuntimeError: lost the thread"),
        (
            FakeConstraint(fails_at=4, failure=TooComplex("too many items")),
            4,
            "the grammar became too complex while the answer grew: too many items",
        ),
        (FakeConstraint(accepts=3), 4, "the constraint failed: ValueError: token {} is one too many"),
        (FakeConstraint(ends_at=5), 5, "no token is possible: the model, the logit_bias and the grammar together rule"),
    ],
)
def test_a_constraint_that_fails_ends_its_answer_alone(constraint: FakeConstraint, tokens: int, error: str) -> None:
    engine = make_engine()
    failing = engine.submit(EngineRequest(PROMPT, GREEDY, constraint=constraint))
    others = [
        engine.submit(EngineRequest(PROMPT, GREEDY, constraint=FakeConstraint())),
        engine.submit(EngineRequest(PROMPT, GREEDY)),
    ]
    events = run_all(engine)
    answer = answer_of(events, failing)
    assert answer == expect(PROMPT, 12, FakeConstraint())[:tokens]
    last = [event for event in events if event.sequence_id == failing][-1]
    assert (last.finish_reason, last.token_id) == (FinishReason.ERROR, None)
    assert (last.error or "").startswith(error.format(*answer[-1:]))
    assert answer_of(events, others[0]) == expect(PROMPT, 12, FakeConstraint())
    assert answer_of(events, others[1]) == expect_greedy(PROMPT, 12)
    assert engine.stats().failed_steps == 0


def test_an_impossible_bias_ends_its_answer_alone() -> None:
    engine = make_engine()
    nothing = SamplingParams(max_tokens=4, logit_bias=dict.fromkeys(range(50), float("-inf")))
    failing, other = engine.submit(EngineRequest(PROMPT, nothing)), engine.submit(EngineRequest(PROMPT, GREEDY))
    events = run_all(engine)
    assert finish_of(events, failing) is FinishReason.ERROR
    assert answer_of(events, other) == expect_greedy(PROMPT, 12)


def test_a_failed_step_ends_constrained_answers_with_the_others(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(FakeModel(on_forward=lambda batch: (_ for _ in ()).throw(RuntimeError("broken step"))))
    request_id = engine.submit(EngineRequest(PROMPT, GREEDY, constraint=FakeConstraint()))
    assert finish_of(run_all(engine), request_id) is FinishReason.ERROR
    assert "RuntimeError: broken step" in caplog.text


def test_end_tokens_that_are_allowed_end_the_answer() -> None:
    (first, *_), tokens = expect_constrained(PROMPT, 1, FakeConstraint(7)), FakeConstraint(7)
    engine = make_engine(eos_ids=[first.token_id])
    request_id = engine.submit(EngineRequest(PROMPT, GREEDY, constraint=tokens))
    events = run_all(engine)
    assert answer_of(events, request_id) == [first.token_id]
    assert finish_of(events, request_id) is FinishReason.STOP


def test_a_grammar_cannot_ignore_its_end() -> None:
    with pytest.raises(InvalidRequest, match="ignore_eos: cannot be combined with a grammar"):
        make_engine().submit(EngineRequest(PROMPT, SamplingParams(ignore_eos=True), constraint=FakeConstraint()))


def test_the_best_of_several_constrained_answers() -> None:
    engine = make_engine()
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=3, best_of=4)
    request_id = engine.submit(EngineRequest(PROMPT, params, constraint=FakeConstraint(4)))
    answers = [expect_constrained(PROMPT, 6, FakeConstraint(4), index, temperature=1.0, seed=3) for index in range(4)]
    best = max(answers, key=lambda answer: sum(result.logprob for result in answer))
    assert answer_of(run_all(engine), request_id) == [result.token_id for result in best]


def expect_closed(constraint: FakeConstraint, most_tokens: int, index: int = 0, **params: object) -> list[int]:
    """Return the tokens of an answer that reaches its end: the part that may stay, then the way."""
    drawn = expect_constrained(PROMPT, most_tokens, constraint, index, **params)
    places = range(0, most_tokens - len(constraint.way) + 1, constraint.safe_every)
    return [*(result.token_id for result in drawn[: places[-1]]), *constraint.way]


@pytest.mark.parametrize("way", [(), (7,), (7, 8, 9), (1,) * 12])
@pytest.mark.parametrize("safe_every", [1, 5])
def test_an_answer_without_an_end_is_closed_in_its_last_tokens(way: tuple[int, ...], safe_every: int) -> None:
    engine = make_engine()
    constraint = FakeConstraint(way=way, safe_every=safe_every)
    params = SamplingParams(max_tokens=12, logprobs=2, temperature=1.0, seed=2)
    request_id = engine.submit(EngineRequest(PROMPT, params, constraint=constraint))
    events, expected = run_all(engine), expect_closed(constraint, 12, temperature=1.0, seed=2)
    assert answer_of(events, request_id) == expected
    assert finish_of(events, request_id) is FinishReason.LENGTH
    counts = [event.usage.completion_tokens for event in events if event.token_id is not None]
    assert counts == list(range(1, len(expected) + 1))
    assert events[-1].usage.completion_tokens == len(expected)
    for event, token_id in zip(events[len(expected) - len(way) :], way, strict=False):
        assert (event.logprob, event.top) == (0.0, (TokenLogprob(token_id, 0.0),))
    engine.check()
    assert engine.stats().used_pages == 0


def test_nobody_is_shown_what_may_be_taken_back() -> None:
    engine, constraint = make_engine(), FakeConstraint(way=(7, 8, 9), safe_every=4)
    engine.submit(EngineRequest(PROMPT, GREEDY, constraint=constraint))
    told, steps = [], 0
    while engine.has_work:
        told.append(sum(event.token_id is not None for event in engine.step()))
        steps += 1
    assert told == [0, 0, 0, 4, 0, 0, 0, 4, 0, 0, 0, 3]


def test_what_is_shown_before_a_cancel_begins_the_answer() -> None:
    engine, constraint = make_engine(), FakeConstraint(way=(7, 8, 9), safe_every=4)
    request_id = engine.submit(EngineRequest(PROMPT, GREEDY, constraint=constraint))
    events = [event for _ in range(6) for event in engine.step()] + engine.cancel(request_id)
    assert answer_of(events, request_id) == expect_closed(constraint, 12)[:4]
    assert events[-1].usage.completion_tokens == 4


def test_closed_answers_are_ranked_by_what_they_have() -> None:
    engine, constraint = make_engine(), FakeConstraint(4, way=(7, 8), safe_every=3)
    params = {"temperature": 1.0, "seed": 3}
    request_id = engine.submit(
        EngineRequest(PROMPT, SamplingParams(max_tokens=7, best_of=4, **params), constraint=constraint)
    )
    events = run_all(engine)
    drawn = [expect_constrained(PROMPT, 3, FakeConstraint(4), index, **params) for index in range(4)]
    best = max(range(4), key=lambda index: sum(result.logprob for result in drawn[index]) / 5)
    assert answer_of(events, request_id) == expect_closed(constraint, 7, best, **params)


def test_the_prompt_comes_with_the_first_token_that_stays() -> None:
    engine = make_engine()
    params = SamplingParams(max_tokens=3, logprobs=0)
    engine.submit(EngineRequest(PROMPT, params, constraint=FakeConstraint(way=(7, 8, 9)), scores_prompt=True))
    events = run_all(engine)
    assert [len(event.prompt) for event in events] == [len(PROMPT), 0, 0]


def test_an_answer_that_is_expected_is_compared_as_it_ends() -> None:
    counts = []
    for drafts in (True, False):
        engine = make_engine()
        engine = draft_eagerly(engine, 1.0, 3) if drafts else engine
        constraint = FakeConstraint(way=(7, 8, 9))
        expected = tuple(expect_closed(constraint, 12))
        engine.submit(
            EngineRequest(PROMPT, SamplingParams(max_tokens=12), prediction_ids=expected, constraint=constraint)
        )
        timings = run_all(engine)[-1].timings
        assert timings is not None
        counts.append((timings.expected_tokens, timings.missed_tokens))
    assert counts == [(12, 0)] * 2
