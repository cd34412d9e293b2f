"""Operators as MLX's own operations, on a device without our kernels, against the reference."""

from __future__ import annotations

from typing import Any

import pytest
from gpu_cases import REFERENCE, Scene, play, random_floats, relative_error

from mlxr.core.errors import DeviceError
from mlxr.kernels.activate import ACTIVATIONS, Activation, activate
from mlxr.kernels.context import Context
from mlxr.kernels.elementwise import gate_heads, scale
from mlxr.kernels.norms import layer_norm, rms_norm
from mlxr.kernels.rope import QueryTemperature

EXACT = 3e-6
SCENES = {
    "joint norms": Scene(6, 3, 80, 8, (9, 20, 31), (1, 1, 17), normed=True, head_norms="joint", kv_type="f32"),
    "turned norms": Scene(6, 3, 80, 8, (9, 20, 31), (1, 1, 17), normed=True, head_norms="turned", kv_type="f32"),
    "values are keys": Scene(6, 3, 80, 8, (20, 31), (1, 17), projected="qk", normed=True, values_normed=True),
    "no rotation": Scene(6, 3, 80, 8, (9, 31), (1, 17), rot_dim=-1, temperature=QueryTemperature(0.6, 7)),
    "capped, window": Scene(4, 2, 64, 16, (90, 40), (30, 1), window=21, softcap=0.5),
    "sinks": Scene(6, 2, 20, 16, (33, 9), (33, 1), rot_dim=10, sunk=True),
    "capped, sinks": Scene(8, 2, 64, 16, (40, 9), (12, 1), softcap=0.5, sunk=True, interleaved=True),
}


@pytest.fixture
def composed() -> Context:
    """MLX on the CPU."""
    try:
        return Context("mlx-cpu")
    except DeviceError as error:
        pytest.skip(str(error))


@pytest.mark.smoke
@pytest.mark.parametrize("name", SCENES)
def test_heads_and_attention(composed: Context, name: str) -> None:
    assert relative_error(play(composed, SCENES[name]), play(REFERENCE, SCENES[name])) < EXACT


@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("gated", [True, False])
def test_activation(composed: Context, kind: Activation, gated: bool) -> None:
    if kind == "clamped_swiglu" and not gated:
        pytest.skip("clamped swiglu is always gated")
    x = random_floats(1, 3, 600) * 4
    numbers = {"xielu": (1.1, 0.7, 0.5, -0.003), "limited_swiglu": (2.5,), "clamp": (1.5,)}.get(kind, ())
    result = activate(composed, composed.gpu.mx.array(x), kind, gated=gated, parameters=numbers)
    assert relative_error(result, activate(REFERENCE, x, kind, gated=gated, parameters=numbers)) < EXACT


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("scales", [{}, {"residual_scale": 0.3, "sum_scale": 2.0}])
def test_norms(composed: Context, biased: bool, scales: dict[str, Any]) -> None:
    mx, x, residual, weight = composed.gpu.mx, *(random_floats(n, 3, 600) for n in (1, 2)), random_floats(3, 600)
    bias = weight * 2 if biased else None
    result = layer_norm(composed, mx.array(x), weight, 1e-5, mx.array(residual), bias=bias, **scales)
    expected = layer_norm(REFERENCE, x, weight, 1e-5, residual, bias=bias, **scales)
    assert all(relative_error(*pair) < EXACT for pair in zip(result, expected, strict=True))
    result = rms_norm(composed, mx.array(x), None, 1e-5, mx.array(residual), **scales)
    expected = rms_norm(REFERENCE, x, None, 1e-5, residual, **scales)
    assert all(relative_error(*pair) < EXACT for pair in zip(result, expected, strict=True))


def test_scales_and_gates(composed: Context) -> None:
    mx, x, gates = composed.gpu.mx, random_floats(1, 3, 600) * 4, random_floats(3, 3, 6)
    for softcap in (None, 2.0):
        result = scale(composed, mx.array(x), 0.5, softcap=softcap)
        assert relative_error(result, scale(REFERENCE, x, 0.5, softcap=softcap)) < EXACT
    assert relative_error(gate_heads(composed, mx.array(x), mx.array(gates)), gate_heads(REFERENCE, x, gates)) < EXACT
