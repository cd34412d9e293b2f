"""NumPy reference of `sum_ranks`, which defines its numbers: there is one rank where NumPy computes."""

# ruff: noqa: ARG001 -- every implementation takes the context
from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlxr.kernels.context import Context
from mlxr.kernels.tensor import FloatArray


def sum_ranks(ctx: Context, x: FloatArray) -> FloatArray:
    """Return the part of the only rank unchanged."""
    return add_up([x])


def add_up(parts: Sequence[FloatArray]) -> FloatArray:
    """The sum of what the ranks have, by rank, in f32."""
    total = np.zeros_like(parts[0])
    for number, part in enumerate(parts):
        total = part if number == 0 else total + part
    return total
