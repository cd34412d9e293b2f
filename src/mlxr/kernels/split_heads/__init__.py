"""From the fused projection to heads: norm them, rotate them, write keys and values into their pages, give the queries.

Values may be the keys as they were projected, and a layer that reads the cache of another one projects queries alone.
On the CPU these are the operators `rms_norm`, `rope` and `write_pages` one after another; a GPU does all in one launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from mlxr.kernels.checks import check_floats, check_pools, check_size, refuse
from mlxr.kernels.choice import Choice
from mlxr.kernels.context import Context
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.rope import RopeTable
from mlxr.kernels.tensor import FloatArray, PoolArray, pool_head_dim

__all__ = ["PROJECTED", "HeadNormKind", "HeadNorms", "Projected", "split_heads"]

Projected = Literal["qkv", "qk", "q"]
PROJECTED: tuple[str, ...] = get_args(Projected)
HeadNormKind = Literal["each", "joint", "layer"]

CHOICE = Choice(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorms:
    """Weights by which queries and keys are normed, with `eps` as in `rms_norm`.

    Of the kind "each", weights (head_dim,) norm every head by itself. Those of other kinds are as long as all heads:
    "joint" norms these as one row, and "layer" gives each head a layer norm with a weight of its own. With `values`
    every value head is normed, too, without a weight, as "each" does.
    """

    q: FloatArray
    k: FloatArray
    eps: float
    values: bool = False
    kind: HeadNormKind = "each"

    def check(self, heads: int, kv_heads: int, head_dim: int) -> None:
        """Raise ValueError for weights that do not fit the heads."""
        for name, weight, count in (("q", self.q, heads), ("k", self.k, kv_heads)):
            check_floats("split_heads", f"norm of {name}", weight, 1)
            wanted = head_dim if self.kind == "each" else count * head_dim
            check_size("split_heads", f"length of the norm of {name}", weight.shape[0], wanted)


def split_heads(
    ctx: Context,
    qkv: FloatArray,
    heads: int,
    batch: RaggedBatch,
    table: RopeTable,
    k_pool: PoolArray,
    v_pool: PoolArray,
    norms: HeadNorms | None = None,
    *,
    projected: Projected = "qkv",
) -> FloatArray:
    """The rotated queries (T, heads, head_dim) of qkv (T, (heads + 2 * kv_heads) * head_dim); K and V go to the pools.

    Key heads and head_dim are those of the pools. What is `projected` says what qkv holds: of "qk" the values are the
    keys before these are normed and rotated; of "q" nothing is written. Raises ValueError for positions beyond
    the table and for slots outside the pools.
    """
    check_floats("split_heads", "qkv", qkv, 2)
    check_pools("split_heads", k_pool, v_pool)
    kv_heads, head_dim = k_pool.shape[1], pool_head_dim(k_pool)
    check_size("split_heads", "rows of qkv", qkv.shape[0], batch.tokens)
    if projected not in PROJECTED:
        refuse("split_heads", "projected", repr(projected), f"one of {', '.join(PROJECTED)}")
    columns = (heads + (len(projected) - 1) * kv_heads) * head_dim
    check_size("split_heads", "columns of qkv", qkv.shape[1], columns)
    if norms is not None:
        norms.check(heads, kv_heads, head_dim)
    if table.rot_dim > head_dim:
        refuse("split_heads", "rot_dim of table", table.rot_dim, f"at most the head_dim {head_dim}")
    _, implementation = CHOICE.pick(ctx.device)
    queries: FloatArray = implementation.split_heads(ctx, qkv, heads, batch, table, k_pool, v_pool, norms, projected)
    return queries
