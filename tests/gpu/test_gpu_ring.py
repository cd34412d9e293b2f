"""Products of few rows of 16-bit weights, and sums that are left to the launch after them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gpu_cases import REFERENCE, Floats, Scene, random_floats, relative_error

from mlxr.cache.arena import Arena
from mlxr.formats import TensorSource, by_name
from mlxr.kernels.activate import activate
from mlxr.kernels.context import Context
from mlxr.kernels.gpu.machine import EmulatedMachine
from mlxr.kernels.gpu.recording import Recorder
from mlxr.kernels.linear import gpu as linear_gpu
from mlxr.kernels.linear import linear, prepare
from mlxr.kernels.linear.ring import RingPlan, choose_ring, multiply_ring
from mlxr.kernels.rms_norm import rms_norm
from mlxr.kernels.split_heads import split_heads

EXACT = 1e-5  # the same 16-bit numbers, summed in f32 in another order
NARROW = 6e-3  # results rounded to bf16


def make_weight(type_name: str, rows: int, columns: int, seed: int = 0) -> TensorSource:
    values = random_floats(seed, rows, columns) / np.float32(np.sqrt(columns))
    blocks = by_name(type_name).encode(values.reshape(-1, 1)).reshape(-1)  # type: ignore[misc]
    return TensorSource("w", type_name, (rows, columns), blocks)


def place(gpu: Context, type_name: str, values: Floats) -> tuple[Any, Floats]:
    """Values of a 16-bit type, on the device and back."""
    mx = gpu.gpu.mx
    held = mx.array(values).astype(mx.bfloat16 if type_name == "bf16" else mx.float16)
    return held, np.array(held.astype(mx.float32))


@pytest.mark.parametrize("type_name", ["bf16", "f16"])
@pytest.mark.parametrize(
    ("tokens", "outputs", "inputs", "plan"),
    [
        (1, 64, 64, None),
        (8, 100, 128, None),
        (5, 128, 512, RingPlan(1, 5, 4)),
        (13, 192, 256, RingPlan(2, 4, 2)),
        (32, 70, 1024, RingPlan(4, 4, 1)),
    ],
)
def test_shares_add_up_to_the_product(
    gpu: Context, type_name: str, tokens: int, outputs: int, inputs: int, plan: RingPlan | None
) -> None:
    x, x_values = place(gpu, type_name, random_floats(1, tokens, inputs))
    weight, weight_values = place(gpu, type_name, random_floats(2, outputs, inputs))
    shares = multiply_ring(gpu.gpu, x, weight, 0, shared=True, plan=plan)
    assert shares.shape[0] == (plan or choose_ring(tokens, outputs, inputs, shared=True)).shares
    assert relative_error(np.array(shares).sum(axis=0), x_values @ weight_values.T) < EXACT


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("tokens", [3, 16])
def test_the_upper_half_gates_the_lower_one(gpu: Context, gate: str, tokens: int) -> None:
    x, x_values = place(gpu, "bf16", random_floats(1, tokens, 128))
    weight, weight_values = place(gpu, "bf16", random_floats(2, 2 * 72, 128) / np.float32(8))
    found = multiply_ring(gpu.gpu, x, weight, 1 if gate == "silu" else 2, shared=False)
    expected = activate(REFERENCE, x_values @ weight_values.T, gate)
    assert relative_error(np.array(found.astype(gpu.gpu.mx.float32)), expected) < NARROW


def test_more_groups_where_a_weight_has_few_rows() -> None:
    assert choose_ring(8, 28672, 4096, shared=True).shares == 1
    assert choose_ring(8, 4096, 4096, shared=True).shares == 8
    assert choose_ring(8, 4096, 4096, shared=False).shares == 1
    assert choose_ring(8, 64, 192, shared=True).shares == 1  # three pieces are not halved


@pytest.mark.parametrize("tokens", [6, 16])
def test_a_layer_leaves_sums_to_the_next_norm(gpu: Context, monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """A gated product, then one added to the stream and normed: all by the ring, where there are matrix units."""
    mx = gpu.gpu.mx
    monkeypatch.setattr(gpu.gpu, "has_tiles", True)
    monkeypatch.setattr(gpu.gpu, "activations", mx.bfloat16)
    monkeypatch.setattr(gpu.gpu, "operands", mx.bfloat16)
    calls: list[bool] = []

    def count(*arguments: Any, shared: bool) -> Any:
        calls.append(shared)
        return multiply_ring(*arguments, shared=shared)

    monkeypatch.setattr(linear_gpu, "multiply_ring", count)
    gate_up, down, norm = make_weight("bf16", 256, 64), make_weight("bf16", 64, 128, 1), random_floats(7, 64)
    results = []
    for ctx in (gpu, REFERENCE):
        x, stream = random_floats(3, tokens, 64), random_floats(4, tokens, 64)
        inputs = mx.array(x).astype(mx.bfloat16) if ctx is gpu else x
        gated = activate(ctx, linear(ctx, inputs, prepare(ctx, [gate_up], None)), "silu")
        added = linear(ctx, gated, prepare(ctx, [down], None))
        results.append(rms_norm(ctx, mx.array(stream) if ctx is gpu else stream, norm, 1e-5, added))
    assert calls == [False, True]
    for found, expected in zip(*results, strict=True):
        assert relative_error(np.array(found.astype(mx.float32)), expected) < NARROW


def test_a_recorded_product_comes_in_shares(gpu: Context) -> None:
    """What a library is asked for, with the emulator in its place."""
    machine = gpu.gpu.machine
    if not isinstance(machine, EmulatedMachine):
        pytest.skip("the machine is a real one")
    mx, kept = gpu.gpu.mx, []

    def allocate(size_bytes: int) -> int:
        kept.append(machine.allocate(size_bytes))
        return kept[-1]

    recorder = Recorder(gpu.gpu.launcher.numbers, allocate, multiplies=True)
    x_values, weight_values = random_floats(1, 6, 32), random_floats(2, 10, 32)
    x = recorder.make((6, 32), mx.float32)
    out = recorder.multiply(x, mx.array(weight_values), 4, mx.float32)
    machine.write(x.address, x_values)
    machine.start(machine.prepare(recorder.take_launches()))
    shares = machine.read(out.address, 4 * 6 * 10, np.float32).wait().reshape(4, 6, 10)
    assert relative_error(shares[1], x_values[:, 8:16] @ weight_values[:, 8:16].T) < EXACT
    assert relative_error(shares.sum(axis=0), x_values @ weight_values.T) < EXACT
    machine.free(kept, {})


def test_heads_add_shares_up(gpu: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries of a product that the ring left in shares."""
    mx = gpu.gpu.mx
    monkeypatch.setattr(gpu.gpu, "has_tiles", True)
    monkeypatch.setattr(gpu.gpu, "activations", mx.bfloat16)
    scene = Scene(heads=4, kv_heads=2, head_dim=16, page_size=4, contexts=(5, 1, 9, 2, 7), queries=(1,) * 5)
    batch, results = scene.batches()[-1], []
    qkv, x = make_weight("bf16", 8 * 16, 256), random_floats(3, 5, 256)
    for ctx in (gpu, REFERENCE):
        arena = Arena(ctx, 1, 20, 2, 4, 16, "f32")
        inputs = mx.array(x).astype(mx.bfloat16) if ctx is gpu else x
        product = linear(ctx, inputs, prepare(ctx, [qkv], None))
        q = split_heads(ctx, product, 4, batch, scene.table(), arena.k_pools[0], arena.v_pools[0], None)
        pages = arena.k_pools[0].array if ctx is gpu else arena.k_pools[0]
        results.append((np.array(q.astype(mx.float32) if ctx is gpu else q), np.array(pages)))
    assert relative_error(results[0][0], results[1][0]) < NARROW
    assert relative_error(results[0][1][:20], np.asarray(results[1][1]).reshape(results[0][1][:20].shape)) < NARROW
