"""Self-attention of a layer as one operator: norm, Q K V, rotation, pages, attention, output projection.

The same operators in the same order as its reference, which calls them one by one, and the same bits; an implementation
of its own saves what lies between them. What a block adds to the residual stream is handed to the next block's norm,
which adds it: `delta`.
"""

from __future__ import annotations

from mlxr.kernels.checks import check_floats, check_pools, check_size, refuse
from mlxr.kernels.choice import Choice
from mlxr.kernels.context import Context
from mlxr.kernels.linear import LinearWeight
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.rope import RopeTable
from mlxr.kernels.self_attention.block import AttentionBlock
from mlxr.kernels.tensor import FloatArray, PoolArray

__all__ = ["AttentionBlock", "prepare_attention", "self_attention"]

CHOICE = Choice(__name__)


def prepare_attention(
    ctx: Context,
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
    block = AttentionBlock(norm, eps, qkv, q_norm, k_norm, output, heads, kv_heads, head_dim, sliding_window)
    _, implementation = CHOICE.pick(ctx.device)
    result: AttentionBlock = implementation.prepare(ctx, block)
    return result


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
    """stream + delta (T, hidden), and what the block adds to it; keys and values of the batch go into the pools.

    `delta` is what the block before adds, None for nothing. Inputs are left as they are. Raises ValueError for shapes
    that do not fit, and before anything is computed for positions that the table does not cover, slots and pages
    outside the pools.
    """
    check_pools("self_attention", k_pool, v_pool)
    _, implementation = CHOICE.pick(ctx.device)
    result: tuple[FloatArray, FloatArray] = implementation.self_attention(
        ctx, stream, delta, block, batch, table, k_pool, v_pool
    )
    return result
