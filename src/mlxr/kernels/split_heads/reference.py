"""Reference of `split_heads`: one operator after another, each as its device runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlxr.kernels.context import Context
from mlxr.kernels.layer_norm import layer_norm
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.rms_norm import rms_norm
from mlxr.kernels.rope import RopeTable, rope
from mlxr.kernels.tensor import FloatArray, PoolArray, pool_head_dim
from mlxr.kernels.write_pages import write_pages

if TYPE_CHECKING:
    from mlxr.kernels.split_heads import HeadNorms, Projected


def split_heads(
    ctx: Context,
    qkv: FloatArray,
    heads: int,
    batch: RaggedBatch,
    table: RopeTable,
    k_pool: PoolArray,
    v_pool: PoolArray,
    norms: HeadNorms | None,
    projected: Projected,
) -> FloatArray:
    """Slices of qkv are views, which the operators take with a free token stride."""
    kv_heads, head_dim = k_pool.shape[1], pool_head_dim(k_pool)
    parts = qkv.reshape(len(qkv), -1, head_dim)
    q, k, v = parts[:, :heads], parts[:, heads : heads + kv_heads], parts[:, heads + kv_heads :]
    if norms is not None:
        q = _norm(ctx, q, norms.q, norms)
    rope(ctx, q, batch.positions, table, queries=True)
    if projected == "q":
        return q
    if projected == "qk":
        v = k.copy() if norms is None else k  # what is not normed is rotated in place
    if norms is not None:
        k = _norm(ctx, k, norms.k, norms)
        if norms.values:
            v = _norm(ctx, v, None, norms)
    rope(ctx, k, batch.positions, table)
    write_pages(ctx, k, v, k_pool, v_pool, batch.slots)
    return q


def _norm(ctx: Context, x: FloatArray, weight: FloatArray | None, norms: HeadNorms) -> FloatArray:
    """Norm rows as long as the weight, or each head."""
    _, heads, head_dim = x.shape
    if weight is not None and norms.kind == "layer":
        normed, _ = layer_norm(ctx, x.reshape(-1, head_dim), weight.reshape(heads, head_dim), norms.eps)
    else:
        columns = head_dim if weight is None else weight.shape[0]
        normed, _ = rms_norm(ctx, x.reshape(-1, columns), weight, norms.eps)
    return normed.reshape(x.shape)
