"""From the fused projection to heads: norm and rotate them, write keys and values into pages, return the queries.

Values may be the keys as they were projected, and a layer that reads another layer's cache projects only queries.
On the CPU these are the operators `rms_norm`, `rope` and `write_pages` one after another, which the vector units prefer
to one long loop; a GPU does all in one launch (`gpu.py`).
"""

# ruff: noqa: ARG001 -- every implementation takes the context
from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from mlxr.core.frozen import frozen
from mlxr.kernels.checks import check_floats, check_heads, check_ints, check_pools, check_size, refuse
from mlxr.kernels.choice import REFERENCE, Choice
from mlxr.kernels.context import Context
from mlxr.kernels.norms import layer_norm, rms_norm
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.rope import RopeTable, rope
from mlxr.kernels.tensor import (
    BFLOAT16,
    INT8,
    SCALE_BYTES,
    FloatArray,
    IntArray,
    PoolArray,
    locate_keys,
    locate_values,
    pool_head_dim,
    pool_type,
    round_to_bf16,
    round_to_q8,
)

__all__ = ["PROJECTED", "HeadNormKind", "HeadNorms", "Projected", "rope_and_write_kv", "write_pages"]

Projected = Literal["qkv", "qk", "q"]
PROJECTED: tuple[str, ...] = get_args(Projected)
HeadNormKind = Literal["each", "joint", "layer", "turned"]


@frozen(eq=False)
class HeadNorms:
    """Weights of the norms of queries and keys, with `eps` as in `rms_norm`.

    With the kinds "each" and "turned", weights (head_dim,) norm every head by itself; "turned" norms after the
    rotation, all others before it. Weights of the other kinds are as long as all heads: "joint" norms these as one row,
    and "layer" gives each head a layer norm with its own weight. With `values`, value heads are also normed, each by
    itself, without a weight.
    """

    q: FloatArray
    k: FloatArray
    eps: float
    values: bool = False
    kind: HeadNormKind = "each"

    def check(self, heads: int, kv_heads: int, head_dim: int) -> None:
        """Raise ValueError for weights that do not fit the heads."""
        for name, weight, count in (("q", self.q, heads), ("k", self.k, kv_heads)):
            check_floats("rope_and_write_kv", f"norm of {name}", weight, 1)
            wanted = head_dim if self.kind in ("each", "turned") else count * head_dim
            check_size("rope_and_write_kv", f"length of the norm of {name}", weight.shape[0], wanted)


