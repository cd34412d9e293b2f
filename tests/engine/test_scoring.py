"""Scores of a text: right in every chunking, bounded in memory, and without a trace in the cache."""

from __future__ import annotations

import numpy as np
import pytest
from fake_model import FakeConfig, FakeModel, answer_of, expect_greedy, fake_logits, make_engine, run_all

from mlxr.core.errors import InvalidRequest, OutOfPages
from mlxr.core.types import FinishReason, SamplingParams
from mlxr.engine.request import EngineRequest
from mlxr.engine.runner import MAX_LOGITS_BYTES, choose_chunk_tokens
from mlxr.kernels.ragged import RaggedBatch

TEXT = np.random.default_rng(5).integers(0, 50, 60).tolist()


def expect_scores(text: list[int]) -> list[float]:
    scores = []
    for index in range(1, len(text)):
        logits = fake_logits(text[:index]).astype(np.float64)
        scores.append(float(logits[text[index]] - np.log(np.exp(logits).sum())))
    return scores


@pytest.mark.parametrize("max_batch_tokens", [1, 7, 59, 500])
def test_scores_in_every_chunking(max_batch_tokens: int) -> None:
    model = FakeModel()
    engine = make_engine(model, max_batch_tokens=max_batch_tokens)
    scores = engine.score(TEXT)
    assert scores.tolist() == pytest.approx(expect_scores(TEXT), abs=1e-12)
    assert np.array_equal(scores, make_engine().score(TEXT))
    assert max(batch.tokens for batch in model.batches) == min(max_batch_tokens, 59)
    engine.check()
    assert engine.stats().used_pages == 0


def test_logits_of_a_chunk_are_bounded() -> None:
    assert choose_chunk_tokens(50, 512) == 512
    for vocabulary in (32_000, 151_936, 10**9):
        chunk_tokens = choose_chunk_tokens(vocabulary, 10**6)
        assert chunk_tokens == 1 or chunk_tokens * vocabulary * 4 <= MAX_LOGITS_BYTES
    model = FakeModel(FakeConfig(vocab_size=2**20))
    make_engine(model, max_batch_tokens=100).score([1] * 12)
    assert [len(batch.output_rows) for batch in model.batches] == [8, 3]


def test_scores_beside_running_requests() -> None:
    engine = make_engine(pages=16)
    sequence_id = engine.submit(EngineRequest([1, 2], SamplingParams(max_tokens=18)))
    events = engine.step() + engine.step()  # one page is in use
    assert engine.score(TEXT).tolist() == pytest.approx(expect_scores(TEXT), abs=1e-12)
    with pytest.raises(OutOfPages, match=r"need 16 cache pages of 4 tokens.* has 15"):
        engine.score([*TEXT, 1, 2])
    events += run_all(engine)
    assert answer_of(events, sequence_id) == expect_greedy([1, 2], 18)
    assert len(engine.score([*TEXT, 1, 2])) == 61  # the cached pages make room


def test_scored_texts_are_not_cached() -> None:
    engine = make_engine()
    engine.score(TEXT)
    assert engine.stats().cached_pages == 0


@pytest.mark.parametrize("length", [1, 33])
def test_lengths_that_cannot_be_scored(length: int) -> None:
    with pytest.raises(InvalidRequest, match=f"scoring takes from 2 tokens to the context of 32, got {length}"):
        make_engine(context_tokens=32).score(TEXT[:length])


def test_foreign_tokens_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="token_ids: token 50"):
        make_engine().score([1, 50])
    with pytest.raises(InvalidRequest, match="token_ids: has no tokens"):
        make_engine().score([])


def test_failure_is_raised_and_returns_the_pages() -> None:
    def fail_late(batch: RaggedBatch) -> None:
        if batch.positions[0] > 20:
            raise RuntimeError("late")

    engine = make_engine(FakeModel(on_forward=fail_late))
    with pytest.raises(RuntimeError, match="late"):
        engine.score(TEXT)
    engine.check()
    assert engine.stats().used_pages == 0


@pytest.mark.parametrize("chunk_tokens", [1, 7, 16])
@pytest.mark.parametrize("preempt_every", [0, 3])
def test_a_prompt_is_scored_on_its_way_through_the_batches(chunk_tokens: int, preempt_every: int) -> None:
    """Beside other requests, in chunks and after preemption, its first event has the scores that `score` gives."""
    engine = make_engine(prefill_chunk_tokens=chunk_tokens)
    engine.submit(EngineRequest(TEXT, SamplingParams(max_tokens=30)))  # leaves pages of the same tokens
    scored = engine.submit(EngineRequest(TEXT, SamplingParams(max_tokens=4, logprobs=2, n=2), scores_prompt=True))
    none = engine.submit(EngineRequest(TEXT[:9], SamplingParams(max_tokens=0, logprobs=0), scores_prompt=True))
    events = []
    while engine.has_work:
        events += engine.step()
        engine.check()
        running = engine._scheduler.running
        if preempt_every and engine.stats().steps % preempt_every == 0 and running and engine.stats().steps < 90:
            engine._scheduler.preempt(running[-1])
    scores = make_engine().score(TEXT)
    for index in (0, 1):
        first, *others = [event for event in events if (event.sequence_id, event.index) == (scored, index)]
        assert [token.chosen.token_id for token in first.prompt] == TEXT
        assert np.isnan(first.prompt[0].chosen.logprob)
        assert [token.chosen.logprob for token in first.prompt[1:]] == scores.tolist()
        assert not any(event.prompt for event in others)
    for place, token in enumerate(first.prompt[1:], 1):
        logits = fake_logits(TEXT[:place])
        assert [top.token_id for top in token.top] == np.argsort(-logits, kind="stable")[:2].tolist()
    assert answer_of([event for event in events if event.index == 0], scored) == expect_greedy(TEXT, 4)
    (end,) = [event for event in events if event.sequence_id == none]
    assert (end.token_id, end.finish_reason, end.usage.completion_tokens) == (None, FinishReason.LENGTH, 0)
    assert [token.chosen.logprob for token in end.prompt[1:]] == scores.tolist()[:8]


def test_an_answer_of_no_tokens_leaves_its_prompt_in_the_cache() -> None:
    engine = make_engine()
    engine.submit(EngineRequest(TEXT, SamplingParams(max_tokens=0, n=3)))
    events = run_all(engine)
    assert [(event.index, event.token_id, event.finish_reason) for event in events] == [
        (index, None, FinishReason.LENGTH) for index in range(3)
    ]
    engine.submit(EngineRequest(TEXT, SamplingParams(max_tokens=1)))
    assert run_all(engine)[0].usage.cached_tokens == 56
