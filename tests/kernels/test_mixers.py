"""Recurrent mixers: exact, with equal bits everywhere, however a sequence is cut and whatever runs beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from amounts import choose_each
from mixer_cases import AHEAD, MIXERS, ON_PROCESSORS, SLOTS, Mixer, make_batch, sigmoid
from variants import Floats, assert_equal_bits, count_ulps, random_floats, run_everywhere

from mlxr.kernels.context import Context, load_native
from mlxr.kernels.ledger import Dispatch
from mlxr.kernels.norms import gated_norm
from mlxr.kernels.recurrent import (
    Convolution,
    DeltaRule,
    SelectiveScan,
    StateSpace,
    gated_delta,
    mamba2,
    scan,
    short_conv,
)

REFERENCE = Context("reference")


@pytest.fixture(params=MIXERS | ON_PROCESSORS, name="mixer")
def each_mixer(request: pytest.FixtureRequest) -> Mixer:
    return (MIXERS | ON_PROCESSORS)[request.param]


def run_parts(ctx: Context, mixer: Mixer, inputs: Sequence[Floats], cuts: Sequence[int]) -> tuple[Floats, Floats]:
    """One sequence in parts that end at `cuts`: the results, and the state after the last one."""
    pool, results, slot, start = mixer.pool(), [], -1, 0
    for stop in cuts:
        after = 0 if slot else 1
        part = [np.ascontiguousarray(array[start:stop]) for array in inputs]
        results.append(mixer.play(ctx, part, make_batch([stop - start], [slot], [after]), pool))
        slot, start = after, stop
    return np.concatenate(results), pool[slot, AHEAD : AHEAD + mixer.floats].copy()


def test_formula(cpu: Context, mixer: Mixer) -> None:
    inputs = mixer.inputs(20)
    out, state = mixer.compute([array.astype(np.float64) for array in inputs], mixer.read(np.zeros(mixer.floats)))
    for ctx in (cpu, REFERENCE):
        result, after = run_parts(ctx, mixer, inputs, [20])
        np.testing.assert_allclose(result, out, rtol=1e-5, atol=2e-5)
        np.testing.assert_allclose(mixer.read(after), state, rtol=1e-5, atol=2e-5)


def test_states_are_read_and_written_where_the_batch_says(cpu: Context, mixer: Mixer) -> None:
    counts, reads, writes = [3, 1, 6, 1], [4, -1, 4, 7], [2, 8, 0, 3]
    inputs, batch = mixer.inputs(sum(counts)), make_batch(counts, reads, writes)
    for ctx in (cpu, REFERENCE):
        pool = mixer.pool()
        before = pool.copy()
        result, start = mixer.play(ctx, inputs, batch, pool), 0
        for count, read, write in zip(counts, reads, writes, strict=True):
            rows = slice(start, start + count)
            state = np.zeros(mixer.floats) if read < 0 else before[read, AHEAD : AHEAD + mixer.floats]
            out, after = mixer.compute([array[rows].astype(np.float64) for array in inputs], mixer.read(state))
            np.testing.assert_allclose(result[rows], out, rtol=1e-5, atol=2e-5)
            made = mixer.read(pool[write, AHEAD : AHEAD + mixer.floats])
            np.testing.assert_allclose(made, after, rtol=1e-5, atol=2e-5)
            start += count
        own = np.zeros(pool.shape, bool)
        own[writes, AHEAD : AHEAD + mixer.floats] = True
        assert_equal_bits(pool[~own], before[~own])


def test_bits_are_the_same_everywhere(mixer: Mixer) -> None:
    inputs, batch = mixer.inputs(75), make_batch([40, 1, 34], [4, -1, 5], [2, 8, 0])

    def run(ctx: Context) -> Floats:
        pool = mixer.pool()
        return np.concatenate([mixer.play(ctx, inputs, batch, pool).reshape(-1), pool.reshape(-1)])

    run_everywhere(run)


@pytest.mark.parametrize("cuts", [range(1, 24), (1, 23), (2, 4, 6, 23), (11, 12, 23), (22, 23)])
def test_cuts_change_no_bit(cpu: Context, mixer: Mixer, cuts: Sequence[int]) -> None:
    inputs = mixer.inputs(23)
    whole, cut = run_parts(cpu, mixer, inputs, [23]), run_parts(cpu, mixer, inputs, list(cuts))
    assert_equal_bits(cut[0], whole[0])
    assert_equal_bits(cut[1], whole[1])


@pytest.mark.parametrize("name", ["delta rule", "delta rule, large heads", "mamba"])
def test_states_that_forget_little_and_all(cpu: Context, name: str) -> None:
    """The scale of a state falls below its bound, at once and slowly, and starts anew."""
    mixer = MIXERS[name]
    inputs = mixer.inputs(200)
    inputs[1][:, -1 - mixer.scales : -1] = 12 * inputs[1][:, -1 - mixer.scales : -1] - 8
    inputs[1][50], inputs[1][51] = 200, -200
    out, state = mixer.compute([array.astype(np.float64) for array in inputs], mixer.read(np.zeros(mixer.floats)))
    whole, cut = (run_parts(cpu, mixer, inputs, cuts) for cuts in ([200], [*range(1, 60), 130, 200]))
    np.testing.assert_allclose(whole[0], out, rtol=1e-4, atol=1e-4 * np.abs(out).max())
    np.testing.assert_allclose(mixer.read(whole[1]), state, rtol=1e-4, atol=1e-4 * np.abs(state).max())
    assert_equal_bits(cut[0], whole[0])
    assert_equal_bits(cut[1], whole[1])


def test_sequence_is_the_same_alone_and_in_a_batch(cpu: Context, mixer: Mixer) -> None:
    counts, reads, writes = [5, 1, 9, 2], [4, -1, 4, 7], [2, 8, 0, 3]
    inputs, pool = mixer.inputs(sum(counts)), mixer.pool()
    together, start = mixer.play(cpu, inputs, make_batch(counts, reads, writes), pool), 0
    for count, read, write in zip(counts, reads, writes, strict=True):
        rows, own = slice(start, start + count), mixer.pool()
        alone = mixer.play(cpu, [array[rows] for array in inputs], make_batch([count], [read], [write]), own)
        assert_equal_bits(alone, together[rows])
        assert_equal_bits(own[write], pool[write])
        start += count


def test_no_state_is_a_state_of_zeros(cpu: Context, mixer: Mixer) -> None:
    inputs, pool = mixer.inputs(4), mixer.pool()
    pool[5] = 0
    results = [mixer.play(cpu, inputs, make_batch([4], [read], [read + 3]), pool) for read in (-1, 5)]
    assert_equal_bits(*results)
    assert_equal_bits(pool[2, AHEAD : AHEAD + mixer.floats], pool[8, AHEAD : AHEAD + mixer.floats])


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "isa"), choose_each(list(MIXERS), load_native().available_isas()))
def test_every_input_counts(name: str, isa: str) -> None:
    cpu, mixer = Context("cpu", threads=2, isa=isa), MIXERS[name]
    inputs = mixer.inputs(6)
    whole, _ = run_parts(cpu, mixer, inputs, [6])
    for array in inputs:
        columns = [c for c in range(array.shape[1]) if is_read(cpu, mixer, inputs, array, c, whole)]
        assert len(columns) > 0.7 * array.shape[1] - 5


def is_read(ctx: Context, mixer: Mixer, inputs: Sequence[Floats], array: Floats, column: int, whole: Floats) -> bool:
    """Return True if a change of the last token's number in `column` changes its result; other tokens' must stay."""
    before = array[-1, column]
    array[-1, column] += 1
    changed, _ = run_parts(ctx, mixer, inputs, [6])
    array[-1, column] = before
    assert_equal_bits(changed[:-1], whole[:-1])
    return bool((changed[-1] != whole[-1]).any())


def test_softplus_and_decay_over_all_steps(cpu: Context) -> None:
    ends = [-1e30, -200, -104, -88, -87, 30, 88, 500, 1e30]
    steps = np.concatenate([np.linspace(-30, 30, 1990), ends]).astype(np.float32)
    rule = StateSpace(1, 1, 1, 1, *(np.full(1, value, np.float32) for value in (-0.5, 0, 0)))
    batch = make_batch([1] * len(steps), [-1] * len(steps), range(len(steps)))

    def measure(ctx: Context) -> Floats:
        pool = np.zeros((len(steps), rule.state_floats), np.float32)
        return mamba2(ctx, np.ones((len(steps), 3), np.float32), steps[:, None].copy(), rule, batch, pool)

    result = run_everywhere(measure)[:, 0]
    exact = np.logaddexp(steps.astype(np.float64), 0)
    assert (count_ulps(result, exact) < 3)[exact > 1e-37].all()
    np.testing.assert_allclose(result, exact, rtol=3e-7, atol=1e-37)


def test_calls_are_counted_by_their_form(cpu: Context) -> None:
    rules = "delta rule", "delta rule, a decay of each channel"
    mixers = MIXERS | ON_PROCESSORS
    for name in ("gated convolution", "convolution with silu", *rules, "mamba", "mamba", "scan"):
        run_parts(cpu, mixers[name], mixers[name].inputs(2), [2])
    assert cpu.ledger.snapshot().dispatches == [
        Dispatch("gated_delta", "cpu", "decay of each channel", 1),
        Dispatch("gated_delta", "cpu", "decay of each head", 1),
        Dispatch("mamba2", "cpu", "decay of each head", 2),
        Dispatch("scan", "cpu", "decay of each number", 1),
        Dispatch("short_conv", "cpu", "gated", 1),
        Dispatch("short_conv", "cpu", "silu", 1),
    ]


@pytest.mark.parametrize(("rows", "groups", "width"), [(1, 1, 1), (3, 5, 17), (40, 8, 128), (2, 1, 3000)])
@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_gated_norm(rows: int, groups: int, width: int, gate_first: bool, shared: bool) -> None:
    columns = groups * width
    x, gate = random_floats(1, rows, columns), random_floats(2, rows, columns + 3) * 3
    weight = random_floats(3, width if shared else columns)
    gate[0, 2] = -200

    def run(ctx: Context) -> Floats:
        return gated_norm(ctx, x, gate, weight, 1e-5, width=width, gate_first=gate_first, first=2)

    gates = gate[:, 2 : 2 + columns].astype(np.float64)
    with np.errstate(over="ignore"):
        silu = gates * sigmoid(gates)
    parts = (x * silu if gate_first else x.astype(np.float64)).reshape(rows, groups, width)
    exact = parts / np.sqrt((parts**2).mean(axis=2, keepdims=True) + 1e-5) * weight.reshape(-1, width)
    exact = exact.reshape(rows, columns) * (1 if gate_first else silu)
    for result in (run_everywhere(run), run(REFERENCE)):
        np.testing.assert_allclose(result, exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 85), (40, 1024)])
def test_a_gate_alone(rows: int, columns: int) -> None:
    x, gate = random_floats(1, rows, columns), random_floats(2, rows, columns + 3) * 3
    gate[0, 2] = -200

    def run(ctx: Context) -> Floats:
        return gated_norm(ctx, x, gate, None, 0.0, width=columns, gate_first=True, first=2)

    gates = gate[:, 2 : 2 + columns].astype(np.float64)
    with np.errstate(over="ignore"):
        exact = x * gates * sigmoid(gates)
    for result in (run_everywhere(run), run(REFERENCE)):
        np.testing.assert_allclose(result, exact, rtol=1e-5, atol=1e-6)


def test_what_does_not_fit_is_refused(cpu: Context) -> None:
    x, batch = random_floats(1, 2, 12), make_batch([2], [-1], [0])
    conv, pool = Convolution(random_floats(2, 3, 4), None, "gated"), np.zeros((SLOTS, 8), np.float32)
    rule = DeltaRule(1, 2, 2, 2, *random_floats(3, 2, 2))
    for ctx in (cpu, REFERENCE):
        with pytest.raises(ValueError, match="short_conv: first column is 1, expected 0 to 0"):
            short_conv(ctx, x, conv, batch, pool, first=1)
        with pytest.raises(ValueError, match="short_conv: floats of a slot is 8, expected at least 9"):
            short_conv(ctx, x, conv, batch, pool, at=1)
        with pytest.raises(ValueError, match="short_conv: slot is 9, expected below 9"):
            short_conv(ctx, x, conv, make_batch([2], [-1], [9]), pool)
        with pytest.raises(ValueError, match="short_conv: rows of x is 2, expected 3"):
            short_conv(ctx, x, conv, make_batch([3], [-1], [0]), pool)
        with pytest.raises(ValueError, match="gated_delta: columns of qkv is 12, expected 8"):
            gated_delta(ctx, x, x, rule, batch, pool)
        with pytest.raises(ValueError, match="gated_delta: first column is 9, expected 0 to 8"):
            gated_delta(ctx, x[:, :8].copy(), x, rule, batch, pool, first=9)
        scanned = SelectiveScan(random_floats(4, 3, 12), random_floats(5, 12))
        with pytest.raises(ValueError, match="scan: columns of bc is 12, expected 6"):
            scan(ctx, x, x, x, scanned, batch, pool)
        with pytest.raises(ValueError, match="scan: floats of a slot is 8, expected at least 36"):
            scan(ctx, x, x, x[:, :6].copy(), scanned, batch, pool)
        bounded = replace(rule, bound=0.5)
        with pytest.raises(ValueError, match=r"gated_delta: bound is 0\.5"):
            bounded.check("gated_delta")
        with pytest.raises(ValueError, match="gated_norm: width is 5, expected a divisor of the 12 columns"):
            gated_norm(ctx, x, x, random_floats(1, 12), 1e-5, width=5)
        with pytest.raises(ValueError, match="gated_norm: length of weight is 5, expected 4 or 12"):
            gated_norm(ctx, x, x, random_floats(1, 5), 1e-5, width=4)


def test_native_code_checks_slots_itself(cpu: Context) -> None:
    x, weight = random_floats(1, 2, 4), random_floats(2, 3, 4)

    def run(reads: list[int], writes: list[int], starts: list[int]) -> None:
        arrays = (np.array(values, np.int32) for values in (reads, writes, starts))
        pool, out = np.zeros((3, 8), np.float32), np.empty((2, 4), np.float32)
        cpu.module.short_conv(cpu.native, x, 0, weight, None, "plain", out, pool, 0, *arrays)

    run([-1, 1], [0, 2], [0, 1, 2])
    with pytest.raises(ValueError, match="short_conv: write slot is 1, expected one that is neither read nor written"):
        run([1, -1], [0, 1], [0, 1, 2])
    with pytest.raises(ValueError, match="short_conv: write slot is 0, expected one"):
        run([1, -1], [0, 0], [0, 1, 2])
    with pytest.raises(ValueError, match="short_conv: read slot is 3, expected -1 to 2"):
        run([3, -1], [0, 1], [0, 1, 2])
    with pytest.raises(ValueError, match="short_conv: starts is not rising, expected no sequence empty"):
        run([-1, -1], [0, 1], [0, 2, 2])
    with pytest.raises(ValueError, match="short_conv: last of starts is 1, expected 2"):
        run([-1], [0], [0, 1])
