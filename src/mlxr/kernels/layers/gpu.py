"""`run_layers` on a GPU: the operators one after another, which leave to each other what one launch can do for two.

A step of single tokens is recorded as a whole (`mlxr.kernels.gpu.graph`), so a call per operator costs nothing when it
is replayed. In other steps the device starts on the first layers while the host still names the launches of the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlxr.kernels.context import Context
from mlxr.kernels.gpu.device import MAX_STARTED
from mlxr.kernels.layers.block import Layer, Layers
from mlxr.kernels.layers.reference import run_layer
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.rope import RopeTable

START_LAYERS = 1  # layers after which the device is told to start on them
STREAM_BYTES = 4  # the residual stream is f32


def prepare(ctx: Context, layers: tuple[Layer, ...]) -> int:
    """Bytes that the arrays of one layer take for each token."""
    return max((count_token_bytes(layer, ctx.gpu.activations.size) for layer in layers), default=0)


def count_token_bytes(layer: Layer, number_bytes: int) -> int:
    """Bytes of all that a layer makes for one token: results of `number_bytes` each, and the stream twice."""
    attention, feed_forward = layer.attention, layer.feed_forward
    hidden, heads = attention.qkv.in_features, attention.output.in_features
    results = 2 * hidden + attention.qkv.out_features + 2 * heads + hidden  # normed twice, Q K V, Q, attended, output
    results += feed_forward.gate_up.out_features + feed_forward.down.in_features + hidden
    return results * number_bytes + 2 * hidden * STREAM_BYTES


def run_layers(
    ctx: Context,
    stream: Any,
    layers: Layers,
    batch: RaggedBatch,
    table: RopeTable,
    k_pools: Sequence[Any],
    v_pools: Sequence[Any],
) -> tuple[Any, Any]:
    """Layer after layer."""
    delta: Any = None
    ctx.gpu.workspace.cover(batch.tokens * layers.payload * START_LAYERS * (MAX_STARTED + 2))
    for index, (layer, k_pool, v_pool) in enumerate(zip(layers.layers, k_pools, v_pools, strict=True), 1):
        stream, delta = run_layer(ctx, stream, delta, layer, batch, table, k_pool, v_pool)
        if index % START_LAYERS == 0:
            ctx.gpu.start(stream, delta)
    return stream, delta
