"""Scores of a text: right in every chunking, bounded in memory, and without a trace in the cache."""

from __future__ import annotations

import numpy as np
import pytest
from fake_model import FakeConfig, FakeModel, answer_of, expect_greedy, fake_logits, make_engine, run_all

from mlxr.core.errors import InvalidRequest, OutOfPages
from mlxr.core.types import SamplingParams
from mlxr.engine.scoring import MAX_LOGITS_BYTES, choose_chunk_tokens
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
    sequence_id = engine.submit([1, 2], SamplingParams(max_tokens=18))
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
