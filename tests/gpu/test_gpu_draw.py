"""Drawing tokens on the GPU: the rules of the reference, and recorded steps that draw the reference's tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gpu_cases import REFERENCE, random_floats
from test_gpu_engine import finish
from tiny_models import build_hf, read_golden

from mlxr.cache.arena import Arena
from mlxr.core.model_settings import ModelSettings
from mlxr.core.types import SamplingParams
from mlxr.engine.engine import Engine
from mlxr.engine.request import EngineRequest
from mlxr.engine.sampler import draw_uniform, draw_uniforms
from mlxr.engine.scheduler import Scheduler
from mlxr.engine.sequence import TokenEvent
from mlxr.kernels.context import Context
from mlxr.kernels.gpu.graph import RecordedStep
from mlxr.kernels.gpu.pool import Pool
from mlxr.kernels.gpu.steps import Run
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.sample import SampleRow, sample

RULES = (
    {},
    {"top_k": 7},
    {"top_p": 0.6},
    {"min_p": 0.2},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.05},
    {"top_k": 3, "top_p": 0.99, "min_p": 0.9},
    {"top_p": 1e-9},
)


HOST_RULES: list[dict[str, Any]] = [
    {"typical_p": 0.7},
    {"top_n_sigma": 1.0},
    {"xtc_probability": 1.0, "xtc_threshold": 0.02},
    {"dynatemp_range": 0.5},
    {"temperature_last": True, "min_p": 0.1},
    {"mirostat": 1, "mirostat_tau": 3.0},
    {"mirostat": 2, "mirostat_tau": 3.0, "min_tokens": 3},
    {"dry_multiplier": 2.0, "dry_allowed_length": 0},
]


def list_rows(temperature: float) -> list[SampleRow]:
    uniforms = [*np.random.default_rng(3).random(5).tolist(), 0.0, 0.999]
    return [
        SampleRow(SamplingParams(temperature=temperature, **rule), uniform=uniform)
        for rule in RULES
        for uniform in uniforms
    ]


@pytest.mark.smoke
@pytest.mark.parametrize("temperature", [0.3, 1.0, 5.0])
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_rules_are_those_of_the_reference(gpu: Context, temperature: float, kind: str) -> None:
    mx, rows = gpu.gpu.mx, list_rows(temperature)
    logits = mx.array(random_floats(9, len(rows), 777) * 2).astype(getattr(mx, kind))  # many equal ones in 16 bits
    gpu.ledger.reset()
    found = sample(gpu, logits, rows)
    wanted = sample(REFERENCE, np.array(logits.astype(mx.float32)), rows)
    assert [row.implementation for row in gpu.ledger.snapshot().dispatches] == ["gpu"]
    assert [row.token_id for row in found] == [row.token_id for row in wanted]
    assert [row.logprob for row in found] == pytest.approx([row.logprob for row in wanted], abs=1e-4)


def test_equal_logits_are_drawn_by_their_ids(gpu: Context) -> None:
    logits = np.zeros((4, 100), np.float32)
    logits[3] = -0.0
    rows = [
        SampleRow(SamplingParams(temperature=1), uniform=0.255),
        SampleRow(SamplingParams(temperature=1, top_k=10), uniform=0.5),
        SampleRow(SamplingParams(temperature=1, top_p=0.295), uniform=0.999),
        SampleRow(),
    ]
    found = sample(gpu, gpu.gpu.mx.array(logits), rows)
    assert [row.token_id for row in found] == [25, 5, 29, 0]


def test_greedy_rows_stand_beside_drawn_ones(gpu: Context) -> None:
    logits = random_floats(10, 2, 300)
    logits[0, 17] = np.inf
    logits[1, :] = -np.inf
    logits[1, [5, 9]] = 1
    rows = [SampleRow(SamplingParams(temperature=0.7), uniform=0.5), SampleRow()]
    with pytest.raises(ValueError, match="row 0"):
        sample(gpu, gpu.gpu.mx.array(logits), rows)
    logits[0, 17] = 0
    assert sample(gpu, gpu.gpu.mx.array(logits), rows)[1].token_id == 5


def test_numbers_of_a_stream_are_the_same_one_by_one() -> None:
    many = draw_uniforms(11, 5, 9, answer=2)
    assert many.tolist() == [draw_uniform(11, index, 2) for index in range(5, 14)]


def answer(
    ctx: Context, type_name: str, *params: SamplingParams, case: str = "llama-gqa-80-tied"
) -> tuple[list[list[int]], set[str]]:
    """Answer one request for each of `params`, all at once; return the tokens, and how steps were recorded."""
    config, seed, tokens, _ = read_golden(case)
    settings = ModelSettings(page_size=8, kv_type="f32")
    engine = Engine(build_hf(ctx, config, seed, type_name), ctx, settings, eos_ids=(), pages=40)
    text = tokens.reshape(-1).tolist()[:5]
    ids = [engine.submit(EngineRequest(text[: 2 + index], one)) for index, one in enumerate(params)]
    events = finish(engine)
    drawn = [(event.sequence_id, event.token_id) for event in events if event.token_id is not None]
    return [[token_id for answer_id, token_id in drawn if answer_id == one] for one in ids], list_ways(engine)


def list_ways(engine: Engine) -> set[str]:
    """Return the names of the classes of the engine's recorded steps."""
    pools = [pool for pool in (*engine._arena.k_pools, *engine._arena.states) if isinstance(pool, Pool)]
    return {type(step).__name__ for pool in pools for step in pool.graphs.values()}


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("case", "type_name", "way"),
    [
        ("llama-gqa-80-tied", "q8_0", "RecordedStep"),
        ("llama-gqa-80-tied", "f32", "RecordedStep"),
        ("llama-gqa-80-tied", "q8_0", "CompiledStep"),
        ("gemma4e", "q8_0", "RecordedStep"),
        ("gemma4e", "f32", "RecordedStep"),
        ("qwen3moe", "q8_0", "RecordedStep"),
        ("qwen3moe", "f32", "CompiledStep"),
        ("lfm2", "q8_0", "RecordedStep"),
        ("lfm2moe", "f32", "CompiledStep"),
        ("qwen35", "f32", "RecordedStep"),
        ("qwen35", "q8_0", "CompiledStep"),
        ("qwen35moe", "q8_0", "RecordedStep"),
        ("granite4h", "q8_0", "RecordedStep"),
        ("falcon-h1", "f32", "RecordedStep"),
        ("nemotron-h-moe", "q8_0", "RecordedStep"),
    ],
)
@pytest.mark.slow
def test_recorded_steps_answer_as_the_reference(
    gpu: Context, monkeypatch: pytest.MonkeyPatch, case: str, type_name: str, way: str
) -> None:
    """Answers of several lengths, across pages, drawn and greedy; without a machine MLX records.

    In 16 bits a drawn token may be another one than the reference's, and with experts a greedy one, too, as near ties
    choose other experts. So steps that are not recorded stand beside them.
    """
    if way == "CompiledStep":
        monkeypatch.setattr(gpu.gpu, "machine", None)
    params = [
        SamplingParams(max_tokens=12, temperature=0),
        SamplingParams(max_tokens=9, temperature=0.9, top_p=0.8, seed=5),
        SamplingParams(max_tokens=14, temperature=1.2, top_k=20, min_p=0.02, seed=6),
    ]
    found, ways = answer(gpu, type_name, *params, case=case)
    assert ways == {way}
    expected, _ = answer(REFERENCE, type_name, *params, case=case)
    has_near_ties = gpu.gpu.narrow and "moe" in case
    if not has_near_ties:
        assert found[0] == expected[0]
    if gpu.gpu.narrow:
        monkeypatch.setattr("mlxr.kernels.gpu.graph.takes_step", lambda _batch: False)
        expected, ways = answer(gpu, type_name, *params, case=case)
        assert not ways
    compared = 8 if has_near_ties else None  # a recorded step may have more rows, and their sums another order
    assert [tokens[:compared] for tokens in found] == [tokens[:compared] for tokens in expected]


