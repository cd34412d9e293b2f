"""Native `run_layers`: csrc/blocks.cpp runs all operators of all layers in one call. The payload is a native object."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mlxr.kernels.buffers import empty
from mlxr.kernels.context import Context
from mlxr.kernels.layers.block import Layer, Layers
from mlxr.kernels.ledger import Part
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.rope import RopeTable
from mlxr.kernels.tensor import FloatArray, PoolArray, pool_type

_NAME = "cpu"
_NO_WINDOW = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Payload:
    """The native twin of the layers, and the operators that a run of them counts as."""

    native: Any
    counted: Counted


class Counted:
    """The operators in layers, by their names only, for the ledger: it may outlive the weights."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = [
            (
                layer.attention.qkv.variant,
                layer.attention.output.variant,
                layer.attention.q_norm is not None,
                "" if layer.attention.sliding_window is None else "+window",
                layer.feed_forward.gate_up.variant,
                layer.feed_forward.down.variant,
                layer.feed_forward.activation,
            )
            for layer in layers
        ]

    def list_parts(self, interleaved: bool, kv_type: str) -> Iterator[Part]:
        """All operators of one run."""
        turn = ("rope", _NAME, "interleaved" if interleaved else "halves")
        plain_norm = norm = ("rms_norm", _NAME, "f32")
        for qkv, output, norms_heads, window, gate_up, down, activation in self._layers:
            heads = [plain_norm, turn] if norms_heads else [turn]
            yield from (norm, ("linear", _NAME, qkv), *heads, *heads)
            norm_added = ("rms_norm", _NAME, "f32+residual")
            yield from (("write_pages", _NAME, kv_type), ("attend", _NAME, kv_type + window))
            yield from (("linear", _NAME, output), norm_added, ("linear", _NAME, gate_up))
            yield from (("activate", _NAME, activation), ("linear", _NAME, down))
            norm = norm_added


def prepare(ctx: Context, layers: tuple[Layer, ...]) -> _Payload:
    """The native twin of `layers`, which it keeps alive."""
    native = ctx.module.Layers()
    for layer in layers:
        attention, feed_forward = layer.attention, layer.feed_forward
        native.append_attention(
            attention.norm,
            attention.eps,
            attention.qkv.payload,
            attention.q_norm,
            attention.k_norm,
            attention.output.payload,
            attention.heads,
            attention.kv_heads,
            attention.head_dim,
            attention.scale,
            attention.sliding_window or _NO_WINDOW,
            attention.group,
        )
        native.append_feed_forward(
            feed_forward.norm,
            feed_forward.eps,
            feed_forward.gate_up.payload,
            feed_forward.down.payload,
            feed_forward.activation,
        )
    return _Payload(native, Counted(layers))


def run_layers(
    ctx: Context,
    stream: FloatArray,
    layers: Layers,
    batch: RaggedBatch,
    table: RopeTable,
    k_pools: Sequence[PoolArray],
    v_pools: Sequence[PoolArray],
) -> tuple[FloatArray, FloatArray | None]:
    """One call, in place; the ledger counts the operators in it."""
    if not layers.layers:
        return stream, None
    delta = empty(ctx, *stream.shape)
    ctx.module.run_layers(
        ctx.native,
        layers.payload.native,
        stream,
        delta,
        k_pools,
        v_pools,
        batch.positions,
        table.cos,
        table.sin,
        table.interleaved,
        [part.slots for part in batch.groups],
        batch.query_starts,
        batch.context_lengths,
        [part.page_table for part in batch.groups],
    )
    ctx.ledger.count_parts(layers.payload.counted.list_parts, table.interleaved, pool_type(k_pools[0]))
    return stream, delta
