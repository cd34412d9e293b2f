"""`split_heads` as MLX's operations, for devices without our kernels.

Writes are scatters, in place because nobody else holds the pools.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlxr.kernels.context import Context
from mlxr.kernels.gpu.pool import Pool
from mlxr.kernels.rope import RopeTable

if TYPE_CHECKING:
    from mlxr.kernels.split_heads import HeadNorms, Projected


def compose(
    ctx: Context,
    qkv: Any,
    heads: int,
    placed: Any,
    table: RopeTable,
    k_pool: Pool,
    v_pool: Pool,
    norms: HeadNorms | None,
    projected: Projected,
) -> Any:
    """Return the queries; keys and values go to the slots of the batch that is `placed` on the device."""
    gpu, mx, (_, kv_heads, page_size, head_dim) = ctx.gpu, ctx.gpu.mx, k_pool.shape
    split = qkv.reshape(qkv.shape[0], -1, head_dim)
    q, k = split[:, :heads], split[:, heads : heads + kv_heads]
    v = k if projected == "qk" else split[:, heads + kv_heads :]
    if norms is not None:
        q = _norm(mx, q, gpu.hold(norms.q), norms)
        if projected != "q":
            k = _norm(mx, k, gpu.hold(norms.k), norms)
            v = mx.fast.rms_norm(v, None, norms.eps) if norms.values else v
    cos, sin = (mx.take(gpu.hold(part), placed.positions, axis=0)[:, None] for part in (table.cos, table.sin))
    q = _rotate(mx, q, cos, sin, table)
    if table.query_factors is not None:
        q = q * mx.take(gpu.hold(table.query_factors), placed.positions)[:, None, None]
    if projected == "q":
        return q
    page_ids, offsets = placed.slots // page_size, placed.slots % page_size
    rows = ((page_ids[:, None] * kv_heads + mx.arange(kv_heads)) * page_size + offsets[:, None]).reshape(-1)
    for pool, values in ((k_pool, _rotate(mx, k, cos, sin, table)), (v_pool, v)):
        shape, flat = pool.array.shape, pool.array.reshape(-1, head_dim)
        pool.array = None  # so that the scatter may take the memory over
        flat[rows] = values.reshape(-1, head_dim).astype(flat.dtype)
        pool.array = flat.reshape(shape)
        mx.eval(pool.array)
    return q


def _norm(mx: Any, x: Any, weight: Any, norms: HeadNorms) -> Any:
    """Norm rows as long as the weight, or each head by a weight of its own."""
    if norms.kind == "layer":
        return mx.fast.layer_norm(x, None, None, norms.eps) * weight.reshape(x.shape[1:])
    return mx.fast.rms_norm(x.reshape(-1, weight.shape[0]), weight, norms.eps).reshape(x.shape)


def _rotate(mx: Any, x: Any, cos: Any, sin: Any, table: RopeTable) -> Any:
    if not table.rot_dim:
        return x
    turned, rest = x[..., : table.rot_dim], x[..., table.rot_dim :]
    half = table.rot_dim // 2
    if table.interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = mx.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(turned.shape)
    else:
        a, b = turned[..., :half], turned[..., half:]
        turned = mx.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return mx.concatenate([turned, rest], axis=-1)
