"""Some rows times blocks that are unpacked in registers, against decoding everything in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from gpu_cases import (
    QUANTISED,
    REFERENCE,
    Floats,
    expect_product,
    make_tensor,
    note_launches,
    random_floats,
    relative_error,
    run_layer,
)

from mlxr.formats import TensorSource
from mlxr.kernels.context import Context
from mlxr.kernels.gpu.recording import Recorder
from mlxr.kernels.linear import prepare
from mlxr.kernels.linear.parts import LAYOUTS, Extras
from mlxr.kernels.linear.unpacked import UnpackPlan, UnpackShape, multiply_unpacked, plan_unpacked

ROOM_BYTES = 227 * 1024
NARROW = 5e-3  # weights and scales rounded to bf16; x is exact in it
SMALL = UnpackPlan(16, 1, 1, stages=2, x_stages=6)
PLANS = [
    UnpackPlan(32, 2, 1, shares=2, stages=3, x_stages=7, ahead=3, depth=1, spread=1, boxed=0),
    UnpackPlan(16, 1, 2, stages=2, x_stages=6, fillers=1, depth=1, boxed=0),
    UnpackPlan(64, 1, 1, stages=3, x_stages=8, ahead=1, fillers=4, boxed=0),
    UnpackPlan(32, 1, 2, stages=3, x_stages=7, fillers=4, spread=1, boxed=1),
]


def round_floats(*shape: int) -> Floats:
    """Random numbers that are exact in bf16."""
    bits = random_floats(3, *shape).view(np.uint32) & np.uint32(0xFFFF0000)
    return bits.view(np.float32)


def run(
    gpu: Context,
    tensors: list[TensorSource],
    tokens: int,
    plan: UnpackPlan = SMALL,
    gate: int = 0,
    biased: bool = False,
    added: bool = False,
) -> float:
    mx, x = gpu.gpu.mx, round_floats(tokens, tensors[0].shape[1])
    biases = [random_floats(9, tensor.shape[0]) for tensor in tensors] if biased else None
    expected, residual = expect_product(tensors, x, biases, gate, added)
    parts, bias = prepare(gpu, tensors, biases).payload
    weights = [(LAYOUTS[part.type_name].number, part.rows, part.raw) for part in parts]
    extras = Extras(gate, bias, residual=None if residual is None else mx.array(residual))
    result = np.array(multiply_unpacked(gpu.gpu, mx.array(x).astype(mx.bfloat16), weights, extras, mx.float32, plan))
    return relative_error(result.sum(axis=0) if plan.shares > 1 else result, expected)


@pytest.mark.smoke
@pytest.mark.parametrize("type_name", QUANTISED)
def test_every_type(gpu: Context, type_name: str) -> None:
    assert run(gpu, [make_tensor(type_name, 48, 768)], 13) < NARROW


@pytest.mark.parametrize("type_name", ["q4_k", "q6_k"])
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_every_plan(gpu: Context, plan: UnpackPlan, type_name: str) -> None:
    assert run(gpu, [make_tensor(type_name, 144, 1280)], plan.width + 5, plan) < NARROW


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_the_last_unit_ends_with_the_row(gpu: Context, plan: UnpackPlan) -> None:
    """With a bias, which only the first of several shares adds."""
    assert run(gpu, [make_tensor("q8_0", 144, 1024 + 64)], plan.width + 5, plan, biased=True) < NARROW


@pytest.mark.parametrize("gate", [1, 2])
def test_gate_with_bias(gpu: Context, gate: int) -> None:
    assert run(gpu, [make_tensor("q5_k", 2 * 48, 512)], 10, gate=gate, biased=True) < NARROW


def test_parts_of_two_types_with_biases_and_sum(gpu: Context) -> None:
    tensors = [make_tensor("q4_k", 80, 512), make_tensor("q6_k", 32, 512)]
    assert run(gpu, tensors, 21, biased=True, added=True) < NARROW


@pytest.mark.parametrize("tokens", [17, 70])
def test_layer_goes_unpacked(gpu: Context, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norm, product with gate, and product whose shares the next norm adds up, as the operators call for them."""
    kind = gpu.gpu.mx.bfloat16
    told = {"has_tiles": True, "processors": 4, "room_bytes": ROOM_BYTES, "operands": kind, "activations": kind}
    if gpu.gpu.machine is None or not gpu.gpu.machine.has_boxes:
        pytest.skip("the GPU has no rings")
    for name, value in told.items():
        monkeypatch.setattr(gpu.gpu, name, value)
    launched = note_launches(gpu, monkeypatch)
    x, weight = random_floats(1, tokens, 256), random_floats(2, 256)
    up, down = [make_tensor("q4_k", 2 * 2048, 256)], [make_tensor("q6_k", 256, 2048)]
    expected = run_layer(REFERENCE, x, weight, up, down)[1]
    found = run_layer(gpu, gpu.gpu.mx.array(x), weight, up, down)[1]
    assert relative_error(found, expected) < 2 * NARROW
    product = "linear_unpacked_boxed" if gpu.gpu.launcher.emulator is not None else "linear_unpacked"
    assert launched == ["rms_norm", product, product, "rms_norm"]


