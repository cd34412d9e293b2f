"""Timings of an answer by a clock that the test turns, and requests that leave the cache alone."""

from __future__ import annotations

from fake_model import FakeModel, answer_of, expect_greedy, make_engine, run_all

from mlxr.core.types import PromptProgress, SamplingParams, Timings
from mlxr.engine.request import EngineRequest
from mlxr.engine.sequence import TokenEvent

PROMPT = list(range(10))


class Clock:
    """Every step of the model takes two seconds."""

    def __init__(self) -> None:
        self.now = 100.0
        self.model = FakeModel(on_forward=self.pass_time)

    def __call__(self) -> float:
        return self.now

    def pass_time(self, batch: object) -> None:
        self.now += 2


def timings_of(events: list[TokenEvent], request_id: int) -> list[Timings]:
    own = [event for event in events if event.sequence_id == request_id]
    assert all((event.timings is None) == (event.finish_reason is None) for event in own)
    return [event.timings for event in own if event.timings is not None]


def test_queue_prompt_and_answer_are_told_apart() -> None:
    clock = Clock()
    engine = make_engine(clock.model, clock=clock, max_sequences=1, prefill_chunk_tokens=4)
    first = engine.submit(EngineRequest(PROMPT, SamplingParams(max_tokens=4)))
    clock.now += 5
    second = engine.submit(EngineRequest(PROMPT[:3], SamplingParams(max_tokens=1)))
    events = run_all(engine)
    assert timings_of(events, first) == [Timings(queue_s=5, prompt_s=3 * 2, generate_s=3 * 2)]
    assert timings_of(events, second) == [Timings(queue_s=6 * 2, prompt_s=2, generate_s=0)]


def test_each_of_several_answers_has_timings() -> None:
    clock = Clock()
    engine = make_engine(clock.model, clock=clock)
    request_id = engine.submit(EngineRequest(PROMPT, SamplingParams(max_tokens=3, n=2)))
    assert timings_of(run_all(engine), request_id) == [Timings(0, 2, 4)] * 2


def test_progress_through_the_prompt_is_told_to_those_who_ask() -> None:
    clock = Clock()
    engine = make_engine(clock.model, clock=clock, prefill_chunk_tokens=4, page_size=2)
    plain = engine.submit(EngineRequest(PROMPT, SamplingParams(max_tokens=2)))
    assert all(event.progress is None for event in run_all(engine) if event.sequence_id == plain)

    def ask(prompt: list[int]) -> list[PromptProgress]:
        request_id = engine.submit(EngineRequest(prompt, SamplingParams(max_tokens=2), reports_progress=True))
        events = run_all(engine)
        assert answer_of(events, request_id) == expect_greedy(prompt, 2)
        told = [event.progress for event in events if event.progress is not None]
        assert events[: len(told)] == [event for event in events if event.progress is not None]
        return told

    other = [1, *PROMPT]
    assert [(one.read_tokens, one.seconds) for one in ask(other)] == [(0, 0), (4, 2), (8, 4), (11, 6)]
    again = ask([*other, 5, 6])
    assert again == [PromptProgress(13, 10, 10), PromptProgress(13, 10, 13)]


def test_what_never_began_took_no_time() -> None:
    clock = Clock()
    engine = make_engine(clock.model, clock=clock)
    request_id = engine.submit(EngineRequest(PROMPT, SamplingParams(max_tokens=3)))
    clock.now += 7
    assert timings_of(engine.cancel(request_id), request_id) == [Timings(7, 0, 0)]


def test_a_late_answer_has_timings() -> None:
    clock = Clock()
    engine = make_engine(clock.model, clock=clock)
    request_id = engine.submit(EngineRequest(PROMPT, SamplingParams(max_tokens=30), deadline_s=7))
    assert timings_of(run_all(engine), request_id) == [Timings(0, 2, 6)]


def test_without_the_cache_nothing_is_found_and_nothing_left() -> None:
    engine = make_engine()
    params = SamplingParams(max_tokens=6)
    engine.submit(EngineRequest(PROMPT, params))
    run_all(engine)
    cached_pages = engine.stats().cached_pages
    assert cached_pages > 0
    private = engine.submit(EngineRequest(PROMPT, params, uses_cache=False))
    events = run_all(engine)
    assert answer_of(events, private) == expect_greedy(PROMPT, 6)
    assert events[-1].usage.cached_tokens == 0
    private = engine.submit(EngineRequest(PROMPT[::-1], SamplingParams(max_tokens=6, n=2), uses_cache=False))
    events = run_all(engine)
    assert answer_of([event for event in events if event.index], private) == expect_greedy(PROMPT[::-1], 6)
    assert engine.stats().cached_pages == cached_pages
    engine.submit(EngineRequest(PROMPT, params))
    assert run_all(engine)[-1].usage.cached_tokens == 8


def test_prompts_beside_the_cache_are_not_waited_for() -> None:
    model = FakeModel()
    engine = make_engine(model)
    ids = [
        engine.submit(EngineRequest(PROMPT, SamplingParams(max_tokens=3), uses_cache=uses))
        for uses in (False, False, True)
    ]
    events = run_all(engine)
    assert [answer_of(events, request_id) for request_id in ids] == [expect_greedy(PROMPT, 3)] * 3
    assert model.batches[0].sequences == 2  # of 16 tokens in a step the first prompt takes 10, the second begins
