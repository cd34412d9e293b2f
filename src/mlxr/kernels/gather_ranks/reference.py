"""NumPy reference of `gather_ranks`, which defines its numbers: there is one rank where NumPy computes."""

# ruff: noqa: ARG001 -- every implementation takes the context
from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlxr.kernels.context import Context
from mlxr.kernels.tensor import FloatArray


def gather_ranks(ctx: Context, x: FloatArray, columns: tuple[int, ...]) -> FloatArray:
    """Return the columns of the only rank unchanged."""
    return join([x])


def join(parts: Sequence[FloatArray]) -> FloatArray:
    """Join the columns of all ranks, in their order."""
    return np.concatenate(parts, axis=1)
