"""Norms, activations and the choice of tokens on the GPU against the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gpu_cases import REFERENCE, Floats, make_tensor, note_launches, random_floats, relative_error

from mlxr.core.types import SamplingParams
from mlxr.kernels.activate import ACTIVATIONS, PARAMETER_COUNTS, Activation, activate
from mlxr.kernels.context import Context
from mlxr.kernels.elementwise import Hadamard, add, gate_heads, hadamard, scale, sum_rows
from mlxr.kernels.gpu.deferred import settle
from mlxr.kernels.linear import linear, prepare
from mlxr.kernels.norms import layer_norm, rms_norm
from mlxr.kernels.sample import SampleRow, sample

EXACT = 2e-6
NARROW = 8e-3  # products of 16-bit numbers


def norm_plainly(ctx: Context, x: Any, weight: Floats, residual: Any) -> tuple[Any, Any]:
    return rms_norm(ctx, x, weight, 1e-5, residual)


def norm_without_weight(ctx: Context, x: Any, _weight: Floats, residual: Any) -> tuple[Any, Any]:
    return rms_norm(ctx, x, None, 1e-5, residual)


def norm_centred(ctx: Context, x: Any, weight: Floats, residual: Any) -> tuple[Any, Any]:
    return layer_norm(ctx, x, weight, 1e-5, residual)


def norm_with_bias(ctx: Context, x: Any, weight: Floats, residual: Any) -> tuple[Any, Any]:
    return layer_norm(ctx, x, weight, 1e-5, residual, bias=weight + np.float32(2))


NORMS = (norm_plainly, norm_without_weight, norm_centred, norm_with_bias)


@pytest.mark.smoke
@pytest.mark.parametrize("columns", [16, 100, 2048, 6000])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("norm", NORMS)
def test_norm(gpu: Context, norm: Callable[..., tuple[Any, Any]], columns: int, added: bool) -> None:
    x, weight = random_floats(1, 3, columns) + np.float32(0.5), random_floats(2, columns)
    residual = random_floats(3, 3, columns) if added else None
    mx = gpu.gpu.mx
    normed, summed = norm(gpu, mx.array(x), weight, None if residual is None else mx.array(residual))
    expected, total = norm(REFERENCE, x, weight, residual)
    assert relative_error(settle(normed), expected) < EXACT
    assert relative_error(summed, total) < EXACT
    for other in set(NORMS) - {norm}:
        assert relative_error(settle(normed), other(REFERENCE, x, weight, residual)[0]) > 0.05


@pytest.mark.parametrize("norm", [rms_norm, layer_norm])
@pytest.mark.parametrize(("residual_scale", "sum_scale"), [(0.22, 1.0), (1.0, 0.7), (0.3, 1.5)])
@pytest.mark.parametrize("columns", [100, 6000])
def test_norms_scale_what_they_add_and_the_sum(
    gpu: Context, norm: Callable[..., tuple[Any, Any]], residual_scale: float, sum_scale: float, columns: int
) -> None:
    x, residual, weight = random_floats(1, 3, columns), random_floats(3, 3, columns), random_floats(2, columns)
    scales, mx = {"residual_scale": residual_scale, "sum_scale": sum_scale}, gpu.gpu.mx
    results = norm(gpu, mx.array(x), weight, 1e-5, mx.array(residual), **scales)
    for result, expected in zip(results, norm(REFERENCE, x, weight, 1e-5, residual, **scales), strict=True):
        assert relative_error(settle(result), expected) < EXACT
    assert relative_error(results[1], norm(REFERENCE, x, weight, 1e-5, residual)[1]) > 0.05


@pytest.mark.parametrize("factor", [1.0, 0.4])
@pytest.mark.parametrize("columns", [64, 100])
def test_sums_of_arrays_products_and_norms_that_wait(gpu: Context, columns: int, factor: float) -> None:
    x, other, gain = random_floats(1, 3, columns), random_floats(2, 3, 32), random_floats(3, columns)
    source, mx = make_tensor("f32", columns, 32, 4), gpu.gpu.mx
    stream = mx.array(x)
    expected = linear(REFERENCE, other, prepare(REFERENCE, [source], [None]))
    for made in (mx.array(expected), linear(gpu, mx.array(other), prepare(gpu, [source], [None]))):
        result = settle(add(gpu, stream, made, factor))
        assert result.dtype == mx.float32
        assert relative_error(result, (x + expected) * np.float32(factor)) < (NARROW if gpu.gpu.narrow else EXACT)
    normed, _ = rms_norm(gpu, stream, gain, 1e-5)
    summed = x + rms_norm(REFERENCE, x, gain, 1e-5)[0]
    assert relative_error(add(gpu, stream, normed), summed) < EXACT
    normed, _ = rms_norm(gpu, stream, gain, 1e-5)
    assert relative_error(rms_norm(gpu, stream, gain, 1e-5, normed)[1], summed) < EXACT


@pytest.mark.parametrize("columns", [17, 512, 3000])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_scale(gpu: Context, columns: int, softcap: float | None) -> None:
    x = random_floats(1, 3, columns) * 9
    result = scale(gpu, gpu.gpu.mx.array(x), 0.4, softcap=softcap)
    assert relative_error(result, scale(REFERENCE, x, 0.4, softcap=softcap)) < EXACT
    assert relative_error(result, scale(REFERENCE, x, 0.41, softcap=softcap)) > 2e-3


@pytest.mark.parametrize(("heads", "width"), [(4, 64), (3, 17), (200, 1)])
def test_gates(gpu: Context, heads: int, width: int) -> None:
    x, gates, mx = random_floats(1, 3, heads * width), random_floats(2, 3, heads) * 3, gpu.gpu.mx
    gates[0, 0] = -200
    result = gate_heads(gpu, mx.array(x), mx.array(gates))
    assert relative_error(result, gate_heads(REFERENCE, x, gates)) < EXACT
    assert relative_error(result, gate_heads(REFERENCE, x, gates * np.float32(1.1))) > 0.01


@pytest.mark.smoke
def test_rotations_have_the_bits_of_the_reference(gpu: Context) -> None:
    mx, rng = gpu.gpu.mx, np.random.default_rng(3)
    columns, block = 3072, 1024
    x, signs = random_floats(1, 3, columns), rng.choice(np.array([-1, 1], np.float32), columns)
    forward = Hadamard(columns, block, signs, rng.permutation(columns).astype(np.int32))
    for rotation in (forward, Hadamard(columns, 2, signs, inverse=True)):
        result = np.asarray(hadamard(gpu, mx.array(x), rotation))
        assert (result == hadamard(REFERENCE, x, rotation)).all(), rotation.block


def test_sum_of_a_product_goes_into_the_layer_norm(gpu: Context) -> None:
    x, stream, weight = random_floats(1, 2, 256), random_floats(2, 2, 64), random_floats(3, 64)
    tensor = make_tensor("q8_0", 64, 256)

    def run(ctx: Context, of: Callable[[Floats], Any]) -> tuple[Any, Any]:
        made = linear(ctx, of(x), prepare(ctx, [tensor]))
        return layer_norm(ctx, of(stream), weight, 1e-5, made, bias=weight)

    results, expected = run(gpu, gpu.gpu.mx.array), run(REFERENCE, lambda array: array)
    allowed = NARROW if gpu.gpu.has_tiles else EXACT
    assert relative_error(results[0], expected[0]) < allowed
    assert relative_error(results[1], expected[1]) < allowed


@pytest.mark.smoke
@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("gated", [True, False])
def test_activation(gpu: Context, kind: Activation, gated: bool) -> None:
    gate_up = random_floats(4, 5, 2 * 300) * 6
    gate_up[0, :2] = -200, 200
    if kind == "clamped_swiglu" and not gated:
        with pytest.raises(ValueError, match="expected a kind without a gate"):
            activate(gpu, gpu.gpu.mx.array(gate_up), kind, gated=gated)
        return
    result = activate(gpu, gpu.gpu.mx.array(gate_up), kind, gated=gated, parameters=list_numbers(kind))
    for other in set(ACTIVATIONS) - {"" if gated else "clamped_swiglu"}:
        wanted = activate(REFERENCE, gate_up, other, gated=gated, parameters=list_numbers(other))  # type: ignore[arg-type]
        assert relative_error(result, wanted) < EXACT if other == kind else relative_error(result, wanted) > 1e-5
    if kind == "xielu":  # each of whose numbers counts
        for at in range(4):
            numbers = tuple(1.5 * number if index == at else number for index, number in enumerate(list_numbers(kind)))
            changed = activate(gpu, gpu.gpu.mx.array(gate_up / 400), kind, gated=gated, parameters=numbers)
            wanted = activate(REFERENCE, gate_up / 400, kind, gated=gated, parameters=numbers)
            assert relative_error(changed, wanted) < EXACT
            wanted = activate(REFERENCE, gate_up / 400, kind, gated=gated, parameters=list_numbers(kind))
            assert relative_error(changed, wanted) > 1e-5


def list_numbers(kind: str) -> tuple[float, ...]:
    """Return the numbers of an activation: xIELU's (it bends at -0.01), or a limit."""
    return {"xielu": (1.1, 0.7, 0.5, -0.01), "limited_swiglu": (2.5,), "clamp": (1.5,)}.get(kind, ())


