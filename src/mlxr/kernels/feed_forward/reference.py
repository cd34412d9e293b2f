"""The feed-forward block as the sequence of its operators: the meaning, on any device."""

from __future__ import annotations

from mlxr.kernels.activate import activate
from mlxr.kernels.context import Context
from mlxr.kernels.feed_forward.block import FeedForwardBlock
from mlxr.kernels.linear import linear
from mlxr.kernels.rms_norm import rms_norm
from mlxr.kernels.tensor import FloatArray


def prepare(_ctx: Context, block: FeedForwardBlock) -> FeedForwardBlock:
    """Nothing to prepare."""
    return block


def feed_forward(
    ctx: Context, stream: FloatArray, delta: FloatArray | None, block: FeedForwardBlock
) -> tuple[FloatArray, FloatArray]:
    """The operators one by one."""
    normed, stream = rms_norm(ctx, stream, block.norm, block.eps, delta)
    gate_up = linear(ctx, normed, block.gate_up)
    return stream, linear(ctx, activate(ctx, gate_up, block.activation), block.down)
