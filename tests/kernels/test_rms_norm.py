"""The native `rms_norm` against exact numbers and the reference, with equal bits however the rows come."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from variants import Floats, assert_equal_bits, count_ulps, random_floats, run_everywhere

from mlxr.kernels.context import Context
from mlxr.kernels.ledger import Dispatch
from mlxr.kernels.norms import rms_norm

SHAPES = [(1, 1), (3, 16), (5, 17), (2, 63), (2, 64), (7, 80), (4, 1000), (1, 2048), (37, 2048), (3, 11008)]


def normed_exactly(x: Floats, weight: Floats, eps: float) -> NDArray[np.float64]:
    wide = x.astype(np.float64)
    result: NDArray[np.float64] = wide / np.sqrt(np.mean(wide**2, axis=1, keepdims=True) + np.float32(eps)) * weight
    return result


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_norm_is_right_to_a_few_last_places(rows: int, columns: int) -> None:
    x, weight = random_floats(1, rows, columns) * 3, random_floats(2, columns)
    result = run_everywhere(lambda ctx: rms_norm(ctx, x, weight, 1e-5)[0])
    assert count_ulps(result, normed_exactly(x, weight, 1e-5)).max() < 4
    reference = rms_norm(Context("reference"), x, weight, 1e-5)[0]
    np.testing.assert_allclose(result, reference, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_residual_is_added_first(rows: int, columns: int) -> None:
    x, residual, weight = random_floats(3, rows, columns), random_floats(4, rows, columns), random_floats(5, columns)
    summed = run_everywhere(lambda ctx: rms_norm(ctx, x, weight, 1e-6, residual)[1])
    assert_equal_bits(summed, x + residual)
    normed = run_everywhere(lambda ctx: rms_norm(ctx, x, weight, 1e-6, residual)[0])
    assert_equal_bits(normed, run_everywhere(lambda ctx: rms_norm(ctx, summed, weight, 1e-6)[0]))


def test_row_has_the_same_bits_alone_and_in_a_batch(cpu: Context) -> None:
    x, weight = random_floats(6, 40, 1536), random_floats(7, 1536)
    together = rms_norm(cpu, x, weight, 1e-5)[0]
    for rows in (1, 7):
        parts = [rms_norm(cpu, x[i : i + rows], weight, 1e-5)[0] for i in range(0, 40, rows)]
        assert_equal_bits(np.concatenate(parts), together, rows)


def test_zeros_stay_zeros_and_sizes_do_not_overflow(cpu: Context) -> None:
    x = np.zeros((3, 100), np.float32)
    x[1], x[2] = 1e18, 1e-18
    normed, _ = rms_norm(cpu, x, np.ones(100, np.float32), 1e-12)
    np.testing.assert_array_equal(normed[0], 0)
    np.testing.assert_allclose(normed[1], 1, rtol=1e-6)
    np.testing.assert_allclose(normed[2], 1e-12, rtol=1e-6)


def test_not_a_number_stays_in_its_row(cpu: Context) -> None:
    x = random_floats(8, 3, 70)
    x[1, 69] = np.nan
    normed, _ = rms_norm(cpu, x, np.ones(70, np.float32), 1e-5)
    assert np.isnan(normed).all(axis=1).tolist() == [False, True, False]


def test_inputs_are_left_alone_and_x_is_its_own_sum(cpu: Context) -> None:
    x, residual, weight = random_floats(9, 4, 33), random_floats(10, 4, 33), random_floats(11, 33)
    copies = x.copy(), residual.copy(), weight.copy()
    rms_norm(cpu, x, weight, 1e-5, residual)
    for array, copy in zip((x, residual, weight), copies, strict=True):
        assert_equal_bits(array, copy)
    assert rms_norm(cpu, x, weight, 1e-5)[1] is x
    assert cpu.ledger.snapshot().dispatches == [
        Dispatch("rms_norm", "cpu", "f32", 1),
        Dispatch("rms_norm", "cpu", "f32+residual", 1),
    ]


def test_native_call_checks_lengths_itself(cpu: Context) -> None:
    x, out = random_floats(12, 2, 8), np.empty((2, 8), np.float32)
    with pytest.raises(ValueError, match="rms_norm: length of weight is 9, expected 8"):
        cpu.module.rms_norm(cpu.native, x, np.ones(9, np.float32), 1e-5, None, out, None)
    with pytest.raises(ValueError, match="rms_norm: normed is not shaped as x"):
        cpu.module.rms_norm(cpu.native, x, x[0].copy(), 1e-5, None, out[:1], None)
    with pytest.raises(ValueError, match="rms_norm: residual is not shaped as x"):
        cpu.module.rms_norm(cpu.native, x, x[0].copy(), 1e-5, x[:1], out, out)
    with pytest.raises(ValueError, match="rms_norm: summed is alone"):
        cpu.module.rms_norm(cpu.native, x, x[0].copy(), 1e-5, None, out, out)
    frozen = np.empty((2, 8), np.float32)
    frozen.flags.writeable = False
    with pytest.raises(TypeError):
        cpu.module.rms_norm(cpu.native, x, x[0].copy(), 1e-5, None, frozen, None)
