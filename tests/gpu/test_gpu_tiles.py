"""Products on the matrix units, against decoding everything in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from gpu_cases import (
    QUANTISED,
    REFERENCE,
    Floats,
    expect_product,
    make_tensor,
    note_launches,
    random_floats,
    relative_error,
    run_layer,
)

from mlxr.formats import TensorSource
from mlxr.kernels.context import Context
from mlxr.kernels.linear import prepare
from mlxr.kernels.linear.blocks import Plan, multiply_tiles
from mlxr.kernels.linear.parts import LAYOUTS, Extras

NARROW = 4e-3  # weights rounded to bf16; x is exact in it
PLANS = [Plan(2, 1, 4, ahead=True), Plan(1, 2, 2), Plan(2, 4, 8)]


def round_floats(*shape: int) -> Floats:
    """Random numbers that are exact in bf16."""
    bits = random_floats(3, *shape).view(np.uint32) & np.uint32(0xFFFF0000)
    return bits.view(np.float32)


def run(
    gpu: Context,
    tensors: list[TensorSource],
    tokens: int,
    plan: Plan | None = None,
    gate: int = 0,
    biased: bool = False,
    added: bool = False,
    wide: bool = True,
) -> float:
    mx, x = gpu.gpu.mx, round_floats(tokens, tensors[0].shape[1])
    biases = [random_floats(9, tensor.shape[0]) for tensor in tensors] if biased else None
    expected, residual = expect_product(tensors, x, biases, gate, added)
    parts, bias = prepare(gpu, tensors, biases).payload
    weights = [(LAYOUTS[part.type_name].number, part.rows, part.raw) for part in parts]
    result = multiply_tiles(
        gpu.gpu,
        mx.array(x).astype(mx.float32 if wide else mx.bfloat16),
        weights,
        Extras(gate, bias, residual=None if residual is None else mx.array(residual)),
        mx.float32,
        plan=plan,
    )
    return relative_error(result, expected)


@pytest.mark.smoke
@pytest.mark.parametrize("type_name", QUANTISED)
def test_every_type(gpu: Context, type_name: str) -> None:
    assert run(gpu, [make_tensor(type_name, 37, 768)], 5) < NARROW


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_every_plan(gpu: Context, plan: Plan) -> None:
    assert run(gpu, [make_tensor("q6_k", 70, 512)], 8 * plan.token_tiles - 3, plan) < NARROW


@pytest.mark.parametrize("type_name", ["q4_k", "q6_k"])
def test_single_row_is_scaled_in_floats(gpu: Context, type_name: str) -> None:
    plan = Plan(1, 1, 4, staged=True, single=True)
    assert run(gpu, [make_tensor(type_name, 37, 1280)], 1, plan) < 1e-5


@pytest.mark.parametrize("tokens", [1, 9, 65])
def test_every_number_of_rows(gpu: Context, tokens: int) -> None:
    assert run(gpu, [make_tensor("q4_k", 21, 1280)], tokens, wide=False) < NARROW


@pytest.mark.parametrize("columns", [96, 288])
def test_columns_that_are_no_whole_steps(gpu: Context, columns: int) -> None:
    assert run(gpu, [make_tensor("q8_0", 19, columns)], 3) < NARROW


@pytest.mark.parametrize("gate", [1, 2])
def test_gate_with_bias(gpu: Context, gate: int) -> None:
    assert run(gpu, [make_tensor("q5_k", 2 * 21, 512)], 10, gate=gate, biased=True) < NARROW


def test_parts_of_two_types_with_biases_and_sum(gpu: Context) -> None:
    tensors = [make_tensor("q4_k", 21, 512), make_tensor("q6_k", 35, 512)]
    assert run(gpu, tensors, 2, biased=True, added=True) < NARROW


@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_layer_goes_through_tiles(gpu: Context, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norm, product with gate, and product with sum, as the operators call for them."""
    monkeypatch.setattr(gpu.gpu, "has_tiles", True)
    monkeypatch.setattr(gpu.gpu, "processors", 0)  # one row would be streamed
    monkeypatch.setattr(gpu.gpu, "operands", gpu.gpu.mx.bfloat16)
    launched = note_launches(gpu, monkeypatch)
    x, weight = random_floats(1, tokens, 256), random_floats(2, 256)
    up, down = [make_tensor("q5_k", 2 * 256, 256)], [make_tensor("q8_0", 256, 256)]
    expected = run_layer(REFERENCE, x, weight, up, down)[1]
    found = run_layer(gpu, gpu.gpu.mx.array(x), weight, up, down)[1]
    assert relative_error(found, expected) < 2 * NARROW  # rounded four times
    assert launched[:3] == ["rms_norm", "linear_tiles", "linear_tiles"][tokens == 1 :]
