"""The native `activate` and the exponential it is made of, over the whole range of numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray
from variants import Floats, any_floats, assert_equal_bits, count_ulps, random_floats, run_everywhere

from mlxr.kernels.activate import ACTIVATIONS, Activation, activate
from mlxr.kernels.context import Context
from mlxr.kernels.ledger import Dispatch


def activate_exactly(x: Floats, kind: str) -> NDArray[np.float64]:
    wide = x.astype(np.float64)
    if kind == "silu":
        exponent = -wide
    else:
        exponent = -2 * math.sqrt(2 / math.pi) * (wide + np.float64(np.float32(0.044715)) * wide**3)
    with np.errstate(over="ignore"):
        result: NDArray[np.float64] = wide / (1 + np.exp(exponent))
    return result


def gate(x: Floats) -> Floats:
    """Rows whose gate is `x` and whose other factor is 1."""
    return np.concatenate([x, np.ones_like(x)], axis=1)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activation_is_right_to_a_few_last_places(kind: Activation) -> None:
    x = np.concatenate([np.linspace(-12, 12, 20000), np.linspace(-0.01, 0.01, 1000)]).astype(np.float32)[None]
    result = run_everywhere(lambda ctx: activate(ctx, gate(x), kind))
    exact = activate_exactly(x, kind)
    # the exponent of gelu is itself rounded, and e**u turns each ulp of u into some |u| of them
    allowed = 3 + (4 * np.abs(np.log(exact / x)) if kind == "gelu_tanh" else 0)
    assert (count_ulps(result, exact) <= allowed)[np.abs(exact) > 1e-36].all()


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_all_sizes_of_numbers(kind: Activation) -> None:
    x = any_floats(1, 3, 5000)
    result = run_everywhere(lambda ctx: activate(ctx, gate(x), kind))
    assert np.isfinite(result).all()
    # where e**-x is beyond float32 the result is 0 instead of some -2.6e-37
    np.testing.assert_allclose(result, activate_exactly(x, kind), rtol=3e-5, atol=3e-37)


def test_silu_at_the_ends_of_the_exponential(cpu: Context) -> None:
    x = np.array([[-1e30, -200, -104, -103, -89, -88.7, -87.4, -87, -0.0, 0, 1e-40, 87, 88.8, 104, 3e38, 40]])
    x = x.astype(np.float32)
    result = activate(cpu, gate(x))
    np.testing.assert_allclose(result, activate_exactly(x, "silu"), rtol=1e-6, atol=1e-36)
    odd = activate(cpu, gate(np.array([[np.nan, np.inf, -np.inf]], np.float32)))
    assert np.isnan(odd[0, 0])
    assert odd[0, 1] == np.inf


@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (2, 15), (3, 33), (5, 1024), (4, 1025), (9, 5632)])
def test_agrees_with_the_reference(kind: Activation, rows: int, columns: int) -> None:
    gate_up = random_floats([rows, columns], rows, 2 * columns) * 3
    result = run_everywhere(lambda ctx: activate(ctx, gate_up, kind))
    # 1 + tanh of the reference cancels for negative numbers
    np.testing.assert_allclose(result, activate(Context("reference"), gate_up, kind), rtol=1e-5, atol=2e-6)


def test_row_has_the_same_bits_alone_and_in_a_batch(cpu: Context) -> None:
    gate_up = random_floats(5, 20, 2 * 3000)
    together = activate(cpu, gate_up)
    assert_equal_bits(np.concatenate([activate(cpu, gate_up[i : i + 1]) for i in range(20)]), together)


def test_element_has_the_same_bits_in_any_column(cpu: Context) -> None:
    x = random_floats(6, 1, 50) * 5
    expected = activate(cpu, gate(x))[0]
    for column in range(50):
        assert activate(cpu, gate(x[:, column : column + 1]))[0, 0] == expected[column]


def test_ledger_names_the_kind(cpu: Context) -> None:
    activate(cpu, random_floats(7, 1, 4), "gelu_tanh")
    assert cpu.ledger.snapshot().dispatches == [Dispatch("activate", "cpu", "gelu_tanh", 1)]


def test_native_call_checks_lengths_itself(cpu: Context) -> None:
    gate_up, out = random_floats(8, 2, 8), np.empty((2, 4), np.float32)
    with pytest.raises(ValueError, match="activate: columns of gate_up is 8, expected 6"):
        cpu.module.activate(cpu.native, gate_up, "silu", out[:, :3].copy())
    with pytest.raises(ValueError, match="activate: rows of gate_up is 2, expected 1"):
        cpu.module.activate(cpu.native, gate_up, "silu", out[:1])
    with pytest.raises(ValueError, match="activate: kind is relu, expected silu or gelu_tanh"):
        cpu.module.activate(cpu.native, gate_up, "relu", out)