def test_a_recorded_layer_takes_it(gpu: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, launcher, mx = gpu.gpu.machine, gpu.gpu.launcher, gpu.gpu.mx
    if machine is None or not machine.has_boxes:
        pytest.skip("the GPU has no rings")
    kind = mx.bfloat16
    told = {"has_tiles": True, "processors": 4, "room_bytes": ROOM_BYTES, "operands": kind, "activations": kind}
    for name, value in told.items():
        monkeypatch.setattr(gpu.gpu, name, value)
    gain, up, down = random_floats(2, 256), [make_tensor("q4_k", 1024, 256)], [make_tensor("q6_k", 256, 512)]
    values = random_floats(1, 70, 256)
    recorder = Recorder(launcher.numbers, machine.memory.open(), multiplies=True)
    x = recorder.make((70, 256), mx.float32)
    monkeypatch.setattr(gpu.gpu, "launcher", recorder)
    _, out = run_layer(gpu, x, gain, up, down)
    launches = recorder.take_launches()
    assert [launch.kernel.name for launch in launches][1:3] == ["linear_unpacked_boxed", "linear_unpacked_boxed"]
    monkeypatch.setattr(gpu.gpu, "launcher", launcher)
    machine.write(x.address, values)
    machine.start(machine.prepare(launches))
    found = machine.read(out.address, values.size, np.float32).wait().reshape(values.shape)
    assert relative_error(found, run_layer(REFERENCE, values, gain, up, down)[1]) < 2 * NARROW


@pytest.mark.parametrize("type_name", ["q4_k", "q6_k", "mxfp4"])
def test_stays_within_its_arrays(sanitized: Context, type_name: str) -> None:
    assert run(sanitized, [make_tensor(type_name, 96, 256)], 19, gate=1) < NARROW


def test_what_is_planned() -> None:
    def plan(shape: UnpackShape, tokens: int, **given: bool) -> tuple[int, ...] | None:
        found = plan_unpacked(shape, tokens, 132, ROOM_BYTES, **given)
        assert found is None or found.count_room(shape.types, shape.gate != 0) <= ROOM_BYTES
        return found and (found.width, found.parts * found.held, found.shares)

    assert plan(UnpackShape((12, 12), (28672, 0), 4096, 1), 128) == (128, 4, 1)
    assert plan(UnpackShape((14, 14), (4096, 0), 14336), 128, shared=True) == (128, 1, 2)
    assert plan(UnpackShape((14, 14), (4096, 0), 14336), 64, shared=True) == (64, 2, 4)
    assert plan(UnpackShape((12, 14), (5120, 1024), 4096), 32) == (32, 1, 1)
    assert plan(UnpackShape((12, 12), (4096, 0), 4096), 16) is None
    assert plan(UnpackShape((12, 12), (4096, 0), 4096), 257) is None
    assert plan(UnpackShape((2, 2), (4096, 0), 4096 + 32), 32) is None
    assert plan(UnpackShape((8, 8), (5120, 0), 2880), 32) == (32, 1, 1)
    assert plan(UnpackShape((39, 39), (5120, 0), 2880), 32) is None  # whose scales are bytes
    assert plan(UnpackShape((2, 2), (4096 + 8, 0), 4096), 32) is None
    assert plan_unpacked(UnpackShape((12, 12), (4096, 0), 4096), 32, 0, 0) is None
