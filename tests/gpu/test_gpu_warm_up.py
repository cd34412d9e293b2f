"""Kernels are compiled and steps recorded before the first request, which compiles nothing and sees no trace of it."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
from gpu_cases import skip_unless_emulated

from mlxr.core.errors import DeviceError
from mlxr.core.model_settings import ModelSettings
from mlxr.core.settings import resolve
from mlxr.core.types import SamplingParams
from mlxr.engine.engine import Engine
from mlxr.engine.request import EngineRequest
from mlxr.kernels.context import Context
from mlxr.kernels.gpu.emulator import Emulator
from mlxr.models.decoder import Decoder
from mlxr.service.opening import report_warm_up, warm_up

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from tiny_models import build_hf, read_golden

SETTINGS = ModelSettings(page_size=16, kv_type="f32", draft="off", max_sequences=2, prefill_chunk_tokens=4)
CASES = ["llama-gqa-64", "qwen3moe", "qwen35", "gemma3"]


def open_model(name: str) -> tuple[Decoder, Engine, Emulator]:
    skip_unless_emulated()
    ctx = Context("emulated")
    config, seed, _, _ = read_golden(name)
    model = build_hf(ctx, config, seed)
    return model, Engine(model, ctx, SETTINGS, eos_ids=(), pages=12), ctx.gpu.launcher.emulator


def answer(engine: Engine) -> list[tuple[int, int | None]]:
    """Prompts of two, three and nine tokens; greedy and drawn; one and two at a time."""
    events = []
    for number, (length, temperature) in enumerate([(2, 0.0), (3, 1.0), (9, 0.0)]):
        params = SamplingParams(max_tokens=4 + 3 * number, temperature=temperature, seed=number)
        engine.submit(EngineRequest([1 + number + place for place in range(length)], params))
    while engine.has_work:
        events += [(event.sequence_id, event.token_id) for event in engine.step()]
    return events


def test_what_no_kernel_of_a_gpu_does_is_refused() -> None:
    skip_unless_emulated()
    for name, why in (
        ("qwen4exp", "several residual streams side by side"),
        ("glm5-next", "the activation limited_swiglu"),
        ("llama4", "attends to chunks"),
        ("laguna", "gates by softplus"),
    ):
        config, seed, _, _ = read_golden(name)
        with pytest.raises(DeviceError, match=f"{why}.* run it with --device cpu"):
            build_hf(Context("emulated"), config, seed)


@pytest.mark.parametrize("name", CASES)
def test_requests_find_all_kernels_compiled(name: str) -> None:
    model, engine, emulator = open_model(name)
    before, told = engine.stats(), []
    steps = engine.warm_up.run(progress=lambda done, total: told.append((done, total)))
    assert told == [(done, steps) for done in range(1, steps + 1)]
    assert steps == 2 + 2 + 3 + 1  # one and two sequences, short and long; prompts of two to four tokens; two prompts
    assert engine.stats() == before
    assert model.ctx.ledger.snapshot().dispatches == model.ctx.ledger.snapshot().expert_rows == []
    routing = model.read_routing()
    assert routing is None or (routing.rows, routing.layer_steps) == (0, 0)
    engine.check()
    compiled = set(emulator._libraries)
    events = answer(engine)
    assert set(emulator._libraries) == compiled
    assert events == answer(open_model(name)[1])


def test_one_sequence_needs_less() -> None:
    _, engine, _ = open_model(CASES[0])
    assert engine.warm_up.run(1) == 2 + 3


def test_a_processor_has_nothing_to_rehearse() -> None:
    cpu = Context("cpu")
    config, seed, _, _ = read_golden(CASES[0])
    engine = Engine(build_hf(cpu, config, seed), cpu, SETTINGS, eos_ids=(), pages=12)
    assert engine.warm_up.run() == 0


@pytest.mark.smoke
@pytest.mark.slow
def test_the_setting_decides(caplog: pytest.LogCaptureFixture) -> None:
    _, engine, emulator = open_model(CASES[0])
    for word in ("auto", "off"):
        warm_up(engine, "emulated", resolve({"warm_up": word}, {}))
    assert not emulator._libraries
    with caplog.at_level(logging.INFO, "mlxr"):
        warm_up(engine, "emulated", resolve({"warm_up": "on"}, {}), 1, report_warm_up)
    assert emulator._libraries
    lines = [record.getMessage() for record in caplog.records]
    assert lines[-2] == "kernels are compiled: 5 of 5 steps"
    assert lines[-1].startswith("5 steps are ready after ")
