"""`run_layers` on a GPU: the operators one after another, which leave to each other what one launch can do for two.

A step of single tokens is recorded as a whole (`mlxr.kernels.gpu.graph`), so a call per operator costs nothing when it
is replayed. In other steps the device starts on the first layers while the host still names the launches of the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlxr.kernels.context import Context
from mlxr.kernels.gpu.pool import Pool
from mlxr.kernels.layers.block import Layers
from mlxr.kernels.layers.reference import prepare, run_layer
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.rope import RopeTable

__all__ = ["prepare", "run_layers"]

START_LAYERS = 1  # layers after which the device is told to start on them


def run_layers(
    ctx: Context,
    stream: Any,
    layers: Layers,
    batch: RaggedBatch,
    table: RopeTable,
    k_pools: Sequence[Pool],
    v_pools: Sequence[Pool],
) -> tuple[Any, Any]:
    """Layer after layer."""
    delta: Any = None
    for index, (layer, k_pool, v_pool) in enumerate(zip(layers.layers, k_pools, v_pools, strict=True), 1):
        stream, delta = run_layer(ctx, stream, delta, layer, batch, table, k_pool, v_pool)
        if index % START_LAYERS == 0:
            ctx.gpu.start(stream, delta)
    return stream, delta
