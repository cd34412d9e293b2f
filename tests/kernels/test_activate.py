"""The native `activate` and the exponential it is made of, over the whole range of numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from variants import Floats, any_floats, assert_equal_bits, count_ulps, random_floats, run_everywhere

from mlxr.kernels import activate as kernels
from mlxr.kernels.activate import ACTIVATIONS, PARAMETER_COUNTS, Activation
from mlxr.kernels.context import Context
from mlxr.kernels.ledger import Dispatch

XIELU = (1.1, 0.7, 0.5, -0.003)  # alpha_n, alpha_p, beta, eps
LIMIT = 1.5
NUMBERS = {"xielu": XIELU, "limited_swiglu": (LIMIT,), "clamp": (1.5,)}


def activate(ctx: Context, x: Floats, kind: Activation = "silu", **options: Any) -> Floats:
    """The operator, with numbers for those kinds that have some."""
    return kernels.activate(ctx, x, kind, parameters=NUMBERS.get(kind, ()), **options)


def activate_exactly(x: Floats, kind: str) -> NDArray[np.float64]:
    wide = x.astype(np.float64)
    if kind in ("relu", "relu_squared"):
        return np.maximum(wide, 0) ** (1 if kind == "relu" else 2)
    if kind == "xielu":
        alpha_n, alpha_p, beta, eps = np.array(XIELU, np.float32).astype(np.float64)
        below = np.expm1(np.minimum(wide, eps)) - wide
        bent: NDArray[np.float64] = np.where(wide > 0, alpha_p * wide**2, alpha_n * below) + beta * wide
        return bent
    if kind == "clamp":
        return np.clip(wide, -1.5, 1.5)
    if kind == "gelu_erf":
        tail = np.array([0.5 * math.erfc(min(abs(one), 1e3) / math.sqrt(2)) for one in wide.reshape(-1)])
        return wide * np.where(wide < 0, tail.reshape(wide.shape), 1 - tail.reshape(wide.shape))
    if kind == "silu":
        exponent = -wide
    elif kind == "limited_swiglu":
        wide = np.minimum(wide, LIMIT)
        exponent = -wide
    elif kind == "clamped_swiglu":
        wide = np.minimum(wide, 7)
        exponent = -np.float64(np.float32(1.702)) * wide
    else:
        exponent = -2 * math.sqrt(2 / math.pi) * (wide + np.float64(np.float32(0.044715)) * wide**3)
    with np.errstate(over="ignore"):
        result: NDArray[np.float64] = wide / (1 + np.exp(exponent))
    return result


def gate(x: Floats, kind: str = "silu") -> Floats:
    """Return rows whose gate is `x` and whose other factor is 1 (for clamped swiglu 0, of which it makes 1)."""
    return np.concatenate([x, np.zeros_like(x) if kind == "clamped_swiglu" else np.ones_like(x)], axis=1)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_columns_elsewhere_multiply_as_a_second_half_does(kind: str) -> None:
    gate, up = random_floats(3, 7, 53) * 3, random_floats(4, 7, 3 * 53)
    for first in (0, 53, 106):
        fused = np.concatenate([gate, up[:, first : first + 53]], axis=1)
        for ctx in (Context("cpu", threads=2), Context("reference")):
            result = activate(ctx, gate, kind, gated=False, up=up, first=first)  # type: ignore[arg-type]
            assert_equal_bits(result, activate(ctx, fused, kind))  # type: ignore[arg-type]


def test_columns_that_do_not_fit_are_refused(cpu: Context) -> None:
    gate, up, out = random_floats(3, 2, 4), random_floats(4, 2, 9), np.empty((2, 4), np.float32)
    with pytest.raises(ValueError, match="activate: first is 6, expected so that 4 of 9 columns follow"):
        activate(cpu, gate, gated=False, up=up, first=6)
    with pytest.raises(ValueError, match="activate: rows of up is 1, expected 2"):
        activate(cpu, gate, gated=False, up=up[:1])
    with pytest.raises(ValueError, match=r"activate: up is of shape .* expected None, as gate_up is gated"):
        activate(cpu, gate, up=up)
    with pytest.raises(ValueError, match="activate: first is 6, expected so that 4 columns of up follow"):
        cpu.module.activate(cpu.native, gate, "silu", out, False, up, 6)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activation_is_right_to_a_few_last_places(kind: Activation) -> None:
    x = np.concatenate([np.linspace(-12, 12, 20000), np.linspace(-0.01, 0.01, 1000)]).astype(np.float32)[None]
    result = run_everywhere(lambda ctx: activate(ctx, gate(x, kind), kind))
    exact = activate_exactly(x, kind)
    # the exponent of gelu is itself rounded, and e**u turns each ulp of u into some |u| of them
    with np.errstate(divide="ignore", invalid="ignore"):
        logarithm = np.abs(np.log(np.where(exact == 0, 1, exact / x)))
    if kind == "xielu":  # a sum whose terms cancel where it crosses 0
        np.testing.assert_allclose(result, exact, rtol=4e-7, atol=3e-7)
        return
    factors = {"gelu_tanh": 4, "clamped_swiglu": 1, "gelu_erf": 16}
    allowed = 3 + factors.get(kind, 0) * logarithm + (5 if kind == "gelu_erf" else 0)
    assert (count_ulps(result, exact) <= allowed)[np.abs(exact) > 1e-36].all()


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_all_sizes_of_numbers(kind: Activation) -> None:
    x = any_floats(1, 3, 5000)
    x[np.abs(x) > 1e18] = 3 if kind in ("relu_squared", "xielu") else x[np.abs(x) > 1e18]  # whose squares are infinite
    result = run_everywhere(lambda ctx: activate(ctx, gate(x, kind), kind))
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
    with pytest.raises(ValueError, match="activate: kind is mish, expected silu, gelu_tanh, gelu_erf, relu_squared"):
        cpu.module.activate(cpu.native, gate_up, "mish", out)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_each_kind_is_another_one(cpu: Context, kind: Activation) -> None:
    gate_up = random_floats(3, 2, 2000) * 4
    result, half = activate(cpu, gate_up, kind), 1000
    up = gate_up[:, half:]
    for other in ACTIVATIONS:
        factor = np.clip(up, -LIMIT, LIMIT) if other == "limited_swiglu" else up
        factor = np.clip(up, -7, 7) + 1 if other == "clamped_swiglu" else factor
        difference = np.abs(result - activate_exactly(gate_up[:, :half], other) * factor).max()
        assert difference < 1e-4 if other == kind else difference > 1e-3


@pytest.mark.parametrize("kind", [kind for kind in ACTIVATIONS if kind != "clamped_swiglu"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 33), (4, 1025), (2, 7000)])
def test_without_a_gate_it_is_as_if_that_were_one(kind: Activation, rows: int, columns: int) -> None:
    x = random_floats([rows, columns], rows, columns) * 3
    result = run_everywhere(lambda ctx: activate(ctx, x, kind, gated=False))
    assert_equal_bits(result, run_everywhere(lambda ctx: activate(ctx, gate(x), kind)))
    np.testing.assert_allclose(result, activate(Context("reference"), x, kind, gated=False), rtol=1e-5, atol=2e-6)


def test_clamped_swiglu_clamps_both_sides(cpu: Context) -> None:
    gate_up = np.array([[-100, 6.9, 7.1, 1, 1, 1, 1, 1, 1, 1, 6.9, 8, -6.9, -100]], np.float32)
    result = activate(cpu, gate_up, "clamped_swiglu")[0]
    silu = [x / (1 + math.exp(-1.702 * x)) for x in (-100, 6.9, 7, 1)]
    expected = [2 * silu[0], 2 * silu[1], 2 * silu[2], 7.9 * silu[3], 8 * silu[3], -5.9 * silu[3], -6 * silu[3]]
    np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-30)
    for ctx in (cpu, Context("reference")):
        with pytest.raises(ValueError, match="kind is 'clamped_swiglu', expected a kind without a gate"):
            activate(ctx, gate_up, "clamped_swiglu", gated=False)
    with pytest.raises(ValueError, match="kind is clamped_swiglu, expected a kind without a gate"):
        cpu.module.activate(cpu.native, gate_up, "clamped_swiglu", np.empty_like(gate_up), False)


def test_numbers_of_an_activation_are_counted(cpu: Context) -> None:
    x, out = random_floats(3, 2, 4), np.empty((2, 4), np.float32)
    for kind, numbers in (("xielu", XIELU[:3]), ("silu", XIELU), ("limited_swiglu", ())):
        with pytest.raises(
            ValueError, match=rf"number of parameters is {len(numbers)}, expected {PARAMETER_COUNTS.get(kind, 0)}"
        ):
            kernels.activate(cpu, x, kind, gated=False, parameters=numbers)
        with pytest.raises(ValueError, match="activate: number of parameters is"):
            cpu.module.activate(cpu.native, x, kind, out, False, None, 0, numbers)


def test_xielu_near_zero_keeps_its_digits(cpu: Context) -> None:
    x = -np.geomspace(1e-7, 1, 500, dtype=np.float32)[None]
    for eps in (-1e-6, 0.0, 1.0):
        numbers = (1.3, 0.7, 0.0, eps)  # without the straight part, beside which the curve is small
        wide, bound = x.astype(np.float64), min(float(np.float32(eps)), 0.0)
        exact = np.float64(np.float32(1.3)) * (np.expm1(np.minimum(wide, bound)) - wide)
        for ctx in (cpu, Context("reference")):
            result = kernels.activate(ctx, x, "xielu", gated=False, parameters=numbers)
            np.testing.assert_allclose(result, exact, rtol=2e-6, atol=1e-14)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_not_a_number_stays_so(cpu: Context, kind: Activation) -> None:
    gate_up = np.array([[np.nan, 1, 1, np.nan]], np.float32)
    assert np.isnan(activate(cpu, gate_up, kind)).all()


def test_ledger_tells_ungated_ones_apart(cpu: Context) -> None:
    activate(cpu, random_floats(7, 1, 4), "relu_squared", gated=False)
    assert cpu.ledger.snapshot().dispatches == [Dispatch("activate", "cpu", "relu_squared+ungated", 1)]
