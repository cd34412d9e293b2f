"""Texts to embed: the same bits alone, in a batch, in chunks and after preemption; refusals and ends."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from fake_model import FakeModel, answer_of, expect_greedy, fake_logits, finish_of, make_engine, run_all
from numpy.typing import NDArray

from mlxr.core.errors import InvalidRequest, RequestFailed
from mlxr.core.types import FinishReason, SamplingParams
from mlxr.engine.engine import Engine
from mlxr.engine.engine_thread import EngineThread
from mlxr.engine.request import EngineRequest, Pooling
from mlxr.engine.runner import Pool, StateSum
from mlxr.service.streams import TEXTS_AT_ONCE, embed_each

TEXT = list(range(30))


def expect(text: list[int], pooling: Pooling) -> NDArray[np.float32]:
    states = [fake_logits(text[: end + 1]).astype(np.float64) for end in range(len(text))]
    if pooling == "last":
        return states[-1].astype(np.float32)
    total = states[0]
    for state in states[1:]:
        total = total + state
    return (total / len(states)).astype(np.float32)


def embedding_of(engine: Engine, request_id: int, preempt_every: int = 0) -> NDArray[np.float32]:
    events = []
    while engine.has_work:
        events += engine.step()
        engine.check()
        if preempt_every and engine.stats().steps % preempt_every == 0 and engine._scheduler.running:
            engine._scheduler.preempt(engine._scheduler.running[0])
    (event,) = [event for event in events if event.sequence_id == request_id]
    assert (event.token_id, event.finish_reason) == (None, FinishReason.STOP)
    assert event.timings is not None
    assert event.embedding is not None
    return event.embedding


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("chunk_tokens", [1, 4, 7, 64])
def test_chunks_and_neighbours_change_no_bit(pooling: Pooling, chunk_tokens: int) -> None:
    engine = make_engine(prefill_chunk_tokens=chunk_tokens, max_batch_tokens=max(8, chunk_tokens))
    before = engine.submit(EngineRequest([5, 6, 7], SamplingParams(max_tokens=9)))
    request_id = engine.submit(EngineRequest(TEXT, pooling=pooling))
    shorter = engine.submit(EngineRequest(TEXT[:3], pooling="mean"))
    events = run_all(engine)
    by_id = {event.sequence_id: event.embedding for event in events if event.embedding is not None}
    np.testing.assert_array_equal(by_id[request_id], expect(TEXT, pooling))
    np.testing.assert_array_equal(by_id[shorter], expect(TEXT[:3], "mean"))
    assert answer_of(events, before) == expect_greedy([5, 6, 7], 9)
    usage = next(event.usage for event in events if event.sequence_id == request_id)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (30, 0, 0)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_a_preempted_text_begins_again(pooling: Pooling) -> None:
    engine = make_engine(prefill_chunk_tokens=4, max_batch_tokens=4)
    request_id = engine.submit(EngineRequest(TEXT, pooling=pooling))
    for _ in range(3):
        engine.step()
    engine._scheduler.preempt(engine._scheduler.running[0])
    np.testing.assert_array_equal(embedding_of(engine, request_id), expect(TEXT, pooling))
    assert engine.stats().recomputed_tokens == 12


def test_texts_leave_the_cache_alone() -> None:
    engine = make_engine()
    engine.submit(EngineRequest(TEXT, SamplingParams(max_tokens=1)))
    run_all(engine)
    cached_pages = engine.stats().cached_pages
    np.testing.assert_array_equal(
        embedding_of(engine, engine.submit(EngineRequest(TEXT, pooling="mean"))), expect(TEXT, "mean")
    )
    embedding_of(engine, engine.submit(EngineRequest(TEXT[::-1], pooling="last")))
    assert engine.stats().cached_pages == cached_pages


def test_a_text_may_fill_context_and_arena() -> None:
    engine = make_engine(pages=5, context_tokens=20)
    text = list(range(20))
    np.testing.assert_array_equal(
        embedding_of(engine, engine.submit(EngineRequest(text, pooling="last"))), expect(text, "last")
    )
    with pytest.raises(
        InvalidRequest, match=r"input: is too large: .*maximum context length is 20 tokens, the input has 21"
    ):
        engine.submit(EngineRequest(list(range(21)), pooling="mean"))
    with pytest.raises(InvalidRequest, match=r"input: needs 5 cache pages of 4 tokens, the arena has 4.* arena_bytes"):
        make_engine(pages=4).submit(EngineRequest(text, pooling="mean"))
    with pytest.raises(InvalidRequest, match="input: has no tokens"):
        engine.submit(EngineRequest([], pooling="mean"))
    with pytest.raises(InvalidRequest, match="input: token 50"):
        engine.submit(EngineRequest([50], pooling="mean"))


def test_a_text_can_be_cancelled_and_can_be_late() -> None:
    now = 0.0
    engine = make_engine(prefill_chunk_tokens=4, clock=lambda: now)
    first, second = (engine.submit(EngineRequest(TEXT, pooling="mean", deadline_s=10)) for _ in range(2))
    engine.step()
    (event,) = engine.cancel(first)
    assert (event.finish_reason, event.embedding) == (FinishReason.CANCELLED, None)
    now = 11.0
    assert finish_of(run_all(engine), second) is FinishReason.DEADLINE


def test_embeddings_of_an_engine_on_its_thread(caplog: pytest.LogCaptureFixture) -> None:
    model = FakeModel()

    async def test() -> None:
        async with EngineThread(make_engine(model)) as server:
            texts = [TEXT[:length] for length in (1, 5, 30)]
            vectors = await asyncio.gather(*(server.embed(EngineRequest(text, pooling="mean")) for text in texts))
            for text, vector in zip(texts, vectors, strict=True):
                np.testing.assert_array_equal(vector, expect(text, "mean"))
            with pytest.raises(InvalidRequest, match="input: token 99"):
                await server.embed(EngineRequest([99], pooling="last"))
            model.on_forward = lambda batch: (_ for _ in ()).throw(RuntimeError("broken step"))
            with pytest.raises(RequestFailed, match="the step failed: RuntimeError: broken step") as caught:
                await server.embed(EngineRequest(TEXT, pooling="last"))
            assert caught.value.reason == "error"
            assert (await server.stats()).used_pages == 0

    asyncio.run(asyncio.wait_for(test(), 60))
    assert "broken step" in caplog.text


def test_steps_of_many_texts_are_full() -> None:
    """Texts come in bunches while others are computed, also into a queue that has room for a few."""
    texts = [[(7 * index + at) % 31 for at in range(4)] for index in range(320)]
    engine = make_engine(max_batch_tokens=4 * TEXTS_AT_ONCE, max_sequences=TEXTS_AT_ONCE, max_waiting=20)
    server = EngineThread(engine)
    vectors = list(embed_each(server, (EngineRequest(text, pooling="mean") for text in texts)))
    steps = server.call(lambda engine: engine.stats().steps)
    server.close()
    np.testing.assert_array_equal(vectors, [expect(text, "mean") for text in texts])
    assert steps <= 2 * len(texts) // TEXTS_AT_ONCE


def test_a_pool_takes_states_and_their_sums() -> None:
    """A text may be computed beside others in one step, and alone in the next."""
    states = np.random.RandomState(0).standard_normal((30, 8)).astype(np.float32)
    for first in (True, False):  # again after a preemption
        pool = Pool("mean", lambda vector: vector)
        assert pool.takes_sums
        if not first:
            pool.add(states, is_first=True)
        for start, stop, is_summed in ((0, 7, True), (7, 16, False), (16, 30, True)):
            part = states[start:stop]
            given = StateSum(part.sum(axis=0, dtype=np.float64).astype(np.float32), stop - start) if is_summed else part
            pool.add(given, is_first=not start)
        np.testing.assert_allclose(pool.read(), states.mean(axis=0, dtype=np.float64), rtol=1e-6, atol=1e-7)
    assert not Pool("mean", lambda vector: vector, 3).takes_sums
    assert not Pool("last", lambda vector: vector).takes_sums
