"""The record of an engine: the log with its reasons, the sums of steps, and its bounds."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import astuple
from pathlib import Path

import pytest
from fake_model import FakeModel, make_engine, run_all
from live_look import Look

from mlxr.core.stats import MAX_LOG, TablePart
from mlxr.core.types import SamplingParams
from mlxr.engine.request import EngineRequest
from mlxr.engine.stats import MAX_STEP_SUMS, _StepSums
from mlxr.kernels.ragged import RaggedBatch
from mlxr.models.footprint import AttentionWork, StepWork
from mlxr.server.live import Change, cut_table

WORK = StepWork(weight_bytes=1000, token_macs=10, output_macs=3, attention=(AttentionWork(2, None),))
ANSWER = SamplingParams(max_tokens=8, ignore_eos=True)


def entries(change: Change) -> list[tuple[str, str, int | None]]:
    return [(entry.kind, entry.reason, entry.request) for entry in change.log]


def test_answers_begin_and_end() -> None:
    engine = make_engine(max_sequences=1)
    look = Look(engine, WORK)
    first = engine.submit(EngineRequest([1, 2, 3], ANSWER))
    second = engine.submit(EngineRequest([4], ANSWER))
    engine.step()
    assert entries(look.read()) == [("started", "new", first)]
    engine.cancel(first)
    engine.step()
    assert entries(look.read()) == [("ended", "cancelled", first), ("started", "new", second)]
    run_all(engine)
    assert entries(look.read()) == [("ended", "length", second)]


def test_an_answer_that_is_preempted_for_pages_resumes() -> None:
    engine = make_engine(pages=6)
    look = Look(engine, WORK)
    first = engine.submit(EngineRequest([1] * 9, SamplingParams(max_tokens=12)))
    second = engine.submit(EngineRequest([2] * 7, SamplingParams(max_tokens=12)))
    run_all(engine)
    log = entries(look.read())
    assert ("preempted", "pages", second) in log
    assert log.index(("preempted", "pages", second)) < log.index(("started", "resumed", second))
    assert log.index(("ended", "length", first)) < log.index(("started", "resumed", second))
    assert ("started", "new", second) in log


def test_an_answer_that_makes_place_is_known_as_such_to_who_comes_later() -> None:
    engine = make_engine(max_sequences=1)
    low = engine.submit(EngineRequest([1, 2, 3], ANSWER))
    engine.step()
    look = Look(engine, WORK)
    high = engine.submit(EngineRequest([4], ANSWER, priority=10))
    engine.step()
    assert entries(look.read()) == [("preempted", "place", low), ("started", "new", high)]
    engine.live.stop()
    look = Look(engine, WORK)
    run_all(engine)
    assert ("started", "resumed", low) in entries(look.read())


def test_a_step_that_fails_and_a_deadline(caplog: pytest.LogCaptureFixture) -> None:
    def fail(batch: RaggedBatch) -> None:
        if fails:
            raise RuntimeError("out of luck " + "x" * 1000)

    fails, now = True, 0.0
    engine = make_engine(FakeModel(on_forward=fail), clock=lambda: now)
    look = Look(engine, WORK)
    lost = engine.submit(EngineRequest([1], ANSWER))
    with caplog.at_level(logging.CRITICAL):
        engine.step()
    change = look.read()
    assert entries(change) == [("started", "new", lost), ("failed", "step", None), ("ended", "error", lost)]
    assert change.log[1].text.startswith("out of luck")
    assert len(change.log[1].text) < 600
    assert change.counters["failed_steps"] == 1
    assert change.steps == []
    fails = False
    late = engine.submit(EngineRequest([1], ANSWER, deadline_s=5))
    engine.step()
    now = 6.0
    engine.step()
    assert ("ended", "deadline", late) in entries(look.read())


def test_pages_that_are_given_up_and_damaged(tmp_path: Path) -> None:
    with_pages = make_engine(pages=10, store_folder=tmp_path)
    look = Look(with_pages, WORK)
    for start in range(3):
        with_pages.submit(EngineRequest([start] * 21, ANSWER))
        run_all(with_pages)
    with_pages.cache.flush()
    change = look.read()
    (evicted,) = [entry for entry in change.log if entry.kind == "evicted"]
    assert evicted.reason == "grow"
    assert int(evicted.text) == change.counters["evicted_pages"] == len(change.groups[0].evicted)
    for file in tmp_path.rglob("*.page"):
        file.write_bytes(bytes(file.stat().st_size))
    with_pages.submit(EngineRequest([0] * 21, ANSWER))
    run_all(with_pages)
    dropped = [entry for entry in look.read().log if entry.kind == "dropped"]
    assert [(entry.reason, int(entry.text) > 0) for entry in dropped] == [("damaged", True)]


def test_the_log_is_bounded() -> None:
    engine = make_engine()
    look = Look(engine, WORK)
    for _ in range(200):
        engine.cancel(engine.submit(EngineRequest([1], ANSWER)))
        engine.submit(EngineRequest([1], SamplingParams(max_tokens=1)))
        run_all(engine)
    change = look.read()
    assert len(change.log) == MAX_LOG
    assert change.log_left_out == 200 * 3 - MAX_LOG
    assert look.read().is_empty


def test_what_steps_read_and_compute() -> None:
    engine = make_engine(max_batch_tokens=16, prefix_sharing=False)
    look = Look(engine, WORK)
    engine.submit(EngineRequest([1, 2, 3, 4, 5], SamplingParams(max_tokens=2)))
    run_all(engine)
    prompt, token = look.read().steps
    position_bytes = engine.stats().page_bytes // engine.stats().page_size
    assert (prompt.prefill_tokens, prompt.decode_tokens) == (5, 0)
    assert prompt.read_bytes == 1000 + 5 * position_bytes
    assert prompt.macs == 5 * 10 + 3 + 2 * (1 + 2 + 3 + 4 + 5)
    assert (token.prefill_tokens, token.decode_tokens) == (0, 1)
    assert token.read_bytes == 1000 + 6 * position_bytes
    assert token.macs == 10 + 3 + 2 * 6
    assert token.seconds > 0


def add_up(rows: Iterable[tuple[float, ...]]) -> list[float]:
    return [sum(column) for column in zip(*rows, strict=True)]


@pytest.mark.parametrize("count", [*range(1, 40), 1000, 12345])
def test_sums_of_steps_lose_nothing_and_stay_few(count: int) -> None:
    sums, steps = _StepSums(), [(1, index / 8, index, 2 * index, 3, 4) for index in range(count)]
    for step in steps:
        sums.add(*step)
    taken = sums.take()
    assert len(taken) == count if count <= MAX_STEP_SUMS else MAX_STEP_SUMS // 2 < len(taken) <= MAX_STEP_SUMS
    assert [sum(column) for column in zip(*map(astuple, taken), strict=True)] == list(
        map(sum, zip(*steps, strict=True))
    )
    assert len({one.steps for one in taken[:-1]}) <= 1, "all are sums of as many steps, the last one perhaps aside"
    assert sums.take() == []


def test_only_the_end_of_a_table_is_told() -> None:
    def cut(before: list[int], now: list[int]) -> TablePart | None:
        return cut_table(TablePart(0, 0, before), TablePart(0, 0, now))

    assert cut([1, 2, 3], [1, 2, 3]) is None
    assert cut([1, 2, 3], [1, 2, 3, 4]) == TablePart(0, 3, [4])
    assert cut([1, 2, 3], [1, 2, 9]) == TablePart(0, 2, [9])
    assert cut([1, 2, 3], [1, 2]) == TablePart(0, 2, [])
    assert cut([1, 2, 3], [-1, -1, 3, 4]) == TablePart(0, 0, [-1, -1, 3, 4])
    assert cut([], [5]) == TablePart(0, 0, [5])
