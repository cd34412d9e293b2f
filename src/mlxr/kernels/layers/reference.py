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
from mlxr.kernels.rope import RopeTable, rope
from mlxr.kernels.tensor import FloatArray, PoolArray
from mlxr.kernels.write_pages import write_pages


def prepare(_ctx: Context, layers: tuple[Layer, ...]) -> None:
    """Nothing to prepare."""


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
        stream, delta = _attend(ctx, stream, delta, layer.attention, batch, table, k_pool, v_pool)
        stream, delta = _feed_forward(ctx, stream, delta, layer.feed_forward)
    return stream, delta


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
    normed, stream = rms_norm(ctx, stream, block.norm, block.eps, delta)
    qkv = linear(ctx, normed, block.qkv)
    q_end, k_end = block.heads * block.head_dim, (block.heads + block.kv_heads) * block.head_dim
    # views: the operators take a free token stride
    q = qkv[:, :q_end].reshape(-1, block.heads, block.head_dim)
    k = qkv[:, q_end:k_end].reshape(-1, block.kv_heads, block.head_dim)
    v = qkv[:, k_end:].reshape(-1, block.kv_heads, block.head_dim)
    if block.q_norm is not None and block.k_norm is not None:
        q = _norm_heads(ctx, q, block.q_norm, block.eps)
        k = _norm_heads(ctx, k, block.k_norm, block.eps)
    rope(ctx, q, batch.positions, table)
    rope(ctx, k, batch.positions, table)
    write_pages(ctx, k, v, k_pool, v_pool, batch.slots)
    attended = attend(ctx, q, k_pool, v_pool, batch, scale=block.scale, sliding_window=block.sliding_window)
    return stream, linear(ctx, attended, block.output)


def _norm_heads(ctx: Context, x: FloatArray, weight: FloatArray, eps: float) -> FloatArray:
    normed, _ = rms_norm(ctx, x.reshape(-1, x.shape[2]), weight, eps)
    return normed.reshape(x.shape)


def _feed_forward(
    ctx: Context, stream: FloatArray, delta: FloatArray | None, block: FeedForwardBlock
) -> tuple[FloatArray, FloatArray]:
    normed, stream = rms_norm(ctx, stream, block.norm, block.eps, delta)
    gate_up = linear(ctx, normed, block.gate_up)
    return stream, linear(ctx, activate(ctx, gate_up, block.activation), block.down)