def rope_and_write_kv(
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
    """Return the rotated queries (T, heads, head_dim) of qkv (T, (heads + 2 * kv_heads) * head_dim); write K and V.

    Key heads and head_dim are those of the pools. `projected` says what qkv has: with "qk", values are the keys before
    norm and rotation; with "q", nothing is written. Raises ValueError for positions beyond the table and for slots
    outside the pools.
    """
    check_floats("rope_and_write_kv", "qkv", qkv, 2)
    check_pools("rope_and_write_kv", k_pool, v_pool)
    kv_heads, head_dim = k_pool.shape[1], pool_head_dim(k_pool)
    check_size("rope_and_write_kv", "rows of qkv", qkv.shape[0], batch.tokens)
    if projected not in PROJECTED:
        refuse("rope_and_write_kv", "projected", repr(projected), f"one of {', '.join(PROJECTED)}")
    columns = (heads + (len(projected) - 1) * kv_heads) * head_dim
    check_size("rope_and_write_kv", "columns of qkv", qkv.shape[1], columns)
    if norms is not None:
        norms.check(heads, kv_heads, head_dim)
    if table.rot_dim > head_dim:
        refuse("rope_and_write_kv", "rot_dim of table", table.rot_dim, f"at most the head_dim {head_dim}")
    _, implementation = ROPE_AND_WRITE_KV.pick(ctx.device)
    return implementation(ctx, qkv, heads, batch, table, k_pool, v_pool, norms, projected)


def _run_operators(
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
    """Run one operator after another; slices of qkv are views, which they take with a free token stride."""
    kv_heads, head_dim = k_pool.shape[1], pool_head_dim(k_pool)
    parts = qkv.reshape(len(qkv), -1, head_dim)
    q, k, v = parts[:, :heads], parts[:, heads : heads + kv_heads], parts[:, heads + kv_heads :]
    before = norms if norms is not None and norms.kind != "turned" else None
    if before is not None:
        q = _norm(ctx, q, before.q, before)
    rope(ctx, q, batch.rope_rows, table, queries=True)
    after = norms if before is None else None
    if after is not None:
        q = _norm(ctx, q, after.q, after)
    if projected == "q":
        return q
    if projected == "qk":
        v = k.copy() if before is None else k  # keys without a norm are rotated in place
    if before is not None:
        k = _norm(ctx, k, before.k, before)
    if norms is not None and norms.values:
        v = _norm(ctx, v, None, norms)
    rope(ctx, k, batch.rope_rows, table)
    if after is not None:
        k = _norm(ctx, k, after.k, after)
    write_pages(ctx, k, v, k_pool, v_pool, batch.slots)
    return q


def _norm(ctx: Context, x: FloatArray, weight: FloatArray | None, norms: HeadNorms) -> FloatArray:
    """Norm rows as long as the weight, or without a weight each head."""
    _, heads, head_dim = x.shape
    if weight is not None and norms.kind == "layer":
        normed, _ = layer_norm(ctx, x.reshape(-1, head_dim), weight.reshape(heads, head_dim), norms.eps)
    else:
        columns = head_dim if weight is None else weight.shape[0]
        normed, _ = rms_norm(ctx, x.reshape(-1, columns), weight, norms.eps)
    return normed.reshape(x.shape)


ROPE_AND_WRITE_KV = Choice("rope_and_write_kv", _run_operators, _run_operators, f"{__name__}.gpu")


def write_pages(
    ctx: Context, k: FloatArray, v: FloatArray | None, k_pool: PoolArray, v_pool: PoolArray, slots: IntArray
) -> None:
    """Write k and v (T, kv_heads, head_dim) into slot `slots[t]` = page * page_size + offset of the pools.

    k and v may be views with any token stride. Pools are (pages, kv_heads, page_size, head_dim), bf16, f16, f32 or
    q8; numbers are rounded to nearest even. Without v, values are in keys, and v_pool is not written. Raises ValueError
    for a slot outside the pools, before anything is written.
    """
    check_heads("write_pages", "k", k)
    if v is not None:
        check_heads("write_pages", "v", v)
    check_ints("write_pages", "slots", slots)
    check_pools("write_pages", k_pool, v_pool)
    wanted = (slots.shape[0], k_pool.shape[1], pool_head_dim(k_pool))
    if k.shape != wanted or (v is not None and v.shape != wanted):
        shapes = f"of shapes {k.shape} and {None if v is None else v.shape}"
        refuse("write_pages", "k and v", shapes, f"{wanted} for these pools and slots")
    name, implementation = WRITE_PAGES.pick(ctx.device)
    if name == REFERENCE:
        ctx.ledger.count("write_pages", name, pool_type(k_pool))
    implementation(ctx, k, v, k_pool, v_pool, slots)


def _write_reference(
    ctx: Context, k: FloatArray, v: FloatArray | None, k_pool: PoolArray, v_pool: PoolArray, slots: IntArray
) -> None:
    """Write the rows; slot s is offset s % page_size of page s // page_size."""
    (pages, kv_heads, page_size), head_dim = k_pool.shape[:3], pool_head_dim(k_pool)
    if slots.shape[0] and (slots.min() < 0 or slots.max() >= pages * page_size):
        refuse("write_pages", "slots", slots.tolist(), f"slots from 0 to {pages * page_size - 1}")
    page_ids, positions = np.divmod(slots, page_size)
    if k_pool.dtype not in (BFLOAT16, INT8):
        k_pool[page_ids, :, positions] = k
        if v is not None:
            v_pool[page_ids, :, positions] = v
        return
    heads = np.arange(kv_heads)[None, :, None]
    for pool, rows, offsets in (
        (k_pool, k, locate_keys(page_size, head_dim)),
        (v_pool, v, locate_values(page_size, head_dim)),
    ):
        if rows is None:
            continue
        flat = pool.reshape(pages, kv_heads, -1)
        places = page_ids[:, None, None], heads, offsets[positions][:, None]
        if pool.dtype == BFLOAT16:
            flat[places] = round_to_bf16(rows)
            continue
        flat[places], scales = round_to_q8(rows)
        scale_bytes = page_size * head_dim + positions[:, None] * SCALE_BYTES + np.arange(SCALE_BYTES)
        flat[page_ids[:, None, None], heads, scale_bytes[:, None]] = scales[..., None].view(np.int8)


def _write_native(
    ctx: Context, k: FloatArray, v: FloatArray | None, k_pool: PoolArray, v_pool: PoolArray, slots: IntArray
) -> None:
    """Scatter the rows into their slots; of two rows with one slot, the later one stays."""
    ctx.module.write_pages(ctx.native, k, v, k_pool, v_pool, slots)


WRITE_PAGES = Choice("write_pages", _write_reference, _write_native)
