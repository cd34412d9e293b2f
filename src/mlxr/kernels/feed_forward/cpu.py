"""Native `feed_forward`: csrc/blocks.cpp runs all its operators in one call. The payload is the native block."""

from __future__ import annotations

from dataclasses import replace

from mlxr.kernels.buffers import empty
from mlxr.kernels.context import Context
from mlxr.kernels.feed_forward.block import FeedForwardBlock
from mlxr.kernels.ledger import Part
from mlxr.kernels.tensor import FloatArray

_NAME = "cpu"


def prepare(ctx: Context, block: FeedForwardBlock) -> FeedForwardBlock:
    """The block with its native twin."""
    payload = ctx.module.FeedForwardBlock(
        block.norm, block.eps, block.gate_up.payload, block.down.payload, block.activation
    )
    return replace(block, payload=payload)


def feed_forward(
    ctx: Context, stream: FloatArray, delta: FloatArray | None, block: FeedForwardBlock
) -> tuple[FloatArray, FloatArray]:
    """One call; the ledger counts the operators in it."""
    out = empty(ctx, *stream.shape)
    summed = stream if delta is None else empty(ctx, *stream.shape)
    ctx.module.feed_forward(ctx.native, block.payload, stream, delta, summed, out)
    ctx.ledger.count_parts(_list_parts, block.gate_up.variant, block.down.variant, block.activation, delta is not None)
    return summed, out


def _list_parts(gate_up: str, down: str, activation: str, has_delta: bool) -> list[Part]:
    return [
        ("rms_norm", _NAME, "f32+residual" if has_delta else "f32"),
        ("linear", _NAME, gate_up),
        ("activate", _NAME, activation),
        ("linear", _NAME, down),
    ]
