"""The feed-forward block of a layer as one operator: norm, gate and up, activation, down.

The same operators in the same order as its reference, which calls them one by one, and the same bits. What a block adds
to the residual stream is handed to the next block's norm, which adds it: `delta`.
"""

from __future__ import annotations

from mlxr.kernels.activate import ACTIVATIONS, Activation
from mlxr.kernels.checks import check_floats, check_size, refuse
from mlxr.kernels.choice import Choice
from mlxr.kernels.context import Context
from mlxr.kernels.feed_forward.block import FeedForwardBlock
from mlxr.kernels.linear import LinearWeight
from mlxr.kernels.tensor import FloatArray

__all__ = ["FeedForwardBlock", "feed_forward", "prepare_feed_forward"]

CHOICE = Choice(__name__)


def prepare_feed_forward(
    ctx: Context, norm: FloatArray, eps: float, gate_up: LinearWeight, down: LinearWeight, activation: Activation
) -> FeedForwardBlock:
    """Weights that were prepared for `linear`, as one block. Raises ValueError for shapes that do not fit."""
    check_floats("feed_forward", "norm", norm, 1)
    check_size("feed_forward", "length of norm", norm.shape[0], gate_up.in_features)
    check_size("feed_forward", "columns of gate_up", gate_up.out_features, 2 * down.in_features)
    check_size("feed_forward", "columns of down", down.out_features, gate_up.in_features)
    if activation not in ACTIVATIONS:
        refuse("feed_forward", "activation", repr(activation), f"one of {', '.join(ACTIVATIONS)}")
    _, implementation = CHOICE.pick(ctx.device)
    result: FeedForwardBlock = implementation.prepare(ctx, FeedForwardBlock(norm, eps, gate_up, down, activation))
    return result


def feed_forward(
    ctx: Context, stream: FloatArray, delta: FloatArray | None, block: FeedForwardBlock
) -> tuple[FloatArray, FloatArray]:
    """stream + delta (T, hidden), and what the block adds to it. `delta` is what the block before adds, None for
    nothing. Inputs are left as they are. Raises ValueError for shapes that do not fit."""
    _, implementation = CHOICE.pick(ctx.device)
    result: tuple[FloatArray, FloatArray] = implementation.feed_forward(ctx, stream, delta, block)
    return result