def test_requests_that_need_the_host_join_recorded_steps(gpu: Context) -> None:
    params = [
        SamplingParams(max_tokens=6, temperature=0),
        SamplingParams(max_tokens=6, temperature=0.8, seed=2, repetition_penalty=1.3),
        SamplingParams(max_tokens=5, temperature=0, logprobs=2, n=2),
        *(SamplingParams(max_tokens=6, temperature=0.8, seed=3, **rule) for rule in HOST_RULES),
    ]
    assert answer(gpu, "q8_0", *params)[0] == answer(REFERENCE, "q8_0", *params)[0]


@pytest.mark.parametrize("case", ["llama-gqa-80-tied", "qwen35"])
def test_steps_run_ahead(gpu: Context, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """The host waits where an answer begins or ends, its table of pages gets wider, and a state becomes a snapshot.

    Weights are f32 where others are multiplied in 16 bits, as near ties would tell the answers apart.
    """
    type_name = "f32" if gpu.gpu.narrow else "q8_0"
    waits: list[int] = []  # positions of steps that started after the one in front was read
    start = RecordedStep.start

    def watch(step: RecordedStep, batch: RaggedBatch, rows: int, before: Run | None) -> Run:
        if before is None:
            waits.append(int(batch.positions[0]))
        return start(step, batch, rows, before)

    monkeypatch.setattr(RecordedStep, "start", watch)
    params = SamplingParams(max_tokens=22, temperature=0)
    found = answer(gpu, type_name, params, case=case)  # 21 steps, which read positions 2 to 22
    assert found == (answer(REFERENCE, type_name, params, case=case)[0], {"RecordedStep"})
    # the table has 1, 2 and then 4 columns, a step before positions 8 and 16 are read
    assert waits == ([2, 7, 9, 15, 17] if case == "qwen35" else [2, 7, 15])


def test_states_survive_steps_that_ran_ahead_for_nothing(gpu: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers come, part, lose their slots and go on; each equals the answer given alone.

    In 16 bits a sum of few rows is rounded otherwise than one of many, so there the answers are compared with those of
    steps that are neither recorded nor run ahead. Both runs then have the same steps: no prompt waits for a step that
    was started ahead, nor for others, as long as it took.
    """
    config, seed, tokens, _ = read_golden("qwen35")
    texts = [tokens.reshape(-1).tolist()[start : start + 9] for start in (0, 1, 2, 0)]
    params = [SamplingParams(max_tokens=17, temperature=0.9, seed=index, n=1 + index % 2) for index in range(4)]

    def open_engine() -> Engine:
        settings = ModelSettings(page_size=4, kv_type="f32", prefill_chunk_tokens=8, max_sequences=4)
        return Engine(build_hf(gpu, config, seed, "q8_0"), gpu, settings, eos_ids=(), pages=12)

    def list_tokens(events: list[TokenEvent], request: int) -> list[tuple[int, int | None]]:
        return sorted((event.index, event.token_id) for event in events if event.sequence_id == request)

    def answer_alone() -> list[list[tuple[int, int | None]]]:
        answers = []
        for text, one in zip(texts, params, strict=True):
            engine = open_engine()
            request = engine.submit(EngineRequest(text, one))
            answers.append(list_tokens(finish(engine), request))
        return answers

    def answer_together() -> tuple[list[list[tuple[int, int | None]]], set[str]]:
        engine, events, ids = open_engine(), [], []
        for text, one in zip(texts, params, strict=True):
            ids.append(engine.submit(EngineRequest(text, one)))
            for _ in range(5):
                events += engine.step()
                engine.check()
        events += finish(engine)
        assert engine.stats().preemptions
        return [list_tokens(events, request) for request in ids], list_ways(engine)

    if gpu.gpu.narrow:
        schedule = Scheduler.schedule
        monkeypatch.setattr(Scheduler, "schedule", lambda self, _ahead, **_: schedule(self))
    found, ways = answer_together()
    assert ways == {"RecordedStep"}
    if gpu.gpu.narrow:
        monkeypatch.setattr("mlxr.kernels.gpu.graph.takes_step", lambda _batch: False)
        assert (found, set()) == answer_together()
    else:
        assert found == answer_alone()


def test_pages_are_not_touched_beside_a_step_that_runs_ahead(gpu: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[bool] = []
    pool = Arena(gpu, 1, 3, 1, 8, 64, "f32").k_pools[0]
    assert isinstance(pool, Pool)
    monkeypatch.setattr(type(gpu.gpu.machine), "synchronize", lambda _machine: waits.append(True))
    pool.write_page(0, pool.read_page(1))
    pool.copy_page(0, 2)
    assert len(waits) == 3
