"""Reference of `split_heads`: one operator after another, each as its device runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlxr.kernels.context import Context
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.rms_norm import rms_norm
from mlxr.kernels.rope import RopeTable, rope
from mlxr.kernels.tensor import FloatArray, PoolArray, pool_head_dim
from mlxr.kernels.write_pages import write_pages

if TYPE_CHECKING:
    from mlxr.kernels.split_heads import HeadNorms


def split_heads(
    ctx: Context,
    qkv: FloatArray,
    heads: int,
    batch: RaggedBatch,
    table: RopeTable,
    k_pool: PoolArray,
    v_pool: PoolArray,
    norms: HeadNorms | None,
) -> FloatArray:
    """Slices of qkv are views, which the operators take with a free token stride."""
    kv_heads, head_dim = k_pool.shape[1], pool_head_dim(k_pool)
    q_end, k_end = heads * head_dim, (heads + kv_heads) * head_dim
    q = qkv[:, :q_end].reshape(-1, heads, head_dim)
    k = qkv[:, q_end:k_end].reshape(-1, kv_heads, head_dim)
    v = qkv[:, k_end:].reshape(-1, kv_heads, head_dim)
    if norms is not None:
        q = _norm(ctx, q, norms.q, norms.eps)
        k = _norm(ctx, k, norms.k, norms.eps)
    rope(ctx, q, batch.positions, table)
    rope(ctx, k, batch.positions, table)
    write_pages(ctx, k, v, k_pool, v_pool, batch.slots)
    return q


def _norm(ctx: Context, x: FloatArray, weight: FloatArray, eps: float) -> FloatArray:
    normed, _ = rms_norm(ctx, x.reshape(-1, x.shape[2]), weight, eps)
    return normed.reshape(x.shape)
