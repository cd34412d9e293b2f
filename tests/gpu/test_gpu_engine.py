"""The engine over a GPU's arrays: answers and texts to embed in one batch, masked rows, pages that are refused."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from gpu_cases import REFERENCE, Floats, random_floats, relative_error

from mlxr.cache.arena import Arena
from mlxr.core.errors import DeviceError
from mlxr.core.model_settings import ModelSettings
from mlxr.core.types import SamplingParams
from mlxr.engine.engine import Engine
from mlxr.engine.request import EngineRequest
from mlxr.engine.sequence import TokenEvent
from mlxr.kernels.context import Context
from mlxr.kernels.gpu.graph import RecordedStep
from mlxr.kernels.gpu.pool import Pool
from mlxr.kernels.gpu.steps import Run
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.sample import NO_TOKEN, SampleRow, sample

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from tiny_models import build_hf, give_windows, read_golden

CHUNK_TOKENS = 4


def serve(ctx: Context) -> tuple[list[int], list[Floats]]:
    """A greedy answer of three tokens beside two texts of several chunks, then a text alone; all their vectors."""
    config, seed, tokens, _ = read_golden("llama-gqa-80-tied")
    text = tokens.reshape(-1).tolist()[:6]
    model = build_hf(ctx, config, seed, "f32")
    settings = ModelSettings(page_size=8, kv_type="f32", prefill_chunk_tokens=CHUNK_TOKENS)
    engine = Engine(model, ctx, settings, eos_ids=(), pages=16)
    answer = engine.submit(EngineRequest(text[:2], SamplingParams(max_tokens=3, temperature=0)))
    texts = [
        engine.submit(EngineRequest(text, pooling="mean")),
        engine.submit(EngineRequest(text[::-1], pooling="last")),
    ]
    events = finish(engine)
    texts.append(engine.submit(EngineRequest(text, pooling="last")))  # no state of its first chunk is wanted
    events += finish(engine)
    before = count_sums(ctx)
    texts += [engine.submit(EngineRequest(one, pooling="mean")) for one in (text, text[:3])]  # nothing else is wanted
    events += finish(engine)
    assert (count_sums(ctx) > before) == (ctx.gpu is not None), "a GPU adds up states itself"
    embeddings = {event.sequence_id: event.embedding for event in events if event.embedding is not None}
    drawn = [event.token_id for event in events if event.sequence_id == answer and event.token_id is not None]
    return drawn, [embeddings[text_id] for text_id in texts]


def count_sums(ctx: Context) -> int:
    return sum(one.count for one in ctx.ledger.snapshot().dispatches if one.operator == "sum_rows")


def finish(engine: Engine) -> list[TokenEvent]:
    events = []
    while engine.has_work:
        events += engine.step()
        engine.check()
    return events


def check_serving(ctx: Context, allowed: float) -> None:
    (answer, embeddings), (expected_answer, expected) = serve(ctx), serve(REFERENCE)
    assert answer == expected_answer
    assert len(answer) == 3
    for found, wanted in zip(embeddings, expected, strict=True):
        assert relative_error(found, wanted) < allowed


def test_texts_are_embedded_beside_answers(gpu: Context) -> None:
    check_serving(gpu, 1e-3 if gpu.gpu.narrow else 5e-6)


def test_texts_are_embedded_by_mlx_operations() -> None:
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    check_serving(Context("mlx-cpu"), 5e-6)


@pytest.mark.smoke
def test_layers_with_windows_have_pages_of_their_own(gpu: Context) -> None:
    """One of two layers has a window; pages outside it are not read, and answers are those of the reference."""
    answers = []
    for ctx in (gpu, REFERENCE):
        config, seed, tokens, _ = read_golden("llama-gqa-80-tied")
        model = build_hf(ctx, config, seed, "f32")
        give_windows(model, (5, None))
        settings = ModelSettings(page_size=4, kv_type="f32", prefill_chunk_tokens=7)
        engine = Engine(model, ctx, settings, eos_ids=(), pages=24)
        text = tokens.reshape(-1).tolist()
        ids = [
            engine.submit(EngineRequest(text[start : start + 20], SamplingParams(max_tokens=9, temperature=0)))
            for start in (0, 3)
        ]
        events = finish(engine)
        pool = engine._arena.k_pools[0]
        if isinstance(pool, Pool):
            assert {type(step) for step in pool.graphs.values()} == {RecordedStep}
        window, full = engine.stats().cache.groups
        assert window.peak_pages < full.peak_pages
        found: dict[int, list[int | None]] = {request: [] for request in ids}
        for event in events:
            found[event.sequence_id].append(event.token_id)
        answers.append(found)
    assert answers[0] == answers[1]


def test_steps_run_ahead_though_answers_end_pages_in_turns(gpu: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each step one of four answers begins a page; only the first step and those of a wider table are late."""
    late, start = [], RecordedStep.start

    def note(step: RecordedStep, batch: RaggedBatch, rows: int, before: Run | None) -> Run:
        late.append(before is None)
        return start(step, batch, rows, before)

    monkeypatch.setattr(RecordedStep, "start", note)
    config, seed, tokens, _ = read_golden("llama-gqa-80-tied")
    model, text = build_hf(gpu, config, seed, "f32"), tokens.reshape(-1).tolist()
    settings = ModelSettings(page_size=4, kv_type="f32")
    engine = Engine(model, gpu, settings, eos_ids=(), pages=40, prefix_sharing=False)
    for length in range(9, 13):
        engine.submit(EngineRequest(text[:length], SamplingParams(max_tokens=20, temperature=0)))
    finish(engine)
    assert len(late) >= 19
    assert sum(late) <= 3


