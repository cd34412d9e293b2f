"""`layer_norm`, and `rms_norm` without a weight, against exact numbers, with equal bits however the rows come."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from variants import Floats, assert_equal_bits, random_floats, run_everywhere

from mlxr.kernels.context import Context
from mlxr.kernels.ledger import Dispatch
from mlxr.kernels.norms import layer_norm, rms_norm

SHAPES = [(1, 1), (3, 16), (5, 17), (2, 63), (2, 64), (7, 80), (4, 1000), (37, 2048), (3, 11008)]
REFERENCE = Context("reference")


def normed_exactly(x: Floats, weight: Floats, bias: Floats | None, eps: float) -> NDArray[np.float64]:
    wide = x.astype(np.float64)
    centred = wide - wide.mean(axis=1, keepdims=True)
    result: NDArray[np.float64] = centred / np.sqrt(np.mean(centred**2, axis=1, keepdims=True) + np.float32(eps))
    return result * weight + (0 if bias is None else bias)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("mean", [0.0, 40.0])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_norm_is_right_wherever_the_mean_lies(rows: int, columns: int, mean: float, biased: bool) -> None:
    x, weight = random_floats(1, rows, columns) * 3 + np.float32(mean), random_floats(2, columns)
    bias = random_floats(3, columns) if biased else None
    result = run_everywhere(lambda ctx: layer_norm(ctx, x, weight, 1e-5, bias=bias)[0])
    exact = normed_exactly(x, weight, bias, 1e-5)
    np.testing.assert_allclose(result, exact, rtol=3e-6, atol=3e-5 if mean else 2e-6)
    np.testing.assert_allclose(layer_norm(REFERENCE, x, weight, 1e-5, bias=bias)[0], exact, rtol=3e-6, atol=3e-5)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_rows_take_turns_at_the_weights(rows: int, columns: int) -> None:
    x, weights, bias = random_floats(1, 3 * rows, columns), random_floats(2, 3, columns), random_floats(3, columns)
    result = run_everywhere(lambda ctx: layer_norm(ctx, x, weights, 1e-5, bias=bias)[0])
    for turn, weight in enumerate(weights):
        alone = run_everywhere(lambda ctx, weight=weight: layer_norm(ctx, x, weight, 1e-5, bias=bias)[0])  # type: ignore[misc]
        assert_equal_bits(result[turn::3], alone[turn::3])
    np.testing.assert_allclose(layer_norm(REFERENCE, x, weights, 1e-5, bias=bias)[0], result, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_residual_is_added_first(rows: int, columns: int) -> None:
    x, residual, weight = random_floats(3, rows, columns), random_floats(4, rows, columns), random_floats(5, columns)
    summed = run_everywhere(lambda ctx: layer_norm(ctx, x, weight, 1e-6, residual)[1])
    assert_equal_bits(summed, x + residual)
    normed = run_everywhere(lambda ctx: layer_norm(ctx, x, weight, 1e-6, residual)[0])
    assert_equal_bits(normed, run_everywhere(lambda ctx: layer_norm(ctx, summed, weight, 1e-6)[0]))


def test_row_has_the_same_bits_alone_and_in_a_batch(cpu: Context) -> None:
    x, weight, bias = random_floats(6, 40, 1530), random_floats(7, 1530), random_floats(8, 1530)
    together = layer_norm(cpu, x, weight, 1e-5, bias=bias)[0]
    for rows in (1, 7):
        parts = [layer_norm(cpu, x[i : i + rows], weight, 1e-5, bias=bias)[0] for i in range(0, 40, rows)]
        assert_equal_bits(np.concatenate(parts), together, rows)


def test_each_part_is_noticed(cpu: Context) -> None:
    """A norm with another mean, bias, weight or eps gives another result."""
    x, weight, bias = random_floats(6, 3, 50) + 1, random_floats(7, 50), random_floats(8, 50)
    exact = normed_exactly(x, weight, bias, 1e-2)
    assert np.abs(layer_norm(cpu, x, weight, 1e-2, bias=bias)[0] - exact).max() < 1e-5
    others = [
        layer_norm(cpu, x, weight, 1e-2)[0],
        layer_norm(cpu, x, weight, 1e-5, bias=bias)[0],
        layer_norm(cpu, x, np.ones(50, np.float32), 1e-2, bias=bias)[0],
        rms_norm(cpu, x, weight, 1e-2)[0] + bias,
    ]
    for other in others:
        assert np.abs(other - exact).max() > 1e-3


def test_not_a_number_stays_in_its_row_and_inputs_are_left_alone(cpu: Context) -> None:
    x, residual, weight = random_floats(8, 3, 70), random_floats(9, 3, 70), random_floats(10, 70)
    x[1, 69] = np.nan
    copies = x.copy(), residual.copy(), weight.copy()
    normed, _ = layer_norm(cpu, x, weight, 1e-5, residual, bias=weight)
    assert np.isnan(normed).all(axis=1).tolist() == [False, True, False]
    for array, copy in zip((x, residual, weight), copies, strict=True):
        assert_equal_bits(array, copy)
    assert layer_norm(cpu, x, weight, 1e-5)[1] is x
    assert cpu.ledger.snapshot().dispatches == [
        Dispatch("layer_norm", "cpu", "f32", 1),
        Dispatch("layer_norm", "cpu", "f32+residual", 1),
    ]


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_rms_norm_without_weight_has_the_bits_of_ones(rows: int, columns: int, added: bool) -> None:
    x, residual = random_floats(1, rows, columns), random_floats(2, rows, columns) if added else None
    ones = np.ones(columns, np.float32)
    result = run_everywhere(lambda ctx: rms_norm(ctx, x, None, 1e-5, residual)[0])
    assert_equal_bits(result, run_everywhere(lambda ctx: rms_norm(ctx, x, ones, 1e-5, residual)[0]))
    assert_equal_bits(rms_norm(REFERENCE, x, None, 1e-5)[0], rms_norm(REFERENCE, x, ones, 1e-5)[0])


def test_shapes_that_do_not_fit_are_refused(cpu: Context) -> None:
    x, out = random_floats(12, 2, 8), np.empty((2, 8), np.float32)
    with pytest.raises(ValueError, match="layer_norm: length of weight is 9, expected 8"):
        layer_norm(cpu, x, np.ones(9, np.float32), 1e-5)
    with pytest.raises(ValueError, match="layer_norm: length of bias is 7, expected 8"):
        layer_norm(cpu, x, x[0].copy(), 1e-5, bias=np.ones(7, np.float32))
    with pytest.raises(ValueError, match="layer_norm: length of bias is 7, expected 8"):
        cpu.module.layer_norm(cpu.native, x, x[:1].copy(), np.ones(7, np.float32), 1e-5, None, out, None)
    with pytest.raises(ValueError, match="layer_norm: normed is not shaped as x"):
        cpu.module.layer_norm(cpu.native, x, x[:1].copy(), None, 1e-5, None, out[:1], None)
    with pytest.raises(ValueError, match="layer_norm: summed is alone"):
        cpu.module.layer_norm(cpu.native, x, x[:1].copy(), None, 1e-5, None, out, out)
    with pytest.raises(ValueError, match="layer_norm: rows of weight is 0, expected at least 1"):
        cpu.module.layer_norm(cpu.native, x, x[:0].copy(), None, 1e-5, None, out, None)
    with pytest.raises(ValueError, match="rms_norm: length of weight is 9, expected 8"):
        cpu.module.rms_norm(cpu.native, x, np.ones(9, np.float32), 1e-5, None, out, None)
