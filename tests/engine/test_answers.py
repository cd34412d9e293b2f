"""Several answers to one prompt: each as if it were alone, the prompt in the cache once, the best chosen rightly."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_model import FakeConfig, FakeModel, answer_of, expect_greedy, make_engine, run_all

from mlxr.core.errors import InvalidRequest
from mlxr.core.types import MAX_ANSWERS, FinishReason, SamplingParams
from mlxr.engine.engine import Engine
from mlxr.engine.request import EngineRequest
from mlxr.engine.sampler import draw_uniform
from mlxr.engine.sequence import TokenEvent

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
RANDOM = SamplingParams(max_tokens=12, temperature=1.0, seed=7)


def answers_of(events: list[TokenEvent]) -> list[list[int]]:
    indices = sorted({event.index for event in events})
    return [
        [event.token_id for event in events if event.index == index and event.token_id is not None] for index in indices
    ]


def run(params: SamplingParams, engine: Engine | None = None) -> list[TokenEvent]:
    engine = engine or make_engine()
    engine.submit(EngineRequest(PROMPT, params))
    return run_all(engine)


def test_answers_differ_and_the_first_is_the_only_one() -> None:
    answers = answers_of(run(replace(RANDOM, n=4)))
    assert len({tuple(answer) for answer in answers}) == 4
    assert answers[0] == answers_of(run(RANDOM))[0]
    assert answers[:2] == answers_of(run(replace(RANDOM, n=2)))


def test_greedy_answers_are_all_the_same() -> None:
    assert answers_of(run(SamplingParams(max_tokens=5, n=3))) == [expect_greedy(PROMPT, 5)] * 3


def test_every_answer_has_its_own_stream() -> None:
    numbers = {draw_uniform(5, place, answer) for place in range(20) for answer in range(20)}
    assert len(numbers) == 400
    assert draw_uniform(5, 3, 0) == draw_uniform(5, 3)


def test_without_a_seed_answers_differ_too() -> None:
    answers = answers_of(run(replace(RANDOM, seed=None, n=3)))
    assert len({tuple(answer) for answer in answers}) == 3


def test_each_answer_ends_once_with_its_own_counts() -> None:
    events = run(replace(RANDOM, n=3))
    ends = [event for event in events if event.finish_reason]
    assert sorted(event.index for event in ends) == [0, 1, 2]
    assert {event.usage.completion_tokens for event in ends} == {12}
    assert {event.sequence_id for event in events} == {1}


def test_eight_answers_hold_the_prompt_once() -> None:
    model = FakeModel(FakeConfig(context_length=1100))
    engine = make_engine(model, pages=80, page_size=32, max_batch_tokens=512, prefill_chunk_tokens=512, drafts=False)
    engine.submit(EngineRequest([index * index % 50 for index in range(1024)], replace(RANDOM, n=8)))
    used = []
    while engine.has_work:
        engine.step()
        engine.check()
        used.append((engine.stats().used_pages, engine.stats().shared_pages))
    # 32 pages of prompt, held by all eight, and one page of answer for each.
    assert used[:3] == [(16, 0), (32, 32), (40, 32)]
    assert max(used) == (40, 32)
    assert sum(batch.tokens for batch in model.batches) == 1024 + 8 * 11
    assert engine.stats().peak_pages == 40


def test_answers_survive_preemption_and_simple_runs() -> None:
    expected = answers_of(run(replace(RANDOM, n=4, max_tokens=30)))
    for pages in (10, 12, 16):
        engine = make_engine(pages=pages)
        assert answers_of(run(replace(RANDOM, n=4, max_tokens=30), engine)) == expected
        assert engine.stats().preemptions > 0
    for pages in (1, 2, 4):
        engine = make_engine(pages=pages, kv_cache="simple")
        assert answers_of(run(replace(RANDOM, n=4, max_tokens=30), engine)) == expected


@pytest.mark.parametrize("steps", range(5))
@pytest.mark.parametrize("index", [0, 2])
def test_one_answer_can_be_cancelled(steps: int, index: int) -> None:
    expected = answers_of(run(replace(RANDOM, n=3)))
    engine = make_engine(prefill_chunk_tokens=4)
    request_id = engine.submit(EngineRequest(PROMPT, replace(RANDOM, n=3)))
    events = [event for _ in range(steps) for event in engine.step()]
    (last,) = engine.cancel(request_id, index)
    engine.check()
    assert (last.index, last.finish_reason) == (index, FinishReason.CANCELLED)
    assert engine.cancel(request_id, index) == []
    events += run_all(engine)
    for other in {0, 1, 2} - {index}:
        own = [event for event in events if event.index == other]
        assert answer_of(own, request_id) == expected[other]


def test_cancel_ends_all_answers() -> None:
    for steps in range(5):
        engine = make_engine(prefill_chunk_tokens=4)
        request_id = engine.submit(EngineRequest(PROMPT, replace(RANDOM, n=3)))
        for _ in range(steps):
            engine.step()
        assert [event.index for event in engine.cancel(request_id)] == [0, 1, 2]
        engine.check()
        assert not engine.has_work
        assert engine.stats().used_pages == 0


def test_failed_prompt_ends_all_answers() -> None:
    model = FakeModel(on_forward=lambda batch: (_ for _ in ()).throw(RuntimeError("broken")))
    engine = make_engine(model)
    engine.submit(EngineRequest(PROMPT, replace(RANDOM, n=3)))
    events = run_all(engine)
    assert sorted(event.index for event in events) == [0, 1, 2]
    assert {event.finish_reason for event in events} == {FinishReason.ERROR}


def mean_logprob(events: list[TokenEvent], index: int) -> float:
    values = [event.logprob for event in events if event.index == index and event.logprob is not None]
    return sum(values) / len(values)


def test_best_of_gives_the_likeliest_in_order() -> None:
    stops = frozenset(range(0, 50, 9))  # so that lengths differ
    params = replace(RANDOM, n=6, logprobs=0, stop_token_ids=stops)
    everything = run(params)
    ranked = sorted(range(6), key=lambda index: -mean_logprob(everything, index))
    best = run(replace(params, n=2, best_of=6))
    assert answers_of(best) == [answers_of(everything)[index] for index in ranked[:2]]
    assert [mean_logprob(best, index) for index in (0, 1)] == [mean_logprob(everything, index) for index in ranked[:2]]


def test_best_of_gives_nothing_before_all_have_ended() -> None:
    engine = make_engine()
    engine.submit(EngineRequest(PROMPT, replace(RANDOM, n=1, best_of=3)))
    given = [len(engine.step()) for _ in range(12)]
    assert given == [0] * 11 + [12]
    assert not engine.has_work


def test_best_of_equal_to_n_does_not_wait() -> None:
    engine = make_engine()
    engine.submit(EngineRequest(PROMPT, replace(RANDOM, n=2, best_of=2)))
    assert len(engine.step()) == 2


def test_cancelled_best_of_gives_what_there_is() -> None:
    engine = make_engine()
    request_id = engine.submit(EngineRequest(PROMPT, replace(RANDOM, n=2, best_of=3)))
    for _ in range(4):
        assert engine.step() == []
    events = engine.cancel(request_id)
    assert [len(answer) for answer in answers_of(events)] == [4, 4]
    assert [event.finish_reason for event in events if event.finish_reason] == [FinishReason.CANCELLED] * 2


def test_impossible_numbers_are_refused() -> None:
    for bad in ({"n": 0}, {"n": MAX_ANSWERS + 1}):
        with pytest.raises(InvalidRequest, match="n: must be at least 1"):
            SamplingParams(**bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="best_of: must be at least 3"):
        SamplingParams(n=3, best_of=2)
    with pytest.raises(InvalidRequest, match="best_of: cannot rank answers that stop strings cut"):
        SamplingParams(best_of=2, stop=("x",))
    with pytest.raises(InvalidRequest, match=r"^n: 9 answers cannot grow together, the engine runs at most 8"):
        make_engine().submit(EngineRequest([1], SamplingParams(n=9)))
    with pytest.raises(InvalidRequest, match=r"^best_of: 9 answers"):
        make_engine().submit(EngineRequest([1], SamplingParams(best_of=9)))
