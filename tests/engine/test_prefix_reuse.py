"""Prompts that begin alike are computed once, whether they come one after the other, together, or after a restart."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from fake_model import FakeModel, answer_of, expect_greedy, make_engine, run_all

from mlxr.core.errors import SettingError
from mlxr.core.types import FinishReason, SamplingParams
from mlxr.engine.request import EngineRequest

STEM = [index * 7 % 50 for index in range(30)]
THREE = SamplingParams(max_tokens=3)


def computed_tokens(model: FakeModel) -> int:
    return sum(batch.tokens for batch in model.batches)


def test_second_request_computes_only_what_is_new() -> None:
    model = FakeModel()
    engine = make_engine(model)
    engine.submit(EngineRequest([*STEM, 1], THREE))
    run_all(engine)
    model.batches.clear()
    sequence_id = engine.submit(EngineRequest([*STEM, 2], THREE))
    events = run_all(engine)
    assert answer_of(events, sequence_id) == expect_greedy([*STEM, 2], 3)
    assert {event.usage.cached_tokens for event in events} == {28}
    assert computed_tokens(model) == 31 - 28 + 2


def test_one_token_is_always_computed() -> None:
    engine = make_engine()
    for cached_tokens in (0, 28):
        engine.submit(EngineRequest(STEM[:29], THREE))
        assert run_all(engine)[0].usage.cached_tokens == cached_tokens
    engine.submit(EngineRequest(STEM[:28], THREE))
    assert run_all(engine)[0].usage.cached_tokens == 24


def test_answers_are_found_as_prompts() -> None:
    engine = make_engine()
    engine.submit(EngineRequest(STEM, SamplingParams(max_tokens=12)))
    answer = answer_of(run_all(engine), 1)
    engine.submit(EngineRequest([*STEM, *answer, 1], THREE))
    assert run_all(engine)[0].usage.cached_tokens == 40


@pytest.mark.parametrize("chunk_tokens", [1, 3, 16, 64])
@pytest.mark.parametrize("requests", [2, 5])
def test_prompts_in_flight_are_computed_once(chunk_tokens: int, requests: int) -> None:
    model = FakeModel()
    engine = make_engine(model, max_batch_tokens=64, prefill_chunk_tokens=chunk_tokens)
    ids = [engine.submit(EngineRequest([*STEM, number], THREE)) for number in range(requests)]
    events = run_all(engine)
    for number, sequence_id in enumerate(ids):
        assert answer_of(events, sequence_id) == expect_greedy([*STEM, number], 3)
    assert computed_tokens(model) == 28 + requests * (3 + 2)
    assert engine.stats().peak_pages <= 7 + requests * 2


def test_equal_prompts_fit_where_different_ones_would_not() -> None:
    engine = make_engine(pages=16, max_sequences=4)
    for number in range(4):
        engine.submit(EngineRequest([*STEM, number], SamplingParams(max_tokens=5)))
    running = 0
    while engine.has_work:
        engine.step()
        engine.check()
        running = max(running, engine.stats().running_sequences)
    assert running == 4
    assert engine.stats().preemptions == 0


def test_unlike_prompts_do_not_wait_for_each_other() -> None:
    model = FakeModel()
    engine = make_engine(model, max_batch_tokens=64)
    engine.submit(EngineRequest([1, 2, 3, 4, 5, 6], THREE))
    engine.submit(EngineRequest([1, 2, 3, 9, 5, 6], THREE))  # differs within the first page
    run_all(engine)
    assert len(model.batches) == 3


def test_after_a_restart_pages_come_from_disk(tmp_path: Path) -> None:
    first = make_engine(store_folder=tmp_path)
    first.submit(EngineRequest([*STEM, 1], THREE))
    run_all(first)
    first.close()
    model = FakeModel()
    engine = make_engine(model, store_folder=tmp_path)
    engine.submit(EngineRequest([*STEM, 2], THREE))
    events = run_all(engine)
    engine.close()
    assert answer_of(events, 1) == expect_greedy([*STEM, 2], 3)
    assert events[0].usage.cached_tokens == 28
    assert engine.stats().cache.disk_hit_tokens == 28
    assert computed_tokens(model) == 31 - 28 + 2


@pytest.mark.parametrize("end", ["cancelled", "late", "killed"])
def test_pages_of_a_prompt_that_was_given_up_halfway_stay(end: str, tmp_path: Path) -> None:
    """They stay in memory, and on disk for a later process; also when nothing had a chance to end in order."""
    now = 0.0
    engine = make_engine(store_folder=tmp_path, prefill_chunk_tokens=10, clock=lambda: now)
    request_id = engine.submit(EngineRequest([*STEM, 1], THREE, deadline_s=5))
    for _ in range(2):
        assert engine.step() == []
    if end == "cancelled":
        engine.cancel(request_id)
    elif end == "late":
        now = 6.0
        assert engine.step()[-1].finish_reason is FinishReason.DEADLINE
    engine.check()
    assert engine.cache.flush()
    after = make_engine(store_folder=tmp_path)
    for found_by in (engine, after) if end != "killed" else (after,):
        found_by.submit(EngineRequest([*STEM, 1], THREE))
        assert run_all(found_by)[0].usage.cached_tokens == 20
    engine.close()
    after.close()


@pytest.mark.parametrize("settings", [{"prefix_sharing": False}, {"kv_cache": "simple"}])
def test_nothing_is_shared_when_told_so(settings: dict[str, object]) -> None:
    engine = make_engine(**settings)  # type: ignore[arg-type]
    for _ in range(2):
        engine.submit(EngineRequest(STEM, THREE))
        assert run_all(engine)[0].usage.cached_tokens == 0
    assert engine.stats().cached_pages == 0


def test_simple_gives_each_request_one_run() -> None:
    engine = make_engine(kv_cache="simple", pages=3, context_tokens=100)
    for number in range(3):
        engine.submit(EngineRequest([number], SamplingParams(max_tokens=60)))
    events = engine.step()
    stats = engine.stats()
    assert (stats.kv_cache, stats.page_size, stats.used_pages) == ("simple", 100, 3)
    events += run_all(engine)
    assert answer_of(events, 2) == expect_greedy([1], 60)


def test_auto_is_paged() -> None:
    assert make_engine().stats().kv_cache == "paged"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_cache": "flat"}, "kv_cache: must be one of auto, paged, simple; got 'flat'"),
        ({"kv_cache": "simple", "store_folder": Path("x")}, "store_bytes: kv_cache simple keeps no pages"),
        ({"prefix_sharing": False, "store_folder": Path("x")}, "store_bytes: pages that are not shared"),
        ({"store_folder": Path("x"), "store_bytes": -1}, "store_bytes: must be at least 0, got -1"),
    ],
)
def test_contradictions_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        make_engine(**settings)  # type: ignore[arg-type]


def test_keys_of_a_waiting_prompt_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that look for a prompt again, and those that compute it, reuse the keys of its pages."""
    hashed = []

    class Hashes:
        @staticmethod
        def blake2b(*args: Any, **options: Any) -> Any:
            hashed.append(args)
            return hashlib.blake2b(*args, **options)

    engine = make_engine(max_sequences=2, pages=12)
    engine.submit(EngineRequest([7] * 9, SamplingParams(max_tokens=20)))
    waiting = [engine.submit(EngineRequest([index, *range(40)], SamplingParams(max_tokens=2))) for index in range(3)]
    monkeypatch.setattr("mlxr.cache.prefix.hashlib", Hashes)
    engine.step()
    first = len(hashed)
    for _ in range(10):
        engine.step()
    assert engine.stats().waiting_sequences == 3
    assert 0 < len(hashed) - first <= 10 // 4 + 1  # the pages that the answer has filled
    events = run_all(engine)
    pages = sum(len(answer_of(events, request_id)) + 41 for request_id in waiting) // 4
    assert len(hashed) <= pages + (9 + 20) // 4
