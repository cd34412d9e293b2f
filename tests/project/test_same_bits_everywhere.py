"""No number that reaches an answer comes from a function of NumPy's whose last bits depend on the processor.

NumPy computes exp, log, sin and the like in vectors, with other instructions on other processors and other results in
the last place. In float64, rounded to float32 once, that place is lost; so each use is listed here with its type.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable
from decimal import Decimal, getcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxr.formats.quants_encode import encode_mxfp4
from mlxr.formats.tensor import TensorSource
from mlxr.kernels.rope import (
    QueryTemperature,
    RopeScaling,
    build_table,
    inverse_frequencies,
    llama3_factors,
    stretch_base,
)
from mlxr.kernels.sources import take_rates

SOURCE = Path(__file__).parents[2] / "src/mlxr"
FUNCTIONS = (
    *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "power", "float_power", "logaddexp", "logaddexp2"),
    *("sin", "cos", "tan", "sinh", "cosh", "tanh", "arcsin", "arccos", "arctan", "arctan2", "arcsinh", "arccosh"),
    *("arctanh", "cbrt"),
)
MENTION = re.compile(rf"\b(np|numpy)\.({'|'.join(FUNCTIONS)})\b")
# In float64, and either rounded to float32 once, or only shown and not computed with.
DOUBLES = {
    "engine/runner.py": {"exp", "log"},
    "kernels/attend/scores.py": {"log"},
    "kernels/rope.py": {"cos", "sin", "log1p"},
    "kernels/sample/__init__.py": {"exp", "exp2", "log", "log2"},
    "kernels/sources.py": {"exp"},
    "pictures/sounds.py": {"cos", "log"},
    "server/llamacpp/completion.py": {"exp"},
    "service/validation.py": {"exp", "log"},
}
# References in a file with other implementations: they define an operator, and other kernels are compared with them.
REFERENCES = {
    "kernels/activate/__init__.py": {"exp", "expm1", "tanh"},
    "kernels/attend/__init__.py": {"exp", "tanh"},
    "kernels/elementwise/__init__.py": {"exp", "logaddexp", "tanh"},
    "kernels/moe/__init__.py": {"exp"},
    "kernels/norms/__init__.py": {"exp"},
    "kernels/recurrent/__init__.py": {"exp", "logaddexp"},
}


def list_uses(path: Path) -> set[str]:
    """Return NumPy's functions that a file calls or passes on."""
    text = path.read_text()
    if not MENTION.search(text):
        return set()
    return {
        node.attr
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute)
        and node.attr in FUNCTIONS
        and isinstance(node.value, ast.Name)
        and node.value.id in ("np", "numpy")
    }


def test_uses_are_those_that_are_listed() -> None:
    found = {str(path.relative_to(SOURCE)): list_uses(path) for path in SOURCE.rglob("*.py")}
    own = {name: uses for name, uses in found.items() if uses and (name in DOUBLES or "reference" not in name)}
    assert own == DOUBLES | REFERENCES


@pytest.fixture
def only_doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the functions refuse float32."""

    def guard(function: Any) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            assert all(np.asarray(argument).dtype != np.float32 for argument in arguments)
            return function(*arguments, **options)

        return call

    for name in FUNCTIONS:
        monkeypatch.setattr(np, name, guard(getattr(np, name)))


@pytest.mark.usefixtures("only_doubles")
def test_rates_of_states_are_rounded_once() -> None:
    logs = np.linspace(-6, 4, 997, dtype=np.float32)
    source = TensorSource("blk.0.ssm_a", "f32", logs.shape, logs.view(np.uint8))
    tensor = take_rates(source)
    assert tensor.to_float32().tolist() == [np.float32(-math.exp(value)) for value in logs.tolist()]


def exact_angle(position: int, pair: int, dim: int, theta: float) -> Decimal:
    getcontext().prec = 60
    return Decimal(position) * Decimal(theta) ** (Decimal(-2 * pair) / Decimal(dim))


@pytest.mark.usefixtures("only_doubles")
@pytest.mark.parametrize(("dim", "theta"), [(64, 1e4), (128, 5e5), (96, 1e6)])
def test_tables_of_rotations_are_those_of_exact_frequencies(dim: int, theta: float) -> None:
    table = build_table(4096, dim, theta, interleaved=False)
    turn = 2 * Decimal("3.14159265358979323846264338327950288419716939937510582097494459")
    for position in (0, 1, 2, 1023, 4095):
        for pair in range(dim // 2):
            angle = float(exact_angle(position, pair, dim, theta) % turn)
            assert table.cos[position, pair] == pytest.approx(math.cos(angle), abs=1e-7)
            plain = position * float(exact_angle(1, pair, dim, theta))
            assert table.cos[position, pair] == np.float32(math.cos(plain))
            assert table.sin[position, pair] == np.float32(math.sin(plain))


@pytest.mark.usefixtures("only_doubles")
@pytest.mark.parametrize(
    "scaling",
    [
        RopeScaling("linear", 4.0),
        RopeScaling("yarn", 16.0, original_context=4096),
        RopeScaling("yarn", 16.0, original_context=4096, truncate=False),
    ],
    ids=lambda scaling: scaling.kind,
)
def test_scaled_tables_need_no_other_functions(scaling: RopeScaling) -> None:
    temperature = QueryTemperature(0.1, 64)
    table = build_table(512, 64, 1e4, interleaved=True, scaling=scaling, temperature=temperature)
    assert table.query_factors is not None
    assert table.query_factors.tolist() == [np.float32(1 + 0.1 * math.log1p(place // 64)) for place in range(512)]


@pytest.mark.usefixtures("only_doubles")
def test_bases_and_factors_need_no_other_functions() -> None:
    exact = Decimal(10000) * Decimal(4) ** (Decimal(64) / Decimal(62))
    assert stretch_base(1e4, 4.0, 64) == pytest.approx(float(exact), rel=1e-15)
    factors = llama3_factors(inverse_frequencies(64, 1e4), 8.0, 8192, low=1.0, high=4.0)
    assert (factors[0], factors[-1]) == (1.0, 8.0)


@pytest.mark.usefixtures("only_doubles")
def test_exponents_of_blocks_are_exact() -> None:
    powers = np.ldexp(np.float32(1), np.arange(-120, 120)).astype(np.float32)
    for factor, octave in ((1.0, 0), (np.nextafter(np.float32(2), np.float32(0)), 0), (1.5, 0)):
        blocks = encode_mxfp4(np.repeat((powers * np.float32(factor))[:, None], 32, axis=1))
        assert blocks[:, 0].tolist() == [exponent + octave + 125 for exponent in range(-120, 120)]
    assert encode_mxfp4(np.zeros((1, 32), np.float32))[0, 0] == 0
