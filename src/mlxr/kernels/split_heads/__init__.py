"""From the fused projection to heads: norm them, rotate them, write keys and values into their pages, give the queries.

On the CPU these are the operators `rms_norm`, `rope` and `write_pages` one after another; a GPU does all in one launch.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlxr.kernels.checks import check_floats, check_pools, check_size, refuse
from mlxr.kernels.choice import Choice
from mlxr.kernels.context import Context
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.rope import RopeTable
from mlxr.kernels.tensor import FloatArray, PoolArray, pool_head_dim, pool_type

__all__ = ["HeadNorms", "split_heads"]

CHOICE = Choice(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorms:
    """Weights (head_dim,) by which every query and every key head is normed, with `eps` as in `rms_norm`."""

    q: FloatArray
    k: FloatArray
    eps: float


def split_heads(
    ctx: Context,
    qkv: FloatArray,
    heads: int,
    batch: RaggedBatch,
    table: RopeTable,
    k_pool: PoolArray,
    v_pool: PoolArray,
    norms: HeadNorms | None = None,
) -> FloatArray:
    """The rotated queries (T, heads, head_dim) of qkv (T, (heads + 2 * kv_heads) * head_dim); K and V go to the pools.

    Key heads and head_dim are those of the pools. Raises ValueError for positions beyond the table and for slots
    outside the pools.
    """
    check_floats("split_heads", "qkv", qkv, 2)
    check_pools("split_heads", k_pool, v_pool)
    kv_heads, head_dim = k_pool.shape[1], pool_head_dim(k_pool)
    check_size("split_heads", "rows of qkv", qkv.shape[0], batch.tokens)
    check_size("split_heads", "columns of qkv", qkv.shape[1], (heads + 2 * kv_heads) * head_dim)
    if table.rot_dim > head_dim:
        refuse("split_heads", "rot_dim of table", table.rot_dim, f"at most the head_dim {head_dim}")
    name, implementation = CHOICE.pick(ctx.device)
    if name == "gpu":  # elsewhere the parts count themselves
        ctx.ledger.count("split_heads", name, pool_type(k_pool))
    queries: FloatArray = implementation.split_heads(ctx, qkv, heads, batch, table, k_pool, v_pool, norms)
    return queries