@pytest.mark.parametrize("kind", [kind for kind in ACTIVATIONS if kind not in PARAMETER_COUNTS])
@pytest.mark.parametrize("tokens", [1, 3])
def test_activation_goes_into_the_product_before_it(
    gpu: Context, kind: Activation, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, tensor = random_floats(1, tokens, 256) * 3, make_tensor("q8_0", 128, 256)
    launched = note_launches(gpu, monkeypatch)
    result = activate(gpu, linear(gpu, gpu.gpu.mx.array(x), prepare(gpu, [tensor])), kind)
    assert "activate" not in launched
    expected = activate(REFERENCE, linear(REFERENCE, x, prepare(REFERENCE, [tensor])), kind)
    assert relative_error(result, expected) < (2 * NARROW if gpu.gpu.has_tiles else 2 * EXACT)


@pytest.mark.smoke
def test_greedy_tokens_come_with_their_logprobs(gpu: Context) -> None:
    logits = random_floats(5, 4, 1000)
    logits[1, [17, 400]] = 9  # the lower id wins
    rows = [SampleRow() for _ in logits]
    for found, wanted in zip(sample(gpu, gpu.gpu.mx.array(logits), rows), sample(REFERENCE, logits, rows), strict=True):
        assert found.token_id == wanted.token_id
        assert found.logprob == pytest.approx(wanted.logprob, abs=1e-5)


def test_other_rules_draw_as_on_the_host(gpu: Context) -> None:
    logits = random_floats(6, 2, 500)
    rows = [
        SampleRow(SamplingParams(temperature=0.8, top_p=0.9), uniform=0.3),
        SampleRow(top_logprobs=3, bias_ids=np.array([4], np.int32), bias_values=np.array([50], np.float32)),
    ]
    found, wanted = sample(gpu, gpu.gpu.mx.array(logits), rows), sample(REFERENCE, logits, rows)
    assert [row.token_id for row in found] == [row.token_id for row in wanted]
    assert [top.token_id for top in found[1].top] == [top.token_id for top in wanted[1].top]


def test_not_a_number_is_an_error(gpu: Context) -> None:
    logits = random_floats(7, 2, 50)
    logits[1, 3] = np.nan
    with pytest.raises(ValueError, match="row 1"):
        sample(gpu, gpu.gpu.mx.array(logits), [SampleRow(), SampleRow()])


@pytest.mark.parametrize("columns", [5, 384, 1000])
@pytest.mark.parametrize("kind", ["float32", "float16"])
def test_rows_of_each_part_are_added_up(gpu: Context, columns: int, kind: str) -> None:
    counts = [1, 33, 200, 64, 2]
    x = (np.random.RandomState(columns).standard_normal((sum(counts), columns)) + 1).astype(kind)
    result = sum_rows(gpu, gpu.gpu.mx.array(x), counts)
    assert relative_error(result, sum_rows(REFERENCE, x.astype(np.float32), counts)) < 1e-6
    with pytest.raises(ValueError, match="rows of all parts"):
        sum_rows(gpu, gpu.gpu.mx.array(x), counts[1:])
