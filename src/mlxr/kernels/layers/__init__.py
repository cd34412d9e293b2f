"""Transformer layers as one operator: self-attention and feed-forward blocks around the residual stream.

A layer is the list of its `operators`. The reference calls them one by one. The CPU has a native implementation, which
computes the same bits: it saves about 200 returns to Python per token, before each of which the interpreter's code and
data have left the caches, and the waiting of threads.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlxr.kernels.checks import check_size
from mlxr.kernels.choice import Choice
from mlxr.kernels.context import Context
from mlxr.kernels.layers import cpu, reference
from mlxr.kernels.layers.operators import Layer, Layers, NormWeight, StepInput
from mlxr.kernels.tensor import FloatArray

__all__ = ["Layer", "Layers", "NormWeight", "StepInput", "prepare_layers", "run_layers"]

_GPU = f"{__name__}.gpu"
PREPARE = Choice("layers", reference.prepare, cpu.prepare, _GPU, "prepare")
RUN = Choice("layers", reference.run_layers, cpu.run_layers, _GPU, "run_layers")


def prepare_layers(ctx: Context, layers: Sequence[Layer]) -> Layers:
    """Return layers, whose weights were prepared for `linear`, as one object to run."""
    _, implementation = PREPARE.pick(ctx.device)
    return Layers(tuple(layers), implementation(ctx, tuple(layers)))


def run_layers(
    ctx: Context, stream: FloatArray, layers: Layers, step: StepInput
) -> tuple[FloatArray, FloatArray | None]:
    """Run all layers on the residual stream (T, hidden), writing the batch's keys and values into the step's pools.

    Returns the stream and the delta of the last layer, which the following norm adds to it (None if there is no layer,
    or if the last one has added it itself). The memory of `stream` may be overwritten. Raises ValueError for shapes
    that do not fit, and, before anything is computed, for positions that the tables do not cover and for slots and
    pages outside the pools.
    """
    check_size("run_layers", "number of k_pools", len(step.k_pools), len(layers.layers))
    check_size("run_layers", "number of v_pools", len(step.v_pools), len(layers.layers))
    _, implementation = RUN.pick(ctx.device)
    return implementation(ctx, stream, layers, step)
