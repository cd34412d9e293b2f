"""Write new keys and values into their slots of the page pools."""

from __future__ import annotations

from mlxr.kernels.checks import check_heads, check_ints, check_pools, refuse
from mlxr.kernels.choice import REFERENCE, Choice
from mlxr.kernels.context import Context
from mlxr.kernels.tensor import FloatArray, IntArray, PoolArray, pool_head_dim, pool_type

__all__ = ["write_pages"]

CHOICE = Choice(__name__)


def write_pages(
    ctx: Context, k: FloatArray, v: FloatArray, k_pool: PoolArray, v_pool: PoolArray, slots: IntArray
) -> None:
    """Write k and v (T, kv_heads, head_dim) into slot `slots[t]` = page * page_size + offset of the pools.

    k and v may be views with a free token stride. Pools are (pages, kv_heads, page_size, head_dim), bf16, f16, f32 or
    q8; values are rounded to nearest even. Raises ValueError for a slot outside the pools, before anything is written.
    """
    check_heads("write_pages", "k", k)
    check_heads("write_pages", "v", v)
    check_ints("write_pages", "slots", slots)
    check_pools("write_pages", k_pool, v_pool)
    wanted = (slots.shape[0], k_pool.shape[1], pool_head_dim(k_pool))
    if k.shape != wanted or v.shape != wanted:
        refuse("write_pages", "k and v", f"of shapes {k.shape} and {v.shape}", f"{wanted} for these pools and slots")
    name, implementation = CHOICE.pick(ctx.device)
    if name == REFERENCE:
        ctx.ledger.count("write_pages", name, pool_type(k_pool))
    implementation.write_pages(ctx, k, v, k_pool, v_pool, slots)
