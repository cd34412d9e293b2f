"""A few rows streamed through 16-bit weights, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from gpu_cases import REFERENCE, expect_product, make_tensor, note_launches, random_floats, relative_error, run_layer

from mlxr.kernels.context import Context
from mlxr.kernels.gpu.deferred import settle
from mlxr.kernels.linear import prepare
from mlxr.kernels.linear.floats import FloatsPlan, multiply_floats, plan_floats
from mlxr.kernels.linear.parts import Extras
from mlxr.kernels.norms import rms_norm

NARROW = {"bf16": 4e-3, "f16": 6e-4}  # x rounded to these
ROOM_BYTES = 227 * 1024


def run(
    gpu: Context,
    shape: tuple[int, int],
    tokens: int,
    plan: FloatsPlan | None = None,
    *,
    type_name: str = "bf16",
    gate: int = 0,
    biased: bool = False,
    added: bool = False,
    normed: bool = False,
    narrow: bool = False,
    x: np.ndarray | None = None,
) -> float:
    """Multiply on the GPU and on the host; returns the relative error."""
    mx, (rows, columns) = gpu.gpu.mx, shape
    tensor = make_tensor(type_name, rows, columns)
    x = random_floats(3, tokens, columns) if x is None else x
    gain = random_floats(4, columns)
    biases = [random_floats(9, rows)] if biased else None
    inputs = rms_norm(REFERENCE, x, gain, 1e-5)[0] if normed else x
    expected, residual = expect_product([tensor], inputs, biases, gate, added)
    (part,), bias = prepare(gpu, [tensor], biases).payload
    if plan is None:
        plan = plan_floats(tokens, rows // 2 if gate else rows, columns, 3, ROOM_BYTES, shared=False)
    assert plan is not None
    weight, given = part.upload.array, mx.array(x)
    result = multiply_floats(
        gpu.gpu,
        given.astype(weight.dtype) if narrow else given,
        weight,
        Extras(
            gate, bias, (mx.array(gain), 1e-5) if normed else None, None if residual is None else mx.array(residual)
        ),
        mx.float32,
        plan,
    )
    if plan.shares > 1:
        result = np.asarray(result).sum(axis=0)
    return relative_error(result, expected)


@pytest.mark.smoke
@pytest.mark.parametrize("type_name", ["bf16", "f16"])
@pytest.mark.parametrize("tokens", [1, 2, 8, 13])
def test_every_number_of_rows(gpu: Context, type_name: str, tokens: int) -> None:
    assert run(gpu, (100, 1024), tokens, type_name=type_name, narrow=True) < NARROW[type_name]


@pytest.mark.parametrize(
    ("tokens", "plan"),
    [
        (1, FloatsPlan(5, 1, 0, 2, 3)),
        (1, FloatsPlan(2, 3, 0, 4, 2)),
        (7, FloatsPlan(5, 1, 1, 4, 3)),
        (7, FloatsPlan(2, 2, 1, 4, 9)),
        (9, FloatsPlan(1, 3, 2, 8, 5)),
    ],
    ids=str,
)
def test_every_plan(gpu: Context, tokens: int, plan: FloatsPlan) -> None:
    assert run(gpu, (53, 1536), tokens, plan) < NARROW["bf16"]


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("gate", [1, 2])
def test_gate_with_bias(gpu: Context, tokens: int, gate: int) -> None:
    assert run(gpu, (2 * 45, 512), tokens, gate=gate, biased=True) < NARROW["bf16"]


@pytest.mark.parametrize("columns", [512, 5632])
def test_one_row_with_norm_gate_and_sum(gpu: Context, columns: int) -> None:
    assert run(gpu, (2 * 24, columns), 1, gate=1, normed=True, added=True) < NARROW["bf16"]


def test_few_rows_with_bias_and_sum(gpu: Context) -> None:
    assert run(gpu, (70, 512), 3, biased=True, added=True) < NARROW["bf16"]


def test_what_is_not_a_number_stays_so(gpu: Context) -> None:
    x = random_floats(1, 1, 512)
    x[0, 300] = np.nan
    assert np.isnan(run(gpu, (32, 512), 1, x=x))


@pytest.mark.parametrize("tokens", [1, 6])
def test_stays_within_its_arrays(sanitized: Context, tokens: int) -> None:
    assert run(sanitized, (2 * 21, 512), tokens, gate=1, biased=True, added=True, normed=tokens == 1) < NARROW["bf16"]
    assert run(sanitized, (37, 1024), tokens, FloatsPlan(2, 2, int(tokens > 1), 4, 3)) < NARROW["bf16"]


def test_what_is_not_streamed() -> None:
    assert plan_floats(1, 4096, 14336, 132, ROOM_BYTES, shared=False) == FloatsPlan(132, 1, 0)
    assert plan_floats(8, 4096, 14336, 132, ROOM_BYTES, shared=True) == FloatsPlan(33, 4, 1)
    assert plan_floats(8, 4096, 14336, 132, ROOM_BYTES, shared=False) is None
    assert plan_floats(16, 4096, 4096, 132, ROOM_BYTES, shared=False) == FloatsPlan(132, 1, 2)
    assert plan_floats(17, 4096, 4096, 132, ROOM_BYTES, shared=True) is None
    assert plan_floats(8, 4096, 4096, 132, 64 * 1024, shared=False) is None
    assert plan_floats(8, 4096, 4096 + 64, 132, ROOM_BYTES, shared=False) is None
    assert plan_floats(16, 2048, 5632, 132, ROOM_BYTES, shared=True) is None
    assert plan_floats(8, 4096, 4096, 0, 0, shared=False) is None


@pytest.mark.parametrize(
    ("tokens", "wide", "expected"),
    [
        (1, 1024, ["linear_floats", "linear_floats", "rms_norm"]),
        (3, 1024, ["rms_norm", "linear_floats", "linear_floats", "rms_norm"]),
        (8, 8192, ["rms_norm", "linear_floats", "linear_floats", "rms_norm"]),  # in shares, which the norm adds up
    ],
)
def test_layer_is_streamed(
    gpu: Context, tokens: int, wide: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norm, product with gate, product with sum, as the operators call for them."""
    for name, value in {"has_tiles": True, "processors": 4, "room_bytes": ROOM_BYTES}.items():
        monkeypatch.setattr(gpu.gpu, name, value)
    monkeypatch.setattr(gpu.gpu, "operands", gpu.gpu.mx.bfloat16)
    launched = note_launches(gpu, monkeypatch)
    weight, up, down = random_floats(2, 512), [make_tensor("bf16", 2 * wide, 512)], [make_tensor("bf16", 512, wide)]

    def compute(ctx: Context, array: object) -> object:
        normed, stream = run_layer(ctx, array, weight, up, down)
        kind = np.float32 if ctx is REFERENCE else gpu.gpu.mx.float32
        return np.concatenate([np.asarray(settle(normed).astype(kind)), np.asarray(stream)])

    x = random_floats(1, tokens, 512)
    assert relative_error(compute(gpu, gpu.gpu.mx.array(x)), np.asarray(compute(REFERENCE, x))) < 2 * NARROW["bf16"]
    assert launched == expected
