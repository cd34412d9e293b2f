"""Recurrent mixers on the GPU against their definition, with states in the device's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from gpu_cases import REFERENCE, Floats, note_launches, random_floats, relative_error
from mixer_cases import AHEAD, Mixer, make_batch, make_convolution, make_delta, make_space
from mixer_cases import MIXERS as COMMON

from mlxr.kernels.context import Context
from mlxr.kernels.gpu.deferred import settle
from mlxr.kernels.gpu.pool import Pool
from mlxr.kernels.norms import gated_norm
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.recurrent.gpu import Heads, choose_step_lanes

EXACT = 1e-5
MIXERS = COMMON | {"mamba, long columns": make_space(1, 20, 1, 500)}  # a block has few tokens
COUNTS, READS, WRITES = [3, 1, 39, 1], [4, -1, 4, 7], [2, 8, 0, 3]


def place_pool(ctx: Context, numbers: Floats) -> Pool:
    """A pool on the device with these states."""
    pool = ctx.gpu.allocate_pool(numbers.shape, "f32")
    for slot, row in enumerate(numbers):
        pool.write_page(slot, np.ascontiguousarray(row).view(np.uint8))
    return pool


def play(ctx: Context, mixer: Mixer, inputs: Sequence[Floats], batch: RaggedBatch) -> tuple[Any, Floats]:
    """Return the result, and the pool afterwards."""
    pool = place_pool(ctx, mixer.pool(scaled=False))
    result = settle(mixer.run(ctx, [ctx.gpu.mx.array(array) for array in inputs], batch, pool, AHEAD))
    ctx.gpu.submit(result)
    states = [np.frombuffer(pool.read_page(slot).tobytes(), np.float32) for slot in range(pool.shape[0])]
    return np.asarray(result), np.array(states)


@pytest.mark.smoke
@pytest.mark.parametrize("name", MIXERS)
def test_mixer(gpu: Context, name: str) -> None:
    check_mixer(gpu, MIXERS[name])


def check_mixer(ctx: Context, mixer: Mixer) -> None:
    """Results and states are those of the reference, and nothing else of the pool is written."""
    inputs, batch, expected = mixer.inputs(sum(COUNTS)), make_batch(COUNTS, READS, WRITES), mixer.pool(scaled=False)
    result, states = play(ctx, mixer, inputs, batch)
    assert relative_error(result, mixer.play(REFERENCE, inputs, batch, expected)) < EXACT
    assert relative_error(states, expected) < EXACT
    own = np.zeros(states.shape, bool)
    own[WRITES, AHEAD : AHEAD + mixer.floats] = True
    assert np.array_equal(states[~own], mixer.pool(scaled=False)[~own])
    if mixer.floats:
        other = play(ctx, mixer, inputs, make_batch(COUNTS, [4, -1, 5, 7], WRITES))[0]
        assert relative_error(other, np.asarray(result)) > 1e-3


@pytest.mark.smoke
@pytest.mark.parametrize("name", MIXERS)
def test_cuts_change_no_bit(gpu: Context, name: str) -> None:
    mixer, whole = MIXERS[name], make_batch([41], [-1], [0])
    inputs = mixer.inputs(41)
    expected, states = play(gpu, mixer, inputs, whole)
    pool, start, slot, parts = place_pool(gpu, mixer.pool(scaled=False)), 0, -1, []
    for stop in (1, 3, 20, 41):
        after = 0 if slot else 1
        arrays = [gpu.gpu.mx.array(np.ascontiguousarray(array[start:stop])) for array in inputs]
        made = settle(mixer.run(gpu, arrays, make_batch([stop - start], [slot], [after]), pool, AHEAD))
        gpu.gpu.submit(made)
        parts.append(np.asarray(made))
        start, slot = stop, after
    assert np.array_equal(np.concatenate(parts), expected)
    last = np.frombuffer(pool.read_page(slot).tobytes(), np.float32)[AHEAD : AHEAD + mixer.floats]
    assert np.array_equal(last, states[0, AHEAD : AHEAD + mixer.floats])


STEPPED = {
    "convolution with silu": make_convolution(4, 600, "silu", bias=True, first=8, behind=4),
    "convolution with silu, columns of no multiple": make_convolution(4, 36, "silu", bias=False, first=3),
    "convolution with silu, odd channels": make_convolution(4, 135, "silu", bias=True),
    "gated convolution": make_convolution(3, 516, "gated", bias=False, behind=0),
    "gated convolution with a bias": make_convolution(3, 17, "gated", bias=True),
    "plain convolution": make_convolution(7, 16, "plain", bias=True, behind=0),
    "convolution without a state": make_convolution(1, 20, "plain", bias=False, first=4, behind=0),
    "delta rule": make_delta(1, 2, 128, 64),
    "delta rule, tiled, two threadgroups": make_delta(1, 2, 40, 128, tiled=True),
    "delta rule, narrow": make_delta(2, 2, 16, 32),
    "delta rule, channels": make_delta(1, 2, 64, 64, channels=True),
    "mamba": make_space(2, 64, 1, 128),
}


@pytest.mark.parametrize("name", STEPPED)
def test_steps_of_one_token_have_the_bits_of_longer_ones(gpu: Context, name: str) -> None:
    check_step(gpu, STEPPED[name])


def check_step(ctx: Context, mixer: Mixer) -> None:
    """Three sequences, one of which is new, get their second token by a step, or both at once."""
    at, reads, writes, mx = 4, [5, -1, 2], [1, 0, 3], ctx.gpu.mx
    width = -(-(at + mixer.floats + 1) // 4) * 4
    numbers = np.random.default_rng(5).standard_normal((8, width)).astype(np.float32)
    inputs = mixer.inputs(6)

    def run(pool: Pool, rows: slice, reads: list[int], writes: list[int]) -> Floats:
        arrays = [mx.array(np.ascontiguousarray(array[rows])) for array in inputs]
        count = len(arrays[0]) // 3
        made = settle(mixer.run(ctx, arrays, make_batch([count] * 3, reads, writes), pool, at))
        ctx.gpu.submit(made)
        return np.asarray(made)

    whole, stepped = place_pool(ctx, numbers), place_pool(ctx, numbers)
    expected = run(whole, slice(0, 6), reads, writes)
    ctx.ledger.reset()
    first = run(stepped, slice(0, 6, 2), reads, [4, 6, 7])
    second = run(stepped, slice(1, 6, 2), [4, 6, 7], writes)
    assert all("step" in part.variant for part in ctx.ledger.snapshot().dispatches)
    assert np.array_equal(np.stack([first, second], 1).reshape(expected.shape), expected)
    for slot in writes:
        assert np.array_equal(stepped.read_page(slot), whole.read_page(slot))


NORMED = {
    "128 columns": (2, 4, 64, 128),
    "64 columns": (1, 3, 40, 64),
    "32 columns": (2, 2, 16, 32),
    "96 columns, which no threadgroup has alone": (1, 2, 16, 96),
}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", NORMED)
def test_a_step_norms_its_heads(gpu: Context, name: str, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    check_normed_step(gpu, NORMED[name], shared=shared)
    launched = note_launches(gpu, monkeypatch)
    check_normed_step(gpu, NORMED[name], shared=shared)
    wanted = ["gated_delta_step", "gated_norm"][: 1 + name.startswith("96")]
    assert [kernel for kernel in launched if kernel != "copy_page"] == wanted


def check_normed_step(ctx: Context, sizes: tuple[int, int, int, int], *, shared: bool) -> None:
    """Check the norm of each head with its gate, whose columns begin at the third; states are those without a norm."""
    mixer, (_, heads, _, width), mx = make_delta(*sizes), sizes, ctx.gpu.mx
    numbers, reads, writes = mixer.pool(at=4, scaled=False), [4, -1], [2, 8]
    numbers = np.concatenate([numbers, numbers[:, : -numbers.shape[1] % 4]], axis=1)
    inputs, batch, expected = mixer.inputs(2), make_batch([1, 1], reads, writes), numbers.copy()
    gate, weight = random_floats(5, 2, heads * width + 3), random_floats(6, width if shared else heads * width)
    options = {"width": width, "first": 2}
    pool = place_pool(ctx, numbers)
    made = mixer.run(ctx, [mx.array(array) for array in inputs], batch, pool, 4)
    result = gated_norm(ctx, made, mx.array(gate), weight, 1e-5, **options)
    ctx.gpu.submit(result)
    wanted = mixer.run(REFERENCE, inputs, batch, expected, 4)
    assert relative_error(result, gated_norm(REFERENCE, wanted, gate, weight, 1e-5, **options)) < EXACT
    for slot in range(len(numbers)):
        assert relative_error(np.frombuffer(pool.read_page(slot).tobytes(), np.float32), expected[slot]) < EXACT


@pytest.mark.parametrize("gate_first", [False, True])
def test_other_norms_take_what_a_step_made(gpu: Context, gate_first: bool) -> None:
    """Norms with the gate first, and norms that are not over heads."""
    mixer, mx, batch = make_delta(1, 2, 16, 32), gpu.gpu.mx, make_batch([1, 1], [4, -1], [2, 8])
    inputs, gate, weight = mixer.inputs(2), random_floats(5, 2, 64), random_floats(6, 64)
    options = {"width": 32 if gate_first else 64, "gate_first": gate_first}
    numbers = mixer.pool(at=4, scaled=False)
    made = mixer.run(gpu, [mx.array(array) for array in inputs], batch, place_pool(gpu, numbers), 4)
    result = gated_norm(gpu, made, mx.array(gate), weight, 1e-5, **options)
    wanted = gated_norm(REFERENCE, mixer.run(REFERENCE, inputs, batch, numbers, 4), gate, weight, 1e-5, **options)
    assert relative_error(result, wanted) < EXACT


def test_states_that_no_step_suits_take_the_other_kernel() -> None:
    heads = Heads(1, 1, 128, 128, (0, 128, 256))
    assert choose_step_lanes(heads, (4, 8)) == 16
    assert choose_step_lanes(heads, (4, 6)) is None
    assert choose_step_lanes(Heads(1, 1, 256, 64, (0, 256, 512)), (4, 8)) is None
    assert choose_step_lanes(Heads(1, 1, 128, 32, (0, 128, 256)), (4, 8)) == 8
    assert choose_step_lanes(Heads(1, 1, 128, 20, (0, 128, 256)), (4, 8)) is None


@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("around", [1, 8])
@pytest.mark.parametrize(
    ("groups", "width", "shared"),
    [(4, 64, True), (3, 17, False), (1, 700, False), (9, 128, True), (5, 8, False), (2, 1032, True), (1, 4100, False)],
)
def test_gated_norm(gpu: Context, gate_first: bool, groups: int, width: int, shared: bool, around: int) -> None:
    check_gated_norm(gpu, groups, width, gate_first=gate_first, shared=shared, around=around)


@pytest.mark.parametrize("columns", [64, 700])
def test_a_gate_alone(gpu: Context, columns: int) -> None:
    check_gate(gpu, columns)


def check_gate(ctx: Context, columns: int) -> None:
    x, gate, mx = random_floats(1, 3, columns), random_floats(2, 3, columns + 2), ctx.gpu.mx
    result = gated_norm(ctx, mx.array(x), mx.array(gate), None, 0.0, width=columns, gate_first=True, first=1)
    expected = gated_norm(REFERENCE, x, gate, None, 0.0, width=columns, gate_first=True, first=1)
    assert relative_error(result, expected) < EXACT


def check_gated_norm(ctx: Context, groups: int, width: int, *, gate_first: bool, shared: bool, around: int = 1) -> None:
    """Norms of groups of a row, with so many columns of the gate before and after it."""
    columns, mx = groups * width, ctx.gpu.mx
    x, gate, weight = random_floats(1, 3, columns), random_floats(2, 3, columns + 2 * around), random_floats(3, width)
    if not shared:
        weight = random_floats(3, columns)
    options = {"width": width, "gate_first": gate_first, "first": around}
    result = gated_norm(ctx, mx.array(x), mx.array(gate), weight, 1e-5, **options)
    assert relative_error(result, gated_norm(REFERENCE, x, gate, weight, 1e-5, **options)) < EXACT
    options["gate_first"] = not gate_first
    assert relative_error(result, gated_norm(REFERENCE, x, gate, weight, 1e-5, **options)) > 0.05


@pytest.mark.parametrize("name", ["gated convolution", "delta rule", "mamba"])
def test_without_kernels(name: str) -> None:
    check_mixer(Context("mlx-cpu"), MIXERS[name])


def test_norm_without_kernels() -> None:
    for gate_first in (False, True):
        check_gated_norm(Context("mlx-cpu"), 3, 17, gate_first=gate_first, shared=gate_first)
    check_gate(Context("mlx-cpu"), 51)


@pytest.mark.parametrize("name", [name for name in STEPPED if "convolution" in name])
@pytest.mark.parametrize("counts", [COUNTS, [1, 8, 1, 6], [2, 2, 2, 17], [16, 1, 1, 1]], ids=str)
def test_convolutions_of_some_rows_at_a_time(gpu: Context, name: str, counts: list[int]) -> None:
    """Sequences begin and end within the rows of a thread, and at their edges; states begin where whole words do."""
    mixer, mx = STEPPED[name], gpu.gpu.mx
    numbers = np.random.default_rng(3).standard_normal((9, mixer.floats + 8 - mixer.floats % 4)).astype(np.float32)
    inputs, batch = mixer.inputs(sum(counts)), make_batch(counts, READS, WRITES)
    expected, pool = numbers.copy(), place_pool(gpu, numbers)
    result = mixer.run(gpu, [mx.array(array) for array in inputs], batch, pool, 4)
    gpu.gpu.submit(result)
    assert relative_error(result, np.asarray(mixer.run(REFERENCE, inputs, batch, expected, 4))) < EXACT
    for slot, wanted in enumerate(expected):
        found = np.frombuffer(pool.read_page(slot).tobytes(), np.float32)
        assert np.allclose(found, wanted, rtol=1e-6, atol=0)
        if slot not in WRITES:
            assert np.array_equal(found, wanted)


@pytest.mark.parametrize("channels", [17, 520])
def test_steps_of_16_bits_move_rounded_inputs_up(gpu: Context, channels: int) -> None:
    """Inputs that are read in 16 bits enter the state as exactly those numbers."""
    mx, kind = gpu.gpu.mx, gpu.gpu.mx.bfloat16
    mixer = make_convolution(4, channels, "silu", bias=False, behind=0)
    inputs = np.asarray(mx.array(mixer.inputs(2)[0]).astype(kind).astype(mx.float32))
    batch, expected, pool = make_batch([1, 1], [4, -1], [2, 8]), mixer.pool(), place_pool(gpu, mixer.pool())
    result = mixer.run(gpu, [mx.array(inputs).astype(kind)], batch, pool, 4)
    gpu.gpu.submit(result)
    assert relative_error(result, np.asarray(mixer.run(REFERENCE, [inputs], batch, expected, 4))) < EXACT
    for slot in (2, 4, 8):
        assert np.array_equal(np.frombuffer(pool.read_page(slot).tobytes(), np.float32), expected[slot])


@pytest.mark.parametrize("name", ["gated convolution", "delta rule, odd sizes", "mamba, long columns"])
def test_no_kernel_leaves_its_arrays(sanitized: Context, name: str) -> None:
    check_mixer(sanitized, MIXERS[name])


@pytest.mark.parametrize(("groups", "width"), [(9, 64), (1, 1100)])
def test_norms_leave_no_arrays(sanitized: Context, groups: int, width: int) -> None:
    check_gated_norm(sanitized, groups, width, gate_first=False, shared=False, around=0)


@pytest.mark.parametrize("name", ["64 columns", "32 columns"])
def test_normed_steps_leave_no_arrays(sanitized: Context, name: str) -> None:
    check_normed_step(sanitized, NORMED[name], shared=True)


@pytest.mark.parametrize("name", ["convolution with silu", "gated convolution"])
def test_convolutions_leave_no_arrays(sanitized: Context, name: str) -> None:
    test_convolutions_of_some_rows_at_a_time(sanitized, name, COUNTS)


@pytest.mark.parametrize("name", ["convolution with silu", "convolution with silu, odd channels"])
def test_steps_leave_no_arrays(sanitized: Context, name: str) -> None:
    check_step(sanitized, STEPPED[name])
