"""`run_layers` on a GPU: the operators one after another, which leave to each other what one launch can do for two.

A step of single tokens is recorded as a whole (`mlxr.kernels.gpu.graph`), so a call per operator costs nothing when it
is replayed. In other steps the device starts on the first layers while the host still names the launches of the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlxr.kernels.context import Context
from mlxr.kernels.gpu.device import MAX_STARTED
from mlxr.kernels.layers.block import Layer, Layers
from mlxr.kernels.layers.reference import run_layer
from mlxr.kernels.linear import LinearWeight
from mlxr.kernels.linear.parts import FLOATS
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.rope import RopeTable

START_LAYERS = 1  # layers after which the device is told to start on them
STREAM_BYTES = 4  # the residual stream is f32


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """Bytes for each token: of all arrays that one layer makes, and of those that it takes from the layer before."""

    layer: int
    before: int


def prepare(ctx: Context, layers: tuple[Layer, ...]) -> TokenBytes:
    """What steps of many tokens take."""
    gpu = ctx.gpu
    sizes = gpu.activations.size, gpu.operands.size
    most = max((count_layer_bytes(layer, *sizes, narrow=gpu.narrow) for layer in layers), default=0)
    hidden = max((layer.attention.qkv.in_features for layer in layers), default=0)
    return TokenBytes(most, hidden * (2 * STREAM_BYTES + gpu.activations.size))


def count_layer_bytes(layer: Layer, result_bytes: int, operand_bytes: int, *, narrow: bool) -> int:
    """Bytes of all that a layer makes for one token of a long prompt, its keys and values gathered for attention."""
    attention, feed_forward = layer.attention, layer.feed_forward
    hidden, heads = attention.qkv.in_features, attention.output.in_features
    cast = 2 if narrow else 4  # MLX multiplies and attends in 16 bits on a GPU
    made = 2 * hidden * (operand_bytes + STREAM_BYTES)  # both norms, and the stream
    for weight in (attention.qkv, attention.output, feed_forward.gate_up, feed_forward.down):
        made += count_product_bytes(weight, result_bytes, operand_bytes, cast)
    made += heads * (result_bytes + (cast if cast != result_bytes else 0))  # queries
    made += (attention.qkv.out_features - heads) * cast  # keys and values
    made += heads * (cast + (operand_bytes if cast != operand_bytes else 0))  # attended
    return made + feed_forward.down.in_features * operand_bytes


def count_product_bytes(weight: LinearWeight, result_bytes: int, operand_bytes: int, cast_bytes: int) -> int:
    """Bytes of all that a product of one of many rows makes: operands, parts of the result, and the result."""
    parts, _ = weight.payload
    made_bytes, operands = 0, 0
    for part in parts:
        is_float = part.type_name in FLOATS
        kind_bytes = part.upload.array.itemsize if is_float else cast_bytes
        operands += (0 if is_float and kind_bytes == operand_bytes else kind_bytes) * weight.in_features
        made_bytes += kind_bytes * part.rows
    joined_bytes = made_bytes if len(parts) > 1 else 0
    final_bytes = 0 if made_bytes == result_bytes * weight.out_features else result_bytes * weight.out_features
    return operands + made_bytes + joined_bytes + final_bytes


def run_layers(
    ctx: Context,
    stream: Any,
    layers: Layers,
    batch: RaggedBatch,
    table: RopeTable,
    k_pools: Sequence[Any],
    v_pools: Sequence[Any],
) -> tuple[Any, Any]:
    """Run the layers one after another on the GPU."""
    delta: Any = None
    if not ctx.gpu.is_recording:
        ahead = len(layers.layers) if ctx.gpu.is_traced else START_LAYERS * (MAX_STARTED + 1)
        layer_bytes, before_bytes = batch.tokens * layers.payload.layer, batch.tokens * layers.payload.before
        ctx.gpu.workspace.cover(ahead * layer_bytes + before_bytes, START_LAYERS * layer_bytes)
    for index, (layer, k_pool, v_pool) in enumerate(zip(layers.layers, k_pools, v_pools, strict=True), 1):
        stream, delta = run_layer(ctx, stream, delta, layer, batch, table, k_pool, v_pool)
        if index % START_LAYERS == 0:
            ctx.gpu.start(stream, delta)
    return stream, delta
