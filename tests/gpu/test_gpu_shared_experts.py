"""A shared expert is added, with its gate and without, by the norm that follows, or wherever else the sum is needed."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_cases import REFERENCE, Floats, make_tensor, note_launches, random_floats, relative_error

from mlxr.core.model_settings import ModelSettings
from mlxr.core.types import SamplingParams
from mlxr.engine.engine import Engine
from mlxr.engine.request import EngineRequest
from mlxr.kernels.context import Context
from mlxr.kernels.elementwise import add, gate_heads, scale
from mlxr.kernels.elementwise import gpu as scale_gpu
from mlxr.kernels.elementwise.gpu import defer_sum
from mlxr.kernels.gpu.deferred import Summands, settle
from mlxr.kernels.linear import linear, prepare
from mlxr.kernels.linear.gpu import MIN_SQUARED
from mlxr.kernels.norms import layer_norm, rms_norm

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from tiny_models import build_hf, read_golden

EXACT, NARROW = 3e-6, 8e-3
RANKS = 3


@dataclass
class Case:
    """Rows of the stream, results of experts by rank, the shared expert's result or product, its input and gate."""

    ctx: Context
    stream: Floats
    ranks: Floats
    x: Floats
    shared: Floats
    gate: str | None = "f32"
    x_type: str = "float32"
    shared_type: str = "float32"
    shares: int = 1

    def expect(self) -> Floats:
        """The sum of the experts and the shared one, as the reference has it."""
        shared = self.shared
        if self.gate is not None:
            weight = prepare(REFERENCE, [make_tensor(self.gate, 1, self.x.shape[1])])
            shared = gate_heads(REFERENCE, shared, linear(REFERENCE, self.x, weight))
        return np.asarray(self.ranks.sum(0) + shared)

    def run(self) -> Any:
        """Return the same sum on the GPU, which waits to be computed."""
        mx = self.ctx.gpu.mx
        made: Any = mx.array(self.shared).astype(getattr(mx, self.shared_type))
        if self.shares > 1:
            parts = np.stack([random_floats(9 + i, *self.shared.shape) for i in range(self.shares - 1)])
            made = defer_sum(self.ctx, Summands(mx.array(np.concatenate([[self.shared - parts.sum(0)], parts]))))
        if self.gate is not None:
            weight = prepare(self.ctx, [make_tensor(self.gate, 1, self.x.shape[1])])
            x = mx.array(self.x).astype(getattr(mx, self.x_type))
            made = gate_heads(self.ctx, made, linear(self.ctx, x, weight))
        return add(self.ctx, defer_sum(self.ctx, Summands(mx.array(self.ranks))), made)


def make_case(ctx: Context, rows: int, columns: int, **named: Any) -> Case:
    """Numbers that are exact in all types."""
    mx = ctx.gpu.mx

    def numbers(seed: int, *shape: int) -> Floats:
        return np.array(mx.array(random_floats(seed, *shape)).astype(mx.bfloat16).astype(mx.float16).astype(mx.float32))

    stream, ranks = numbers(1, rows, columns), numbers(2, RANKS, rows, columns)
    return Case(ctx, stream, ranks, numbers(3, rows, columns) * 2, numbers(4, rows, columns), **named)


def check_norm(case: Case, norm: Any = rms_norm) -> None:
    """Assert that the norm with the sum is the reference's; a GPU rounds what a 16-bit gate multiplies."""
    allowed = NARROW if case.gate in ("bf16", "f16") and case.ctx.gpu.narrow else EXACT
    weight = random_floats(5, case.stream.shape[1])
    normed, summed = norm(case.ctx, case.ctx.gpu.mx.array(case.stream), weight, 1e-5, case.run())
    expected = norm(REFERENCE, case.stream, weight, 1e-5, case.expect())
    assert relative_error(summed, expected[1]) < allowed
    assert relative_error(settle(normed), expected[0]) < allowed


@pytest.mark.smoke
@pytest.mark.parametrize("columns", [64, 100, 2080])
@pytest.mark.parametrize("rows", [1, 2, 7, 32, 100])
def test_the_norm_takes_it_in(gpu: Context, rows: int, columns: int) -> None:
    """Rows of 100 are no whole blocks, so MLX makes their gates."""
    check_norm(make_case(gpu, rows, columns))


