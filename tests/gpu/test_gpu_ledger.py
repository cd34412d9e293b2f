"""The ledger of a GPU counts every launch, and names MLX's own operations as such."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from gpu_cases import random_floats, skip_unless_emulated
from ran import list_ran

from mlxr.core.model_settings import ModelSettings
from mlxr.core.types import SamplingParams
from mlxr.engine.engine import Engine
from mlxr.engine.request import EngineRequest
from mlxr.formats import TensorSource, encode_tensor
from mlxr.kernels.collectives.gpu import GATHER, SUM
from mlxr.kernels.context import Context
from mlxr.kernels.elementwise.gpu import ADD, GATE, SCALE
from mlxr.kernels.gpu import steps
from mlxr.kernels.gpu.deferred import settle
from mlxr.kernels.gpu.kernel import Kernel
from mlxr.kernels.gpu.launcher import name_launch
from mlxr.kernels.gpu.pool import COPY_PAGE
from mlxr.kernels.linear import linear, prepare
from mlxr.kernels.linear.blocks import ROWS, TILES
from mlxr.kernels.norms.gpu import GATED, NORM

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from tiny_models import build_hf, read_golden


@pytest.fixture
def emulated() -> Context:
    skip_unless_emulated()
    return Context("emulated")


def spy(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Kernels by name as the emulator runs them."""
    ran: Counter[str] = Counter()
    emulator = ctx.gpu.launcher.emulator
    run_at = emulator.run_at

    def count(kernel: Kernel, *args: Any) -> None:
        ran[kernel.name] += 1
        run_at(kernel, *args)

    monkeypatch.setattr(emulator, "run_at", count)
    return ran


@pytest.mark.smoke
@pytest.mark.slow
def test_recorded_steps_count_each_launch_each_time(emulated: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    config, seed, tokens, _ = read_golden("llama-gqa-64")
    model = build_hf(emulated, config, seed, "q8_0")
    engine = Engine(model, emulated, ModelSettings(page_size=16, kv_type="f32"), eos_ids=(), pages=32)
    ran = spy(emulated, monkeypatch)
    emulated.ledger.reset()
    engine.submit(EngineRequest(tokens.reshape(-1)[:5].tolist(), SamplingParams(max_tokens=12, temperature=0)))
    while engine.has_work:
        engine.step()
    assert ran["attend_decode"] >= 11 * len(model.config.layers)
    counted: Counter[str] = Counter()
    for row in emulated.ledger.snapshot().dispatches:
        if row.implementation == "gpu" and not row.variant.startswith("library"):
            kernel = row.variant.partition(" ")[0]
            names = {kernel, row.operator, f"{row.operator}_{kernel}"} & ran.keys()
            counted[max(names, key=len)] += row.count
    assert counted == ran


def test_a_model_counts_where_its_tokens_go(emulated: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, and recorded steps of one, two and three sequences, the last filled up to four: as on a CPU."""
    monkeypatch.setattr(steps, "advance_batch", lambda *_: None)  # what runs ahead for nothing would count, too
    config, seed, tokens, _ = read_golden("qwen3moe")
    told = []
    for ctx in (emulated, Context("cpu")):
        model = build_hf(ctx, config, seed)
        engine = Engine(model, ctx, ModelSettings(page_size=16, kv_type="f32", draft="off"), eos_ids=(), pages=32)
        ctx.ledger.reset()
        for number in range(3):
            prompt = tokens.reshape(-1)[: 5 + number].tolist()
            engine.submit(EngineRequest(prompt, SamplingParams(max_tokens=9 - 3 * number, temperature=0)))
        while engine.has_work:
            engine.step()
        rows = sum(row.rows for row in ctx.ledger.snapshot().expert_rows if row.implementation != "reference")
        told.append((model.read_routing(), rows))
    (routing, launched), (expected, multiplied) = told
    assert routing == expected
    assert routing is not None
    assert routing.rows > 0
    assert launched > 2 * routing.rows  # with what fills batches up
    assert multiplied == 3 * routing.rows  # gate, up and down


def test_products_are_named_by_the_kernel_and_the_type(emulated: Context) -> None:
    values = random_floats(3, 64, 256)
    for name in ("q4_k", "f16"):
        tensor = TensorSource("weight", name, values.shape, encode_tensor(name, values))
        weight = prepare(emulated, [tensor])
        for tokens in (1, 20):
            settle(linear(emulated, emulated.gpu.mx.array(random_floats(4, tokens, 256)), weight))
    ran = list_ran(emulated, "linear")
    assert ran == {"rows q4_k": 1, "fill q4_k": 1, "matmul f32": 1, "rows f16": 1, "matmul f16": 1}


def test_mlx_operations_on_a_cpu_are_not_called_gpu() -> None:
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    ctx = Context("mlx-cpu")
    config, seed, tokens, _ = read_golden("llama-gqa-64")
    model = build_hf(ctx, config, seed, "f32")
    engine = Engine(model, ctx, ModelSettings(page_size=16, kv_type="f32"), eos_ids=(), pages=32)
    engine.submit(EngineRequest(tokens.reshape(-1)[:5].tolist(), SamplingParams(max_tokens=3, temperature=0)))
    while engine.has_work:
        engine.step()
    rows = ctx.ledger.snapshot().dispatches
    assert {row.implementation for row in rows} == {"mlx"}
    operators = {"activate", "attend", "embed", "linear", "rms_norm", "sample", "rope_and_write_kv"}
    assert {row.operator for row in rows} == operators


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("kernel", "constants", "name"),
    [
        (TILES, {"TYPE_A": 12, "TYPE_B": 14, "GATE": 1, "NORM": 0}, ("linear", "gpu", "tiles q4_k+q6_k+gate")),
        (ROWS, {"TYPE_A": 8, "TYPE_B": 8, "RESIDUAL": 1, "NORM": 1}, ("linear", "gpu", "rows q8_0+norm+residual")),
        (NORM, {"CENTRED": 1}, ("rms_norm", "gpu", "centred")),
        (GATED, {}, ("gated_norm", "gpu", "")),
        (ADD, {}, ("add", "gpu", "")),
        (SCALE, {}, ("scale", "gpu", "")),
        (GATE, {}, ("gate_heads", "gpu", "")),
        (SUM, {}, ("all_reduce", "gpu", "")),
        (GATHER, {}, ("all_gather", "gpu", "")),
        (COPY_PAGE, {}, ("copy_page", "gpu", "")),
    ],
)
def test_names_of_launches(kernel: Kernel, constants: dict[str, int], name: tuple[str, str, str]) -> None:
    assert name_launch(kernel, constants, {}) == name
