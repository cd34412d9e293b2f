"""Which of the library's algorithms is taken."""

from __future__ import annotations

import math

import pytest

from mlxr.kernels.gpu.cuda_products import choose_first


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