@pytest.mark.parametrize("named", [
    {"x_type": "bfloat16"},
    {"x_type": "float16", "shared_type": "bfloat16"},
    {"gate": "bf16", "shared_type": "float16"},
    {"gate": "f16", "x_type": "bfloat16", "shares": 2},
    {"gate": None},
    {"gate": None, "shared_type": "bfloat16"},
    {"gate": None, "shares": 3},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("rows", [1, 9])
def test_types_and_shares(gpu: Context, rows: int, named: dict[str, Any]) -> None:
    check_norm(make_case(gpu, rows, 288, **named))
    check_norm(make_case(gpu, rows, 135, **named | {"gate": None}))


@pytest.mark.parametrize("gate", ["f32", None])
def test_rows_that_a_threadgroup_takes_in_turns(gpu: Context, gate: str | None) -> None:
    case = make_case(gpu, 2, 4128, gate=gate)
    check_norm(case)
    check_norm(case, layer_norm)
    assert relative_error(settle(case.run()), case.expect()) < EXACT


@pytest.mark.parametrize("rows", [1, 20, 300])
def test_nothing_but_the_norm_is_launched(gpu: Context, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(gpu, rows, 64)
    launched = note_launches(gpu, monkeypatch)
    check_norm(case)
    assert launched == ["rms_norm"]


def test_it_counts_how_far_the_gate_is_open(gpu: Context) -> None:
    case = make_case(gpu, 5, 64)
    case.x[:2] *= 400  # wide open, or shut
    check_norm(case)
    check_norm(case, layer_norm)
    expected, result = case.expect(), settle(case.run())
    case.x *= np.float32(1.1)
    assert relative_error(result, expected) < EXACT
    assert relative_error(result, case.expect()) > 1e-3


@pytest.mark.parametrize("gate", ["f32", None])
def test_sums_without_a_norm(gpu: Context, gate: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum alone, the sum added to the stream, and the sum multiplied before that."""
    case, array = make_case(gpu, 7, 96, gate=gate), gpu.gpu.mx.array
    launched = note_launches(gpu, monkeypatch)
    expected = case.expect()
    assert relative_error(settle(case.run()), expected) < EXACT
    result = add(gpu, array(case.stream), case.run(), 0.5)
    assert relative_error(result, (case.stream + expected) * np.float32(0.5)) < EXACT
    result = scale(gpu, scale(gpu, case.run(), 0.3), 0.7)
    assert relative_error(settle(result), expected * np.float32(0.21)) < EXACT
    assert launched == ["add"] * 3
    _, summed = rms_norm(gpu, array(case.stream), np.ones(96, np.float32), 1e-5, scale(gpu, case.run(), 0.25))
    assert relative_error(summed, case.stream + expected * np.float32(0.25)) < EXACT
    both = add(gpu, scale(gpu, case.run(), 2.0), array(case.shared))  # there is no room for a third one
    assert relative_error(both, expected * np.float32(2) + case.shared) < EXACT
    assert launched == ["add"] * 3 + ["rms_norm"] + ["add"] * 2


@pytest.mark.parametrize("rows", [1, 6])
def test_the_norm_multiplies_what_a_product_made(gpu: Context, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some models multiply everything that they add to the stream."""
    mx, x, stream = gpu.gpu.mx, random_floats(1, rows, 96), random_floats(2, rows, 64)
    tensor, weight = make_tensor("q8_0", 64, 96), random_floats(3, 64)
    launched = note_launches(gpu, monkeypatch)
    made = scale(gpu, linear(gpu, mx.array(x), prepare(gpu, [tensor])), 0.22)
    normed, summed = rms_norm(gpu, mx.array(stream), weight, 1e-5, made)
    squared = gpu.gpu.has_squares and rows >= MIN_SQUARED
    way = "linear_tiles" if gpu.gpu.has_tiles else "linear_squares" if squared else "linear_rows"
    assert launched == [way, "rms_norm"]
    expected = scale(REFERENCE, linear(REFERENCE, x, prepare(REFERENCE, [tensor])), 0.22)
    wanted = rms_norm(REFERENCE, stream, weight, 1e-5, expected)
    allowed = NARROW if gpu.gpu.has_tiles or squared else EXACT
    assert relative_error(summed, wanted[1]) < allowed
    assert relative_error(settle(normed), wanted[0]) < allowed
    made = scale(gpu, linear(gpu, mx.array(x), prepare(gpu, [tensor])), 0.22)
    assert relative_error(settle(made), expected) < allowed


@pytest.mark.parametrize("columns", [4100, 9000, 20004])
def test_long_rows_are_shared_by_threadgroups(gpu: Context, columns: int) -> None:
    x, other, array = random_floats(1, 2, columns), random_floats(2, 2, columns), gpu.gpu.mx.array
    assert relative_error(add(gpu, array(x), array(other), 0.5), (x + other) * np.float32(0.5)) < EXACT


def test_a_gate_may_be_asked_for_alone(gpu: Context) -> None:
    """Rows and their gate can each be had alone."""
    mx, x, y = gpu.gpu.mx, random_floats(1, 3, 64), random_floats(2, 3, 64)
    tensor = make_tensor("f32", 1, 64)
    gates = linear(gpu, mx.array(x), prepare(gpu, [tensor]))
    result, expected = gate_heads(gpu, mx.array(y), gates), linear(REFERENCE, x, prepare(REFERENCE, [tensor]))
    assert relative_error(settle(result), gate_heads(REFERENCE, y, expected)) < EXACT
    assert relative_error(settle(gates), expected) < EXACT
    summed = add(gpu, mx.array(x), gate_heads(gpu, mx.array(y), linear(gpu, mx.array(x), prepare(gpu, [tensor]))))
    assert relative_error(summed, x + gate_heads(REFERENCE, y, expected)) < EXACT


@pytest.mark.parametrize("tokens", [1, 3, 20])
def test_the_product_of_the_shared_expert_waits_for_the_sum(gpu: Context, tokens: int) -> None:
    mx, ranks, x, inner = gpu.gpu.mx, random_floats(1, 2, tokens, 64), random_floats(2, tokens, 64), 96
    up, tensor, gate = random_floats(3, tokens, inner), make_tensor("q8_0", 64, inner), make_tensor("f32", 1, 64)
    sums = []
    for ctx in (gpu, REFERENCE):
        array: Any = mx.array if ctx is gpu else np.asarray
        shared = linear(ctx, array(up), prepare(ctx, [tensor]))
        gated = gate_heads(ctx, shared, linear(ctx, array(x), prepare(ctx, [gate])))
        chosen = defer_sum(ctx, Summands(array(ranks))) if ctx is gpu else ranks.sum(0)
        sums.append(settle(add(ctx, chosen, gated)))
    assert relative_error(*sums) < (NARROW if gpu.gpu.narrow or gpu.gpu.has_squares else EXACT)


def test_what_waits_for_a_norm_is_begun_with(gpu: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the host is never far ahead of the device, however long a prompt is; products still wait."""
    begun: list[Any] = []
    monkeypatch.setattr(gpu.gpu.mx, "async_eval", lambda *arrays: begun.extend(arrays))
    case = make_case(gpu, 3, 64)
    stream, made = gpu.gpu.mx.array(case.stream), case.run()
    gpu.gpu.start(stream, made)
    assert made.is_open
    assert [array.shape for array in begun] == [(3, 64), (RANKS, 3, 64), (3, 64)]
    gpu.gpu.start(stream, linear(gpu, gpu.gpu.mx.array(case.x), prepare(gpu, [make_tensor("q8_0", 64, 64)])))
    assert len(begun) == 3
    gpu.gpu.start(settle(made), None)
    assert begun[3] is settle(made)


@pytest.mark.parametrize("rows", [1, 9])
def test_no_kernel_leaves_its_arrays(sanitized: Context, rows: int) -> None:
    for columns in (100, 288):
        case = make_case(sanitized, rows, columns, x_type="bfloat16", shares=2)
        check_norm(case)
        assert relative_error(settle(case.run()), case.expect()) < EXACT


@pytest.mark.parametrize("name", ["qwen35moe", "qwen2moe", "glm4moe", "granitemoe-shared"])
def test_recorded_steps_add_nothing_up_by_itself(gpu: Context, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither sums nor gates of rows have launches of their own in steps; after a prompt the last row's sum has one."""
    config, seed, tokens, _ = read_golden(name)
    model = build_hf(gpu, config, seed)
    monkeypatch.setattr(scale_gpu, "MAX_SUMMED", model.config.hidden)  # so that logits are more than that, as they are
    engine = Engine(model, gpu, ModelSettings(page_size=16, kv_type="f32", draft="off"), eos_ids=(), pages=32)
    counted = []
    for answer_tokens in (1, 9):
        gpu.ledger.reset()
        engine.submit(
            EngineRequest(tokens.reshape(-1)[:5].tolist(), SamplingParams(max_tokens=answer_tokens, temperature=0))
        )
        while engine.has_work:
            engine.step()
        rows = [row for row in gpu.ledger.snapshot().dispatches if row.operator == "add"]
        counted.append(sum(row.count for row in rows))
    assert counted == [1, 1]
