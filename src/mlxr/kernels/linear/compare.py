"""How right the products of a prepared weight are, and how much rounding may move them: for `mlxr validate`."""

from __future__ import annotations

import numpy as np

from mlxr.kernels.context import Context
from mlxr.kernels.linear import LinearWeight, linear
from mlxr.kernels.rows import fetch_rows, place_rows

PROBES = 4


def compare_products(ctx: Context, weight: LinearWeight, reference_ctx: Context, reference: LinearWeight) -> float:
    """The largest error of an output of `weight`, relative to the outputs' root mean square, for inputs of 1 and -1.

    Such inputs are exact in every format that activations are rounded to. `reference` is the same weight, prepared for
    the reference backend.
    """
    signs = np.random.default_rng(1).choice(np.array([-1, 1], np.float32), (PROBES, weight.in_features))
    outputs = fetch_rows(ctx, linear(ctx, place_rows(ctx, signs), weight))
    wanted = linear(reference_ctx, signs, reference)
    return float(np.abs(outputs - wanted).max() / np.sqrt((wanted**2).mean()))


def move_weight(weight: LinearWeight, size: float) -> None:
    """Change every number of a weight of the reference backend by a random part of it, of standard deviation `size`."""
    chance = np.random.default_rng(0)
    for row in weight.payload[0]:
        row *= 1 + size * chance.standard_normal(len(row), dtype=np.float32)
