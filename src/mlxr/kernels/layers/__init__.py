"""Transformer layers as one operator: self-attention and feed-forward blocks around the residual stream.

A layer is the list of its `operators`. The reference calls them one by one. An implementation of its own computes
the same bits and saves what lies between them: on the CPU the way to Python and back some 200 times a token, after each
of which nothing of the interpreter is left in the caches, and the waiting of threads.
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
    """Layers whose weights were prepared for `linear`, to be run as one."""
    _, implementation = PREPARE.pick(ctx.device)
    return Layers(tuple(layers), implementation(ctx, tuple(layers)))


def run_layers(
    ctx: Context, stream: FloatArray, layers: Layers, step: StepInput
) -> tuple[FloatArray, FloatArray | None]:
    """All layers over the residual stream (T, hidden); keys and values of the batch go into the step's pools.

    Returns the stream and what the last layer adds to it, which is left to the norm that follows (None when there is no
    layer, or when it scales or norms its output). `stream` is taken over: its memory may be written. Raises ValueError
    for shapes that do not fit, and before anything is computed for positions that the tables do not cover and for slots
    and pages outside the pools.
    """
    check_size("run_layers", "number of k_pools", len(step.k_pools), len(layers.layers))
    check_size("run_layers", "number of v_pools", len(step.v_pools), len(layers.layers))
    _, implementation = RUN.pick(ctx.device)
    return implementation(ctx, stream, layers, step)
