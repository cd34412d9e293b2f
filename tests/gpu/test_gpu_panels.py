"""Many rows times 16-bit weights by panels, against NumPy: every width, gates, shares, and what lies beyond the end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gpu_cases import REFERENCE, make_tensor, random_floats, relative_error, run_layer

from mlxr.kernels.activate import activate
from mlxr.kernels.context import Context
from mlxr.kernels.gpu.emulator import EmulatedMachine
from mlxr.kernels.gpu.kernel import Variant, make_cuda_source
from mlxr.kernels.gpu.recording import Recorder
from mlxr.kernels.linear.floats import PANELS, PanelPlan, multiply_panels, plan_panels

CLOSE = 1e-5  # sums in f32 in another order
ROUNDED = 3e-3  # a result in bf16
ROOM_BYTES = 227 * 1024


def run(
    gpu: Context, tokens: int, rows: int, columns: int, plan: PanelPlan, gate: int = 0, kind: str = "bf16"
) -> float:
    """The relative error; sums stay f32."""
    mx = gpu.gpu.mx
    dtype = mx.float16 if kind == "f16" else mx.bfloat16
    x = mx.array(random_floats(1, tokens, columns)).astype(dtype)
    weight = mx.array(random_floats(2, rows, columns) / np.float32(np.sqrt(columns))).astype(dtype)
    left, right = (np.array(array.astype(mx.float32)) for array in (x, weight))
    expected = left @ right.T
    if gate:
        expected = activate(REFERENCE, expected, "silu" if gate == 1 else "gelu_tanh")
    out = record(gpu, x, weight, gate, dtype if gate else mx.float32, plan)
    found = out.sum(axis=0) if plan.shares > 1 else out
    return relative_error(found, expected)


def record(gpu: Context, x: Any, weight: Any, gate: int, kind: Any, plan: PanelPlan) -> np.ndarray:
    """Return the result of a recorded step."""
    machine, launcher, mx = gpu.gpu.machine, gpu.gpu.launcher, gpu.gpu.mx
    if machine is None or not machine.has_boxes:
        if isinstance(machine, EmulatedMachine) or launcher.emulator is not None:
            (out,) = [multiply_panels(gpu.gpu, x, weight, gate, kind, plan)]
            return np.array(out.astype(mx.float32))
        pytest.skip("the GPU has no boxes")
    recorder = Recorder(launcher.numbers, machine.memory.open(), multiplies=True)
    gpu.gpu.launcher = recorder
    try:
        out = multiply_panels(gpu.gpu, x, weight, gate, kind, plan)
    finally:
        gpu.gpu.launcher = launcher
    machine.start(machine.prepare(recorder.take_launches()))
    size = int(np.prod(out.shape))
    if kind == mx.float32:
        return machine.read(out.address, size, np.float32).wait().reshape(out.shape)
    raw = machine.read(out.address, size, np.uint16).wait()
    wide = (raw.astype(np.uint32) << 16).view(np.float32) if kind == mx.bfloat16 else raw.view(np.float16)
    return wide.astype(np.float32).reshape(out.shape)


@pytest.mark.smoke
@pytest.mark.parametrize("tokens", [40, 64, 128])
@pytest.mark.parametrize("blocks", [1, 2])
def test_gate(gpu: Context, tokens: int, blocks: int) -> None:
    plan = PanelPlan(48, 1, 2, blocks, 4, 3)
    assert run(gpu, tokens, 2 * 96, 512, plan, gate=1) < ROUNDED


@pytest.mark.parametrize("stages", [3, 4])
@pytest.mark.parametrize("tokens", [24, 64, 128])
def test_one_part_to_a_threadgroup(gpu: Context, tokens: int, stages: int) -> None:
    assert run(gpu, tokens, 2 * 96, 512, PanelPlan(48, 1, 4, 2, stages, 3, parts=1), gate=1) < ROUNDED
    assert run(gpu, tokens, 2 * (112 + 8), 256, PanelPlan(112, 1, 3, 1, stages, 3, parts=1), gate=2) < ROUNDED


@pytest.mark.parametrize("shares", [1, 2, 4])
@pytest.mark.parametrize("tokens", [64, 128])
def test_shares(gpu: Context, tokens: int, shares: int) -> None:
    assert run(gpu, tokens, 256, 512, PanelPlan(64, shares, 2, 2, 4, 3)) < CLOSE


@pytest.mark.parametrize("width", [48, 64, 96, 112, 128])
def test_every_width_with_rows_that_are_no_whole_tiles(gpu: Context, width: int) -> None:
    assert run(gpu, 72, 2 * width + 16, 256, PanelPlan(width, 2, 2, 1, 6, 4)) < CLOSE
    assert run(gpu, 64, 2 * (width + 8), 256, PanelPlan(width, 1, 2, 2, 4, 3), gate=2, kind="f16") < ROUNDED


@pytest.mark.parametrize("tokens", [40, 72])
def test_stays_within_its_arrays(sanitized: Context, tokens: int) -> None:
    assert run(sanitized, tokens, 112, 256, PanelPlan(48, 2, 2, 1, 4, 2)) < CLOSE
    assert run(sanitized, tokens, 112, 256, PanelPlan(48, 1, 2, 2, 4, 3), gate=1) < ROUNDED
    assert run(sanitized, tokens, 112, 256, PanelPlan(48, 1, 3, 2, 3, 3, parts=1), gate=1) < ROUNDED


def test_what_is_planned() -> None:
    gate = plan_panels(128, 28672, 4096, 1, 132, ROOM_BYTES)
    assert gate == PanelPlan(112, 1, 128, 2, 5, 5)
    assert gate.count_room(128) <= ROOM_BYTES
    assert plan_panels(64, 28672, 4096, 1, 132, ROOM_BYTES) == PanelPlan(112, 1, 128, 2, 6, 7)
    for columns in (14336, 4096):
        assert plan_panels(64, 4096, columns, 0, 132, ROOM_BYTES) == PanelPlan(64, 4, 32, 2, 10, 8)


@pytest.mark.parametrize("tokens", [32, 128])
def test_a_share_of_the_features_fills_the_device_too(tokens: int) -> None:
    """Each of two GPUs has half of the features, in as many threadgroups as for all of them, with one part each."""
    plan = plan_panels(tokens, 28672 // 2, 4096, 1, 132, ROOM_BYTES)
    assert plan is not None
    assert (plan.width, plan.groups, plan.parts) == (112, 128, 1)
    assert plan.count_room(tokens) <= ROOM_BYTES
    assert plan.count_readers(tokens) == (4 if tokens <= 64 else 8)


def test_what_is_left_to_the_library() -> None:
    assert plan_panels(16, 28672, 4096, 1, 132, ROOM_BYTES) is None
    assert plan_panels(256, 28672, 4096, 1, 132, ROOM_BYTES) is None
    assert plan_panels(128, 4096, 14336, 0, 132, ROOM_BYTES) is None
    assert plan_panels(128, 2 * 5632, 2048, 1, 132, ROOM_BYTES) is None  # leaves a tenth of the device idle
    assert plan_panels(128, 28672, 4160, 1, 132, ROOM_BYTES) is None
    assert plan_panels(128, 28672, 4096, 1, 0, 0) is None
    assert plan_panels(128, 28672, 4096, 1, 132, 100 * 1024) is None


def test_a_recorded_layer_takes_them(gpu: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norm, product with gate, and product whose shares the next norm adds up, as the operators call for them."""
    machine, launcher, mx = gpu.gpu.machine, gpu.gpu.launcher, gpu.gpu.mx
    if machine is None or not machine.has_boxes:
        pytest.skip("the GPU has no boxes")
    kind = mx.bfloat16
    for name, value in {"processors": 4, "room_bytes": ROOM_BYTES, "operands": kind, "activations": kind}.items():
        monkeypatch.setattr(gpu.gpu, name, value)
    gain, up, down = random_floats(2, 256), [make_tensor("bf16", 1024, 256)], [make_tensor("bf16", 256, 512)]

    values = random_floats(1, 40, 256)
    recorder = Recorder(launcher.numbers, machine.memory.open(), multiplies=True)
    x = recorder.make((40, 256), mx.float32)
    monkeypatch.setattr(gpu.gpu, "launcher", recorder)
    _, out = run_layer(gpu, x, gain, up, down)
    launches = recorder.take_launches()
    assert [launch.kernel.name for launch in launches] == ["rms_norm", "linear_panels", "linear_panels", "rms_norm"]
    monkeypatch.setattr(gpu.gpu, "launcher", launcher)
    machine.write(x.address, values)
    machine.start(machine.prepare(launches))
    found = machine.read(out.address, values.size, np.float32).wait().reshape(values.shape)
    assert relative_error(found, run_layer(REFERENCE, values, gain, up, down)[1]) < ROUNDED


def test_boxes_are_arguments_of_their_own() -> None:
    variant = Variant((("THREADS", 320),), (), ("bfloat16", "bfloat16", "int32"), ("float32",))
    source = make_cuda_source(PANELS, variant, starts_early=True)
    assert (
        "(const __grid_constant__ Box x, const __grid_constant__ Box weights, const int *sizes, float *out)" in source
    )


def test_only_recorded_steps_have_them(gpu: Context) -> None:
    mx = gpu.gpu.mx
    if gpu.gpu.launcher.emulator is not None:
        pytest.skip("emulated kernels take matrices as they are")
    x, weight = mx.zeros((64, 256), mx.bfloat16), mx.zeros((256, 256), mx.bfloat16)
    with pytest.raises(TypeError, match="recorded"):
        multiply_panels(gpu.gpu, x, weight, 0, mx.float32, PanelPlan(64, 1, 2, 1, 3, 2))
