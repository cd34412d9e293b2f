"""Products with few outputs in 32 bits, as routers have them: every plan, every remainder, and all extras."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gpu_cases import REFERENCE, Floats, make_tensor, note_launches, random_floats, relative_error

from mlxr.kernels.context import Context
from mlxr.kernels.gpu.deferred import settle
from mlxr.kernels.gpu.kernel import LANES
from mlxr.kernels.linear import floats as float_products
from mlxr.kernels.linear import linear, prepare
from mlxr.kernels.linear.floats import MAX_COLUMNS, MAX_HELD, PLANS, QUAD, WidePlan, choose_wide_plan, multiply_wide
from mlxr.kernels.linear.parts import LAYOUTS, Extras
from mlxr.kernels.norms import rms_norm

EXACT, EPS = 2e-6, 1e-5
TOKENS = (1, 2, 4, 7, 8, 9, 31, 32, 33, 64, 65, 100, 256)
OTHERS = (WidePlan(8, 4), WidePlan(4, 4, 4), WidePlan(2, 8, 2), WidePlan(1, 32), WidePlan(32, 1, 3), WidePlan(4, 1))


def multiply(
    ctx: Context, tokens: int, rows: int, columns: int, *, narrow: bool = False, extras: str = ""
) -> tuple[Any, Floats]:
    """Return the kernel's result with some of `norm bias residual`, and NumPy's from the same numbers."""
    mx, weight = ctx.gpu.mx, random_floats(5, rows, columns)
    x, gain, bias = random_floats(1, tokens, columns), random_floats(2, columns), random_floats(3, rows)
    residual, raw = random_floats(4, tokens, rows), mx.array(weight).view(mx.uint8)
    given = mx.array(x).astype(mx.bfloat16 if narrow else mx.float32)
    wanted = np.array(given.astype(mx.float32)).astype(np.float64)
    if "norm" in extras:
        wanted = wanted / np.sqrt((wanted**2).mean(axis=1, keepdims=True) + EPS) * gain
    wanted = wanted @ weight.T.astype(np.float64)
    wanted += (bias if "bias" in extras else 0) + (residual if "residual" in extras else 0)
    also = Extras(
        bias=mx.array(bias) if "bias" in extras else None,
        norm=(mx.array(gain), EPS) if "norm" in extras else None,
        residual=mx.array(residual) if "residual" in extras else None,
    )
    made = multiply_wide(ctx.gpu, given, (LAYOUTS["f32"].number, rows, raw), also, mx.float32)
    return made, wanted.astype(np.float32)


@pytest.mark.smoke
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("narrow", [False, True])
def test_any_number_of_rows(gpu: Context, tokens: int, narrow: bool) -> None:
    made, wanted = multiply(gpu, tokens, 21, 644, narrow=narrow, extras="bias")
    assert relative_error(made, wanted) < EXACT


@pytest.mark.parametrize("extras", ["", "norm", "bias residual", "norm bias residual"])
@pytest.mark.parametrize("tokens", [1, 3, 8, 13, 70])
def test_what_is_done_on_the_way(gpu: Context, tokens: int, extras: str) -> None:
    made, wanted = multiply(gpu, tokens, 10, 1100, extras=extras)
    assert relative_error(made, wanted) < EXACT


@pytest.mark.parametrize("columns", [4, 512, 2048, 2880, 4100, 8192])
@pytest.mark.parametrize("tokens", [1, 4, 12, 65])
def test_any_number_of_columns(gpu: Context, tokens: int, columns: int) -> None:
    made, wanted = multiply(gpu, tokens, 5, columns, narrow=True, extras="norm")
    assert relative_error(made, wanted) < EXACT


@pytest.mark.parametrize("rows", [1, 128, 1023])
def test_any_number_of_outputs(gpu: Context, rows: int) -> None:
    made, wanted = multiply(gpu, 17, rows, 64)
    assert relative_error(made, wanted) < EXACT


@pytest.mark.parametrize("plan", OTHERS)
def test_every_plan_multiplies(gpu: Context, plan: WidePlan, monkeypatch: pytest.MonkeyPatch) -> None:
    if gpu.gpu.is_apple and plan is OTHERS[4]:
        pytest.skip("an Apple GPU has no registers for so many threads, and no model takes this plan")
    monkeypatch.setattr(float_products, "choose_wide_plan", lambda _tokens, _rows: plan)
    made, wanted = multiply(gpu, 37, 70, 1300, extras="norm bias")
    assert relative_error(made, wanted) < EXACT


@pytest.mark.parametrize("plan", [plan for _, _, plan in PLANS])
@pytest.mark.parametrize("extras", ["", "norm bias"])
def test_every_plan_that_is_listed_multiplies(
    gpu: Context, plan: WidePlan, extras: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `MIN_GROUPS` 0, as for many outputs, no plan is made smaller."""
    monkeypatch.setattr(float_products, "MIN_GROUPS", 0)
    monkeypatch.setattr(float_products, "PLANS", ((1, 1, plan),))
    made, wanted = multiply(gpu, 21, 13, 2048, narrow=True, extras=extras)
    assert relative_error(made, wanted) < EXACT