def test_a_prompt_waits_for_the_step_that_runs_ahead(gpu: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """That step is used, none is started before the prompt's step, and answers are those of the reference."""
    config, seed, tokens, _ = read_golden("llama-gqa-80-tied")
    text, answers = tokens.reshape(-1).tolist(), {}
    begun: list[str] = []
    start = RecordedStep.start

    def note(step: RecordedStep, batch: RaggedBatch, rows: int, before: Run | None) -> Run:
        begun.append("cold" if before is None else "ahead")
        return start(step, batch, rows, before)

    monkeypatch.setattr(RecordedStep, "start", note)
    for ctx in (gpu, REFERENCE):
        settings = ModelSettings(page_size=8, kv_type="f32", max_sequences=4, draft="off")
        engine = Engine(build_hf(ctx, config, seed, "f32"), ctx, settings, eos_ids=(), pages=24)
        wanted = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        first = engine.submit(EngineRequest(text[:3], wanted))
        events = [event for _ in range(3) for event in engine.step()]
        del begun[:]
        second = engine.submit(EngineRequest(text[3:8], wanted))
        if ctx is gpu:
            assert [row.id for row in engine._ahead] == [first]
            events += engine.step()
            assert begun == []  # what ran was what was wanted, and the next step has a prompt
            assert [row.is_decoding for row in engine._scheduler.running] == [True, False]
            events += engine.step()
            assert begun == []
            assert all(row.is_decoding for row in engine._scheduler.running)
        events += finish(engine)
        for request in (first, second):
            drawn = [event.token_id for event in events if event.sequence_id == request]
            assert answers.setdefault(request, drawn) == drawn


def test_masked_rows_are_drawn_on_the_host(gpu: Context) -> None:
    logits = random_floats(8, 3, 40)
    allowed = np.array([1 << 7, 1 << 2], np.uint32)  # ids 7 and 34
    rows = [SampleRow(), SampleRow(mask=allowed), SampleRow(mask=np.zeros(2, np.uint32))]
    gpu.ledger.reset()
    found = [row.token_id for row in sample(gpu, gpu.gpu.mx.array(logits), rows)]
    assert found == [logits[0].argmax(), max((7, 34), key=lambda token_id: logits[1, token_id]), NO_TOKEN]
    assert [row.implementation for row in gpu.ledger.snapshot().dispatches] == ["cpu"]


@pytest.mark.smoke
def test_q8_pages_are_refused_by_name(gpu: Context) -> None:
    with pytest.raises(DeviceError, match=f"device '{gpu.device}' keeps no q8 pages; kv_type must be one of bf16"):
        Arena(gpu, 1, 2, 1, 16, 64, "q8")
