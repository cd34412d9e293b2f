"""Native `self_attention`: csrc/blocks.cpp runs all its operators in one call. The payload is the native block."""

from __future__ import annotations

from dataclasses import replace

from mlxr.kernels.buffers import empty
from mlxr.kernels.context import Context
from mlxr.kernels.ledger import Part
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.rope import RopeTable
from mlxr.kernels.self_attention.block import AttentionBlock
from mlxr.kernels.tensor import FloatArray, PoolArray, pool_type

_NAME = "cpu"
_NO_WINDOW = 0


def prepare(ctx: Context, block: AttentionBlock) -> AttentionBlock:
    """The block with its native twin."""
    payload = ctx.module.AttentionBlock(
        block.norm,
        block.eps,
        block.qkv.payload,
        block.q_norm,
        block.k_norm,
        block.output.payload,
        block.heads,
        block.kv_heads,
        block.head_dim,
        block.scale,
        block.sliding_window or _NO_WINDOW,
    )
    return replace(block, payload=payload)


def self_attention(
    ctx: Context,
    stream: FloatArray,
    delta: FloatArray | None,
    block: AttentionBlock,
    batch: RaggedBatch,
    table: RopeTable,
    k_pool: PoolArray,
    v_pool: PoolArray,
) -> tuple[FloatArray, FloatArray]:
    """One call; the ledger counts the operators in it."""
    out = empty(ctx, *stream.shape)
    summed = stream if delta is None else empty(ctx, *stream.shape)
    ctx.module.self_attention(
        ctx.native,
        block.payload,
        stream,
        delta,
        batch.positions,
        table.cos,
        table.sin,
        table.interleaved,
        k_pool,
        v_pool,
        batch.slots,
        batch.query_starts,
        batch.context_lengths,
        batch.page_table,
        summed,
        out,
    )
    window = "" if block.sliding_window is None else "+window"
    weights, norms_heads = (block.qkv.variant, block.output.variant), block.q_norm is not None
    ctx.ledger.count_parts(
        _list_parts, weights, norms_heads, delta is not None, table.interleaved, pool_type(k_pool), window
    )
    return summed, out


def _list_parts(
    weights: tuple[str, str], norms_heads: bool, has_delta: bool, interleaved: bool, kv_type: str, window: str
) -> list[Part]:
    heads = [("rms_norm", _NAME, "f32")] if norms_heads else []
    return [
        ("rms_norm", _NAME, "f32+residual" if has_delta else "f32"),
        ("linear", _NAME, weights[0]),
        *[*heads, ("rope", _NAME, "interleaved" if interleaved else "halves")] * 2,
        ("write_pages", _NAME, kv_type),
        ("attend", _NAME, kv_type + window),
        ("linear", _NAME, weights[1]),
    ]
