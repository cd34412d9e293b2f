"""Products of a library in recorded steps: the choice of an algorithm, and sums that the next norm computes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from gpu_cases import REFERENCE, random_floats, relative_error

from mlxr.kernels.context import Context
from mlxr.kernels.gpu.cuda.machine import choose_first
from mlxr.kernels.gpu.emulator import EmulatedMachine
from mlxr.kernels.gpu.recording import Recorder
from mlxr.kernels.linear.gpu import choose_shares
from mlxr.kernels.norms import Scales, rms_norm
from mlxr.kernels.norms.gpu import rms_norm as norm_shares

EXACT = 1e-5  # summed in f32 in another order


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("times_s", "expected"),
    [
        ([3.0, 1.0, 2.0], 1),
        ([1.01, 1.0], 0),  # no worthwhile difference
        ([1.05, 1.0], 1),
        ([1.05, 1.015, 1.0], 1),
        ([math.inf, 1.0], 1),
        ([math.inf, math.inf], 0),
    ],
)
def test_the_first_of_the_fastest_is_taken(times_s: list[float], expected: int) -> None:
    assert choose_first(times_s) == expected


def test_few_outputs_are_split() -> None:
    assert choose_shares(4096, 14336) > 1
    assert choose_shares(28672, 4096) == 1
    assert choose_shares(4096, 4096 + 32) == 1  # no whole columns for the library


def test_a_recorded_product_comes_in_shares(gpu: Context) -> None:
    """A product that a library would compute, with the emulator in its place."""
    machine, mx = gpu.gpu.machine, gpu.gpu.mx
    if not isinstance(machine, EmulatedMachine):
        pytest.skip("the machine is a real one, which multiplies 16 bits")
    recorder = Recorder(gpu.gpu.launcher.numbers, machine.memory.open(), multiplies=True)
    x_values, weight_values = random_floats(1, 6, 32), random_floats(2, 10, 32)
    x = recorder.make((6, 32), mx.float32)
    out = recorder.multiply(x, mx.array(weight_values), 4, mx.float32)
    machine.write(x.address, x_values)
    machine.start(machine.prepare(recorder.take_launches()))
    shares = machine.read(out.address, 4 * 6 * 10, np.float32).wait().reshape(4, 6, 10)
    assert relative_error(shares[1], x_values[:, 8:16] @ weight_values[:, 8:16].T) < EXACT
    assert relative_error(shares.sum(axis=0), x_values @ weight_values.T) < EXACT


@pytest.mark.parametrize("columns", [64, 5, 4104])
def test_a_norm_adds_shares_up(gpu: Context, columns: int) -> None:
    mx, shares = gpu.gpu.mx, random_floats(1, 3, 4, columns)
    x, weight = random_floats(2, 4, columns), random_floats(3, columns)
    expected = rms_norm(REFERENCE, x, weight, 1e-5, shares.sum(axis=0))
    results = norm_shares(gpu, mx.array(x), weight, 1e-5, mx.array(shares), Scales())
    for found, wanted in zip(results, expected, strict=True):
        assert relative_error(np.array(found.astype(mx.float32)), wanted) < EXACT
