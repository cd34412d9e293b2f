"""`scale`, `add`, `gate_heads` and scales of norms: exact, with equal bits everywhere."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from variants import Floats, any_floats, assert_equal_bits, count_ulps, random_floats, run_everywhere

from mlxr.kernels.context import Context
from mlxr.kernels.elementwise import add, gate_heads, scale
from mlxr.kernels.ledger import Dispatch
from mlxr.kernels.norms import layer_norm, rms_norm

REFERENCE = Context("reference")
SHAPES = [(1, 1), (3, 17), (2, 1024), (5, 1025), (3, 40000)]


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("factor", [27.712812921102035, 0.1, -3.0])
def test_factor_is_one_rounding(rows: int, columns: int, factor: float) -> None:
    x = any_floats(1, rows, columns) * np.float32(1e-3)
    result = run_everywhere(lambda ctx: scale(ctx, x, factor))
    assert_equal_bits(result, x * np.float32(factor))
    assert_equal_bits(scale(REFERENCE, x, factor), result)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize(("factor", "softcap"), [(1.0, 30.0), (0.0625, 5.0), (100.0, 0.7)])
def test_cap_is_right_to_a_few_last_places(rows: int, columns: int, factor: float, softcap: float) -> None:
    x = random_floats([rows, columns], rows, columns) * 20
    result = run_everywhere(lambda ctx: scale(ctx, x, factor, softcap=softcap))
    exact = softcap * np.tanh(x.astype(np.float64) * factor / softcap)
    np.testing.assert_allclose(result, exact, rtol=1e-6)
    np.testing.assert_allclose(scale(REFERENCE, x, factor, softcap=softcap), exact, rtol=1e-6)
    assert np.abs(result).max() <= softcap


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("factor", [1.0, 0.37])
def test_sums_round_after_each_step(rows: int, columns: int, factor: float) -> None:
    x, other = random_floats(1, rows, columns), random_floats(2, rows, columns)
    result = run_everywhere(lambda ctx: add(ctx, x, other, factor))
    assert_equal_bits(result, (x + other) * np.float32(factor))
    assert_equal_bits(add(REFERENCE, x, other, factor), result)
    with pytest.raises(ValueError, match="add: other is of shape"):
        add(REFERENCE, x, other[:, :0].copy())


def test_tanh_over_all_numbers(cpu: Context) -> None:
    ends = np.array([0.625, -0.625, 0.62499994, 9.1, -88, 1e-20, -1e-38, 1e-44, 3e38, -3e38, np.inf, -np.inf])
    x = np.concatenate([np.linspace(-12, 12, 40001), np.geomspace(1e-9, 10, 5000), ends]).astype(np.float32)[None]
    result = run_everywhere(lambda ctx: scale(ctx, x, softcap=1.0))
    exact = np.tanh(x.astype(np.float64))
    assert (count_ulps(result, exact) < 3)[np.abs(exact) > 1e-37].all()
    np.testing.assert_allclose(result, exact, atol=1e-37, rtol=3e-7)
    assert np.isnan(scale(cpu, np.full((1, 3), np.nan, np.float32), softcap=2.0)).all()
    run_everywhere(lambda ctx: scale(ctx, any_floats(3, 4, 5000), softcap=1.0))


def test_nothing_to_do_does_nothing(cpu: Context) -> None:
    x = random_floats(1, 2, 3)
    assert scale(cpu, x) is x
    scale(cpu, x, 2.0)
    scale(cpu, x, softcap=2.0)
    assert cpu.ledger.snapshot().dispatches == [
        Dispatch("scale", "cpu", "f32", 1),
        Dispatch("scale", "cpu", "f32+softcap", 1),
    ]


def test_senseless_factors_and_caps_are_refused(cpu: Context) -> None:
    x = random_floats(1, 2, 3)
    for softcap in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="scale: softcap is"):
            scale(cpu, x, softcap=softcap)
    for factor in (math.nan, math.inf):
        with pytest.raises(ValueError, match="scale: factor is"):
            scale(cpu, x, factor)
    with pytest.raises(ValueError, match="scale: columns of out is 2, expected 3"):
        cpu.module.scale(cpu.native, x, 1.0, 0.0, np.empty((2, 2), np.float32))
    with pytest.raises(ValueError, match="scale: softcap is"):
        cpu.module.scale(cpu.native, x, 1.0, -1.0, np.empty((2, 3), np.float32))


@pytest.mark.parametrize(("rows", "heads", "width"), [(1, 1, 1), (5, 4, 17), (3, 33, 1), (40, 8, 128), (7, 2, 16)])
def test_gates_let_their_share_through(rows: int, heads: int, width: int) -> None:
    x, gates = random_floats(1, rows, heads * width), random_floats(2, rows, heads) * 5
    gates[0, 0] = -200
    result = run_everywhere(lambda ctx: gate_heads(ctx, x, gates))
    exact = x.reshape(rows, heads, width) / (1 + np.exp(-gates.astype(np.float64)))[:, :, None]
    np.testing.assert_allclose(result, exact.reshape(x.shape), rtol=1e-6, atol=1e-37)
    np.testing.assert_allclose(gate_heads(REFERENCE, x, gates), exact.reshape(x.shape), rtol=1e-6, atol=1e-37)
    each = run_everywhere(lambda ctx: gate_heads(ctx, x, gates.repeat(width, axis=1)))
    assert_equal_bits(each, result)
    smooth = run_everywhere(lambda ctx: gate_heads(ctx, x, gates, softplus=True))
    exact = x.reshape(rows, heads, width) * np.logaddexp(gates.astype(np.float64), 0)[:, :, None]
    for made in (smooth, gate_heads(REFERENCE, x, gates, softplus=True)):
        np.testing.assert_allclose(made, exact.reshape(x.shape), rtol=1e-6, atol=1e-37)


def test_token_is_gated_alike_alone_and_in_a_batch(cpu: Context) -> None:
    x, gates = random_floats(1, 300, 256), random_floats(2, 300, 4)
    together = gate_heads(cpu, x, gates)
    alone = [gate_heads(cpu, x[i : i + 1], gates[i : i + 1]) for i in range(300)]
    assert_equal_bits(np.concatenate(alone), together)
    other = gates.copy()
    other[17, 2] += 0.01
    changed = np.flatnonzero((gate_heads(cpu, x, other) != together).reshape(-1))
    assert changed.min() >= 17 * 256 + 128
    assert changed.max() < 17 * 256 + 192
    assert len(changed) > 50
    assert cpu.ledger.snapshot().dispatches == [Dispatch("gate_heads", "cpu", "heads", 302)]


def test_gates_that_do_not_fit_are_refused(cpu: Context) -> None:
    x = random_floats(1, 2, 12)
    for ctx in (cpu, REFERENCE):
        with pytest.raises(ValueError, match="columns of gates is 5, expected a divisor of the 12 columns of x"):
            gate_heads(ctx, x, random_floats(2, 2, 5))
        with pytest.raises(ValueError, match="rows of gates is 3, expected 2"):
            gate_heads(ctx, x, random_floats(2, 3, 4))
    with pytest.raises(ValueError, match="columns of gates is 5, expected a divisor"):
        cpu.module.gate_heads(cpu.native, x, random_floats(2, 2, 5), np.empty_like(x))


@pytest.mark.parametrize("norm", [rms_norm, layer_norm])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 17), (4, 1000), (37, 2048)])
@pytest.mark.parametrize("scales", [(0.22, 1.0), (1.0, 0.7), (0.3, 1.5)])
def test_norms_scale_what_they_add_and_the_sum(
    norm: Callable[..., tuple[Floats, Floats]], rows: int, columns: int, scales: tuple[float, float]
) -> None:
    x, residual, weight = random_floats(3, rows, columns), random_floats(4, rows, columns), random_floats(5, columns)
    names = dict(zip(("residual_scale", "sum_scale"), scales, strict=True))
    wanted = (x + np.float32(scales[0]) * residual) * np.float32(scales[1])
    for part in (0, 1):
        result = run_everywhere(lambda ctx, part=part: norm(ctx, x, weight, 1e-6, residual, **names)[part])
        assert_equal_bits(result, run_everywhere(lambda ctx, part=part: norm(ctx, wanted, weight, 1e-6)[part]))
        reference = norm(REFERENCE, x, weight, 1e-6, residual, **names)[part]
        np.testing.assert_allclose(result, reference, rtol=1e-5, atol=1e-5)


def test_scales_without_a_residual_are_refused(cpu: Context) -> None:
    x, weight = random_floats(3, 2, 8), random_floats(5, 8)
    with pytest.raises(ValueError, match="rms_norm: residual is None, expected an array, as there are scales"):
        rms_norm(cpu, x, weight, 1e-6, residual_scale=2.0)
    with pytest.raises(ValueError, match="layer_norm: residual is None"):
        layer_norm(cpu, x, weight, 1e-6, sum_scale=2.0)
