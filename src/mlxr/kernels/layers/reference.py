"""Layers as the sequence of their operators: the meaning, on any device."""

from __future__ import annotations

from collections.abc import Sequence

from mlxr.kernels.activate import activate
from mlxr.kernels.attend import attend
from mlxr.kernels.context import Context
from mlxr.kernels.layers.block import AttentionBlock, FeedForwardBlock, Layer, Layers
from mlxr.kernels.linear import linear
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.rms_norm import rms_norm
from mlxr.kernels.rope import RopeTable
from mlxr.kernels.split_heads import HeadNorms, split_heads
from mlxr.kernels.tensor import FloatArray, PoolArray


def prepare(_ctx: Context, layers: tuple[Layer, ...]) -> None:
    """Do nothing: the reference uses the layers as they are."""


def run_layers(
    ctx: Context,
    stream: FloatArray,
    layers: Layers,
    batch: RaggedBatch,
    table: RopeTable,
    k_pools: Sequence[PoolArray],
    v_pools: Sequence[PoolArray],
) -> tuple[FloatArray, FloatArray | None]:
    """Block after block, operator after operator."""
    delta: FloatArray | None = None
    for layer, k_pool, v_pool in zip(layers.layers, k_pools, v_pools, strict=True):
        stream, delta = run_layer(ctx, stream, delta, layer, batch, table, k_pool, v_pool)
    return stream, delta


def run_layer(
    ctx: Context,
    stream: FloatArray,
    delta: FloatArray | None,
    layer: Layer,
    batch: RaggedBatch,
    table: RopeTable,
    k_pool: PoolArray,
    v_pool: PoolArray,
) -> tuple[FloatArray, FloatArray]:
    """One layer over stream + delta: the stream, and what the layer's last product adds to it."""
    stream, delta = _attend(ctx, stream, delta, layer.attention, batch, table, k_pool, v_pool)
    return _feed_forward(ctx, stream, delta, layer.feed_forward)


def _attend(
    ctx: Context,
    stream: FloatArray,
    delta: FloatArray | None,
    block: AttentionBlock,
    batch: RaggedBatch,
    table: RopeTable,
    k_pool: PoolArray,
    v_pool: PoolArray,
) -> tuple[FloatArray, FloatArray]:
    """Self-attention: stream + delta, and what the block adds to it."""
    batch = batch.of_group(block.group)
    normed, stream = rms_norm(ctx, stream, block.norm, block.eps, delta)
    qkv = linear(ctx, normed, block.qkv)
    norms = None
    if block.q_norm is not None and block.k_norm is not None:
        norms = HeadNorms(block.q_norm, block.k_norm, block.eps)
    q = split_heads(ctx, qkv, block.heads, batch, table, k_pool, v_pool, norms)
    attended = attend(ctx, q, k_pool, v_pool, batch, scale=block.scale, sliding_window=block.sliding_window)
    return stream, linear(ctx, attended, block.output)


def _feed_forward(
    ctx: Context, stream: FloatArray, delta: FloatArray | None, block: FeedForwardBlock
) -> tuple[FloatArray, FloatArray]:
    normed, stream = rms_norm(ctx, stream, block.norm, block.eps, delta)
    gate_up = linear(ctx, normed, block.gate_up)
    return stream, linear(ctx, activate(ctx, gate_up, block.activation), block.down)
