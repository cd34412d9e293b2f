"""Transformer layers as one operator: each is self-attention (norm, Q K V, rotation, pages, attention, output) and
feed-forward (norm, gate and up, activation, down), both around the residual stream.

The reference calls the operators one by one. An implementation of its own computes the same bits and saves what lies
between them: on the CPU the way to Python and back some 200 times a token, after each of which nothing of the
interpreter is left in the caches, and the waiting of threads.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlxr.kernels.activate import ACTIVATIONS, Activation
from mlxr.kernels.checks import check_floats, check_size, refuse
from mlxr.kernels.choice import Choice
from mlxr.kernels.context import Context
from mlxr.kernels.layers.block import AttentionBlock, FeedForwardBlock, Layer, Layers
from mlxr.kernels.linear import LinearWeight
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.rope import RopeTable
from mlxr.kernels.tensor import FloatArray, PoolArray

__all__ = [
    "AttentionBlock",
    "FeedForwardBlock",
    "Layer",
    "Layers",
    "make_attention",
    "make_feed_forward",
    "prepare_layers",
    "run_layers",
]

CHOICE = Choice(__name__)


def make_attention(
    norm: FloatArray,
    eps: float,
    qkv: LinearWeight,
    output: LinearWeight,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    head_norms: tuple[FloatArray, FloatArray] | None = None,
    sliding_window: int | None = None,
    group: int = 0,
) -> AttentionBlock:
    """Weights that were prepared for `linear`, as one block. Raises ValueError for shapes that do not fit."""
    check_floats("self_attention", "norm", norm, 1)
    check_size("self_attention", "length of norm", norm.shape[0], qkv.in_features)
    check_size("self_attention", "columns of qkv", qkv.out_features, (heads + 2 * kv_heads) * head_dim)
    check_size("self_attention", "in_features of output", output.in_features, heads * head_dim)
    check_size("self_attention", "columns of output", output.out_features, qkv.in_features)
    for head_norm in head_norms or ():
        check_floats("self_attention", "a norm of heads", head_norm, 1)
        check_size("self_attention", "length of a norm of heads", head_norm.shape[0], head_dim)
    if kv_heads < 1 or heads % kv_heads:
        refuse("self_attention", "heads", heads, f"a multiple of the {kv_heads} key heads")
    if sliding_window is not None and sliding_window < 1:
        refuse("self_attention", "sliding_window", sliding_window, "at least 1")
    q_norm, k_norm = head_norms or (None, None)
    return AttentionBlock(norm, eps, qkv, q_norm, k_norm, output, heads, kv_heads, head_dim, sliding_window, group)


def make_feed_forward(
    norm: FloatArray, eps: float, gate_up: LinearWeight, down: LinearWeight, activation: Activation
) -> FeedForwardBlock:
    """Weights that were prepared for `linear`, as one block. Raises ValueError for shapes that do not fit."""
    check_floats("feed_forward", "norm", norm, 1)
    check_size("feed_forward", "length of norm", norm.shape[0], gate_up.in_features)
    check_size("feed_forward", "columns of gate_up", gate_up.out_features, 2 * down.in_features)
    check_size("feed_forward", "columns of down", down.out_features, gate_up.in_features)
    if activation not in ACTIVATIONS:
        refuse("feed_forward", "activation", repr(activation), f"one of {', '.join(ACTIVATIONS)}")
    return FeedForwardBlock(norm, eps, gate_up, down, activation)


def prepare_layers(ctx: Context, layers: Sequence[Layer]) -> Layers:
    """Layers whose weights were prepared for `linear`, to be run as one."""
    _, implementation = CHOICE.pick(ctx.device)
    return Layers(tuple(layers), implementation.prepare(ctx, tuple(layers)))


def run_layers(
    ctx: Context,
    stream: FloatArray,
    layers: Layers,
    batch: RaggedBatch,
    table: RopeTable,
    k_pools: Sequence[PoolArray],
    v_pools: Sequence[PoolArray],
) -> tuple[FloatArray, FloatArray | None]:
    """All layers over the residual stream (T, hidden); keys and values of the batch go into the pools, two per layer.

    Returns the stream and what the last layer adds to it, which is left to the norm that follows (None when there is no
    layer). `stream` is taken over: its memory may be written. Raises ValueError for shapes that do not fit, and before
    anything is computed for positions that the table does not cover and for slots and pages outside the pools.
    """
    check_size("run_layers", "number of k_pools", len(k_pools), len(layers.layers))
    check_size("run_layers", "number of v_pools", len(v_pools), len(layers.layers))
    _, implementation = CHOICE.pick(ctx.device)
    result: tuple[FloatArray, FloatArray | None] = implementation.run_layers(
        ctx, stream, layers, batch, table, k_pools, v_pools
    )
    return result
