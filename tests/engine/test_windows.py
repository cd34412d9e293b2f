"""Models whose layers have windows: the pages they hold, how many answers run, and requests that are refused."""

from __future__ import annotations

import pytest
from fake_model import FakeConfig, FakeModel, answer_of, expect_greedy, fake_logits, make_engine, run_all

from mlxr.cache.shapes import CacheShape, LayerCache
from mlxr.core.errors import OutOfPages
from mlxr.core.model_settings import ModelSettings
from mlxr.core.types import SamplingParams
from mlxr.engine.engine import Engine
from mlxr.engine.memory_plan import compare_windows
from mlxr.engine.request import EngineRequest
from mlxr.kernels.context import Context

FULL, WINDOW = CacheShape(1, 4), CacheShape(1, 4, window=512)
GEMMA: tuple[LayerCache, ...] = (WINDOW,) * 5 + (FULL,)


@pytest.mark.slow
def test_windows_take_less_than_a_quarter_of_full_pages() -> None:
    """Eight sequences of 8,192 tokens, five of six layers with a window of 512: bytes held at most, and reserved."""
    peaks, saved = [], []
    for layers in (GEMMA, (FULL,) * 6):
        model = FakeModel(FakeConfig(layers, context_length=8192))
        engine = Engine(model, Context("reference"), ModelSettings(max_sequences=8, draft="off"), eos_ids=())
        for stem in range(8):
            engine.submit(EngineRequest([(stem + index) % 50 for index in range(8040)], SamplingParams(max_tokens=152)))
        while engine.has_work:
            engine.step()
        engine.check()
        stats = engine.stats()
        assert stats.preemptions == 0
        peaks.append((stats.peak_bytes, stats.arena_bytes))
        saved.append(stats.window_saved_bytes)
    (used, reserved), (full_used, full_reserved) = peaks
    assert full_reserved == 8 * 256 * 32 * 6 * 2 * 4 * 4
    assert 0.99 * full_reserved < full_used <= full_reserved
    assert used < full_used / 4
    assert saved == [full_used - used, 0]
    assert reserved < full_reserved / 4
    told = compare_windows(Context("reference"), FakeConfig(GEMMA), 32, None, 8, 8192, 512)
    assert told == (reserved, full_reserved)


def test_a_sequence_may_be_longer_than_the_arena_of_its_window() -> None:
    model = FakeModel(FakeConfig((CacheShape(2, 4, window=6),)))
    engine = make_engine(model, pages=7, page_size=4, prefill_chunk_tokens=8)
    assert engine.room_tokens == 128
    prompt = [index * 7 % 50 for index in range(100)]
    request = engine.submit(EngineRequest(prompt, SamplingParams(max_tokens=20)))
    answer = answer_of(run_all(engine), request)
    history = list(prompt)
    for token_id in answer:
        assert token_id == fake_logits(history[-6:]).argmax()
        history.append(token_id)
    assert engine.stats().peak_pages <= 3 + 2


def test_a_window_that_does_not_fit_bounds_the_text() -> None:
    model = FakeModel(FakeConfig((CacheShape(2, 4, window=60), CacheShape(2, 4))))
    engine = make_engine(model, pages=8, page_size=4)
    assert engine.room_tokens == 32
    with pytest.raises(OutOfPages):
        engine.submit(EngineRequest([1] * 30, SamplingParams(max_tokens=10)))


def test_many_sequences_share_a_small_window() -> None:
    """More answers than the window's arena holds: some wait or give their pages back, and all are right."""
    model = FakeModel(FakeConfig((CacheShape(2, 4, window=9), CacheShape(2, 4))))
    engine = make_engine(model, pages=16, max_sequences=8, prefill_chunk_tokens=5)
    prompts = [[(stem * 11 + index) % 50 for index in range(20)] for stem in range(8)]
    ids = [engine.submit(EngineRequest(prompt, SamplingParams(max_tokens=12))) for prompt in prompts]
    events = run_all(engine)
    for request, prompt in zip(ids, prompts, strict=True):
        assert answer_of(events, request) == expect_greedy(prompt, 12)


def test_a_preempted_sequence_goes_on_from_its_last_boundary() -> None:
    model = FakeModel(FakeConfig((CacheShape(2, 4, window=5), CacheShape(2, 4))))
    engine = make_engine(model, pages=24)
    prompt = [index % 50 for index in range(33)]
    request = engine.submit(EngineRequest(prompt, SamplingParams(max_tokens=10)))
    events = [event for _ in range(8) for event in engine.step()]
    (sequence,) = engine._scheduler.running
    tokens = len(sequence.tokens)
    engine._scheduler.preempt(sequence)
    engine.check()
    computed = sum(batch.tokens for batch in model.batches)
    events += engine.step()
    assert sum(batch.tokens for batch in model.batches) - computed <= tokens % 4 + 4
    events += run_all(engine)
    assert answer_of(events, request) == expect_greedy(prompt, 10)
    assert engine.stats().cache.short_tokens == {"window 5, 2x4": 0, "full, 2x4": 0}
