"""Failures stay where they happen: refusals with numbers, cancelled requests, and steps that fail."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from fake_model import (
    VOCABULARY,
    FakeConfig,
    FakeModel,
    Floats,
    answer_of,
    expect_greedy,
    finish_of,
    generate,
    make_engine,
    run_all,
)

from mlxr.cache.arena import Arena
from mlxr.core.errors import ContextFull, InvalidRequest, OutOfPages, SettingError
from mlxr.core.model_settings import ModelSettings
from mlxr.core.types import FinishReason, SamplingParams
from mlxr.engine.engine import Engine
from mlxr.engine.request import EngineRequest
from mlxr.kernels.context import Context
from mlxr.kernels.ragged import RaggedBatch

POISON = 13


def fail_on_poison(batch: RaggedBatch) -> None:
    if POISON in batch.token_ids:
        raise RuntimeError("poisoned")


def test_prompt_beyond_the_context_is_refused_with_both_numbers() -> None:
    engine = make_engine(context_tokens=20)
    for length in (20, 45):
        with pytest.raises(
            ContextFull, match=f"maximum context length is 20 tokens.* prompt of {length} tok"
        ) as caught:
            engine.submit(EngineRequest(range(length), SamplingParams()))
        assert (caught.value.field, caught.value.prompt_tokens, caught.value.context_tokens) == ("prompt", length, 20)
    assert generate(range(19), SamplingParams(), engine) == expect_greedy(range(19), 1)


def test_request_beyond_the_arena_is_refused_with_the_remedy() -> None:
    engine = make_engine(pages=5)
    with pytest.raises(OutOfPages, match=r"need 6 cache pages of 4 tokens.* has 5.* arena_bytes") as caught:
        engine.submit(EngineRequest(range(11), SamplingParams(max_tokens=11)))
    assert (caught.value.needed_pages, caught.value.available_pages) == (6, 5)
    assert len(generate(range(11), SamplingParams(max_tokens=10), engine)) == 10


def test_prompt_beyond_the_arena_is_refused_without_max_tokens() -> None:
    engine = make_engine(pages=5)
    with pytest.raises(OutOfPages, match="need 6 cache pages"):
        engine.submit(EngineRequest(range(21), SamplingParams(max_tokens=None)))
    assert len(generate(range(20), SamplingParams(max_tokens=None), engine)) == 1


@pytest.mark.parametrize("prompt", [[VOCABULARY], [3, -1]])
def test_foreign_tokens_are_refused(prompt: list[int]) -> None:
    with pytest.raises(InvalidRequest, match=f"prompt: token {prompt[-1]} is not from 0 to {VOCABULARY - 1}"):
        make_engine().submit(EngineRequest(prompt, SamplingParams()))


def test_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="prompt: has no tokens"):
        make_engine().submit(EngineRequest([], SamplingParams()))


def test_foreign_tokens_in_parameters_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="logit_bias: token 50"):
        make_engine().submit(EngineRequest([1], SamplingParams(logit_bias={50: 1.0})))
    with pytest.raises(InvalidRequest, match="dry_breaker_ids: token 50"):
        make_engine().submit(EngineRequest([1], dry_breaker_ids=[(3,), (5, 50)]))
    with pytest.raises(InvalidRequest, match="dry_breaker_ids: has a breaker without tokens"):
        make_engine().submit(EngineRequest([1], SamplingParams(dry_multiplier=1.0), dry_breaker_ids=[(3,), ()]))
    with pytest.raises(InvalidRequest, match="prediction_ids: token 50"):
        make_engine().submit(EngineRequest([1], prediction_ids=(1, 50)))
    with pytest.raises(InvalidRequest, match="stop_token_ids: token -1"):
        make_engine().submit(EngineRequest([1], SamplingParams(stop_token_ids=frozenset({-1}))))


def test_refused_request_leaves_nothing_behind() -> None:
    engine = make_engine(pages=2)
    with pytest.raises(OutOfPages):
        engine.submit(EngineRequest(range(30), SamplingParams()))
    assert not engine.has_work
    assert engine.stats().waiting_sequences == 0


@pytest.mark.parametrize("name", ["page_size", "max_batch_tokens", "max_sequences", "prefill_chunk_tokens"])
def test_sizes_below_one_are_refused(name: str) -> None:
    with pytest.raises(SettingError, match=f"{name}: must be at least 1, got 0"):
        make_engine(**{name: 0})  # type: ignore[arg-type]


def test_context_beyond_the_model_is_refused() -> None:
    with pytest.raises(SettingError, match=r"context_tokens: must be from 1 to 128.*got 129"):
        make_engine(context_tokens=129)
    with pytest.raises(SettingError, match=r"context_tokens: .*got 0"):
        make_engine(context_tokens=0)


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 6])
def test_cancel_at_every_stage(steps: int) -> None:
    # After 0 steps it waits, after 1 and 2 it prefills, after 3 and 6 it decodes.
    engine = make_engine(prefill_chunk_tokens=8)
    other = engine.submit(EngineRequest([1, 2], SamplingParams(max_tokens=20)))
    engine.step()
    cancelled = engine.submit(EngineRequest(range(20), SamplingParams(max_tokens=20)))
    events = [event for _ in range(steps) for event in engine.step()]
    (last,) = engine.cancel(cancelled)
    engine.check()
    assert (last.token_id, last.finish_reason) == (None, FinishReason.CANCELLED)
    assert last.usage.completion_tokens == len(answer_of(events, cancelled)) == max(0, steps - 2)
    events += run_all(engine)
    assert answer_of(events, other)[-15:] == expect_greedy([1, 2], 20)[-15:]


def test_cancel_frees_the_way_for_those_who_wait() -> None:
    engine = make_engine(max_sequences=1)
    first = engine.submit(EngineRequest([1], SamplingParams(max_tokens=16)))
    second = engine.submit(EngineRequest([2], SamplingParams(max_tokens=16)))
    engine.step()
    assert engine.stats().waiting_sequences == 1
    engine.cancel(first)
    assert answer_of(run_all(engine), second) == expect_greedy([2], 16)


def test_cancel_of_what_has_ended_does_nothing() -> None:
    engine = make_engine()
    sequence_id = engine.submit(EngineRequest([1], SamplingParams(max_tokens=1)))
    run_all(engine)
    assert engine.cancel(sequence_id) == []
    assert engine.cancel(999) == []


def test_failed_step_ends_its_requests_and_no_others(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(FakeModel(on_forward=fail_on_poison), max_sequences=2)
    ids = [
        engine.submit(EngineRequest([number], SamplingParams(max_tokens=4, logit_bias={POISON: -99})))
        for number in (1, POISON, 2)
    ]
    with caplog.at_level(logging.ERROR):
        events = run_all(engine)
    for poisoned in ids[:2]:
        assert finish_of(events, poisoned) is FinishReason.ERROR
        assert [event.error for event in events if event.sequence_id == poisoned] == [
            "the step failed: RuntimeError: poisoned"
        ]
    assert len(answer_of(events, ids[2])) == 4
    assert finish_of(events, ids[2]) is FinishReason.LENGTH
    assert (engine.stats().failed_steps, engine.stats().steps) == (1, 4)
    assert "a step with 2 requests failed" in caplog.text


def test_failure_in_the_middle_of_an_answer_returns_the_pages() -> None:
    model = FakeModel()
    engine = make_engine(model)
    sequence_id = engine.submit(EngineRequest(range(10), SamplingParams(max_tokens=20)))
    events = engine.step() + engine.step()
    assert engine.stats().used_pages == 3
    model.on_forward = lambda batch: (_ for _ in ()).throw(MemoryError("no room"))
    events += engine.step()
    engine.check()
    assert engine.stats().used_pages == 0
    assert finish_of(events, sequence_id) is FinishReason.ERROR
    assert events[-1].usage.completion_tokens == 2
    model.on_forward = lambda batch: None
    assert generate([5], SamplingParams(max_tokens=3), engine) == expect_greedy([5], 3)


class BrokenModel(FakeModel):
    """Gives logits that cannot be sampled."""

    broken: Floats

    def forward(self, batch: RaggedBatch, arena: Arena) -> Floats:
        return self.broken


@pytest.mark.parametrize(
    ("logits", "error"),
    [
        (np.full((1, VOCABULARY), np.nan, np.float32), "sample: logits of row 0"),
        (np.zeros((1, 3), np.float32), "the model gave logits of shape (1, 3), wanted (1, 50)"),
        (np.zeros((2, VOCABULARY), np.float32), "the model gave logits of shape (2, 50), wanted (1, 50)"),
    ],
)
def test_broken_logits_fail_the_step(logits: Floats, error: str) -> None:
    model = BrokenModel()
    model.broken = logits
    engine = make_engine(model)
    engine.submit(EngineRequest([1], SamplingParams()))
    (event,) = run_all(engine)
    assert event.finish_reason is FinishReason.ERROR
    assert event.error is not None
    assert event.error.startswith(f"the step failed: ValueError: {error}")


def test_interrupted_step_can_be_repeated() -> None:
    """Control-C in the middle of a step neither loses nor doubles anything."""
    model = FakeModel()
    engine = make_engine(model, prefill_chunk_tokens=4)
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=3)
    sequence_id = engine.submit(EngineRequest(range(10), params))
    calls = 0

    def interrupt_every_other(batch: RaggedBatch) -> None:
        nonlocal calls
        calls += 1
        if calls % 2:
            raise KeyboardInterrupt

    model.on_forward = interrupt_every_other
    events = []
    while engine.has_work:
        try:
            events += engine.step()
        except KeyboardInterrupt:
            engine.check()
    assert answer_of(events, sequence_id) == generate(range(10), params)
    assert calls == 2 * engine.stats().steps


def test_arena_without_room_for_a_page_is_refused() -> None:
    page_bytes = 2 * 2 * 2 * 32 * 4 * 4
    with pytest.raises(SettingError, match=f"arena_bytes: 100 bytes hold no page.*{page_bytes} bytes"):
        Engine(FakeModel(), Context("reference"), ModelSettings(arena_bytes=100), eos_ids=())


def test_arena_sizes_and_grouped_heads() -> None:
    page_bytes = 2 * 2 * 2 * 32 * 4 * 4
    model = FakeModel(FakeConfig(context_length=100))
    engine = Engine(model, Context("reference"), ModelSettings(arena_bytes=5 * page_bytes + 7), eos_ids=())
    generate(range(40), SamplingParams(max_tokens=2), engine)
    stats = engine.stats()
    assert (stats.pages, stats.page_bytes, stats.arena_bytes) == (5, page_bytes, 5 * page_bytes)
    assert (stats.used_pages, stats.cached_pages, stats.free_pages, stats.peak_pages) == (0, 1, 4, 2)
    assert (stats.used_bytes, stats.peak_bytes) == (0, 2 * page_bytes)
    assert stats.gqa_saved_bytes == 2 * page_bytes  # 4 query heads on 2 key heads: twice as much without
    assert Engine(model, Context("reference"), ModelSettings(max_sequences=3), eos_ids=()).stats().pages == 3 * 4