@pytest.mark.parametrize(
    ("tokens", "rows", "expected"),
    [
        (1, 128, WidePlan(1, 1)),
        (4, 128, WidePlan(1, 4)),
        (8, 128, WidePlan(1, 4)),
        (8, 256, WidePlan(2, 4)),
        (16, 128, WidePlan(4, 4, 2, 2)),
        (32, 1, WidePlan(1, 4, 1, 2)),
        (32, 32, WidePlan(2, 4, 1, 2)),
        (32, 128, WidePlan(4, 4, 2, 2)),
        (32, 256, WidePlan(4, 4, 2, 2)),
        (128, 256, WidePlan(4, 8, 2, 2)),
    ],
)
def test_few_outputs_have_smaller_parts(tokens: int, rows: int, expected: WidePlan) -> None:
    assert choose_wide_plan(tokens, rows) == expected


@pytest.mark.parametrize("tokens", [1, 3, 13])
def test_nothing_else_is_read(sanitized: Context, tokens: int) -> None:
    made, wanted = multiply(sanitized, tokens, 5, 644, extras="norm bias residual")
    assert relative_error(made, wanted) < EXACT


def test_a_row_has_the_same_bits_in_every_batch(gpu: Context) -> None:
    """All plans divide the columns in the same way."""
    alone = np.array(multiply(gpu, 1, 12, 2048)[0])
    for tokens in (4, 8, 40, 70):
        assert np.array_equal(np.array(multiply(gpu, tokens, 12, 2048)[0])[:1], alone)


@pytest.mark.parametrize("plan", [plan for _, _, plan in PLANS])
@pytest.mark.parametrize("columns", [4, 2048, 2052, 4096, 4100, MAX_COLUMNS])
def test_no_lane_holds_too_many_weights(plan: WidePlan, columns: int) -> None:
    slices = plan.count_slices(columns)
    assert plan.outputs * QUAD * -(-columns // (QUAD * LANES * slices)) <= MAX_HELD
    assert plan.outputs * plan.tokens in (1, 2, 4, 8, 16, 32)


@pytest.mark.parametrize("tokens", [3, 8])
def test_norms_of_a_few_rows_go_with_the_router(gpu: Context, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm waits for the product, and one launch makes both."""
    tensor, gain, x = make_tensor("f32", 24, 96), random_floats(2, 96), random_floats(1, tokens, 96)
    bias = [random_floats(3, 24)]
    launched = note_launches(gpu, monkeypatch)
    normed, _ = rms_norm(gpu, gpu.gpu.mx.array(x), gain, EPS)
    made = settle(linear(gpu, normed, prepare(gpu, [tensor], bias)))
    assert launched == ["linear_wide"]
    expected, _ = rms_norm(REFERENCE, x, gain, EPS)
    assert relative_error(made, linear(REFERENCE, expected, prepare(REFERENCE, [tensor], bias))) < EXACT
