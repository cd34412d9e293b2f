"""`split_heads` on a GPU: one launch, which writes keys and values straight into their pages.

MLX knows the pools as inputs of that launch. What reads them later takes its queries from the same launch, so it comes
after it; the newest queries are kept as pending, so that pages are written even when nobody asks for a result.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxr.kernels.checks import refuse
from mlxr.kernels.context import Context
from mlxr.kernels.gpu.deferred import settle
from mlxr.kernels.gpu.kernel import LANES, Kernel
from mlxr.kernels.gpu.pool import Pool
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.rope import RopeTable

if TYPE_CHECKING:
    from mlxr.kernels.split_heads import HeadNorms

SIMD_GROUPS = 4
HEADS = Kernel(
    "split_heads",
    Path(__file__).parent,
    "heads.body",
    ("qkv", "slots", "positions", "cosines", "sines", "q_norm", "k_norm", "k_pool", "v_pool", "numbers", "sizes"),
    ("q",),
)
KERNELS = (HEADS,)


def split_heads(
    ctx: Context,
    qkv: Any,
    heads: int,
    batch: RaggedBatch,
    table: RopeTable,
    k_pool: Pool,
    v_pool: Pool,
    norms: HeadNorms | None,
) -> Any:
    """Positions and slots were checked on the host, where they come from."""
    gpu, (pages, kv_heads, page_size, head_dim) = ctx.gpu, k_pool.shape
    if head_dim % 2:
        refuse("split_heads", "head_dim", head_dim, "an even number")
    placed, qkv = gpu.place(batch), settle(qkv)
    _check_values(batch, table, (pages + 1) * page_size)
    if gpu.launcher is None:
        return _compose(ctx, qkv, heads, placed, table, k_pool, v_pool, norms)
    numbers = gpu.launcher.numbers
    none = numbers(0.0)
    pairs, lanes = choose_lanes(head_dim, table.rot_dim)
    (q,) = gpu.launcher.launch(
        HEADS,
        [
            qkv,
            placed.slots,
            placed.positions,
            gpu.hold(table.cos),
            gpu.hold(table.sin),
            none if norms is None else gpu.hold(norms.q),
            none if norms is None else gpu.hold(norms.k),
            k_pool.array,
            v_pool.array,
            none if norms is None else numbers(norms.eps),
            numbers(heads, kv_heads, head_dim, table.rot_dim, page_size),
        ],
        groups=(-(-(heads + 2 * kv_heads) * lanes // (LANES * SIMD_GROUPS)), batch.tokens, 1),
        threads=LANES * SIMD_GROUPS,
        outputs=[((batch.tokens, heads, head_dim), gpu.activations)],
        constants={"NORMED": int(norms is not None), "INTERLEAVED": int(table.interleaved), "N": pairs, "L": lanes},
        types={"X": qkv.dtype, "Y": gpu.activations, "K": k_pool.array.dtype},
    )
    gpu.pending = [q]
    return q


def choose_lanes(head_dim: int, rot_dim: int) -> tuple[int, int]:
    """Pairs of numbers that a lane takes at a time, and lanes that share a head: a power of two."""
    pairs = 4 if head_dim % 8 == 0 and rot_dim % 8 == 0 else 1
    return pairs, min(LANES, 1 << (-(-head_dim // (2 * pairs)) - 1).bit_length())


def _check_values(batch: RaggedBatch, table: RopeTable, slots: int) -> None:
    if batch.longest_context > table.positions:
        refuse("split_heads", "positions", batch.positions.tolist(), f"positions from 0 to {table.positions - 1}")
    if batch.slots.min() < 0 or batch.slots.max() >= slots:
        refuse("split_heads", "slots", batch.slots.tolist(), f"slots from 0 to {slots - 1}")


def _compose(
    ctx: Context,
    qkv: Any,
    heads: int,
    placed: Any,
    table: RopeTable,
    k_pool: Pool,
    v_pool: Pool,
    norms: HeadNorms | None,
) -> Any:
    """The same with MLX's operations; writes are scatters, in place because nobody else holds the pools."""
    gpu, mx, (_, kv_heads, page_size, head_dim) = ctx.gpu, ctx.gpu.mx, k_pool.shape
    split = qkv.reshape(qkv.shape[0], heads + 2 * kv_heads, head_dim)
    q, k, v = split[:, :heads], split[:, heads : heads + kv_heads], split[:, heads + kv_heads :]
    if norms is not None:
        q = mx.fast.rms_norm(q, gpu.hold(norms.q), norms.eps)
        k = mx.fast.rms_norm(k, gpu.hold(norms.k), norms.eps)
    cos, sin = (mx.take(gpu.hold(part), placed.positions, axis=0)[:, None] for part in (table.cos, table.sin))
    page_ids, offsets = placed.slots // page_size, placed.slots % page_size
    rows = ((page_ids[:, None] * kv_heads + mx.arange(kv_heads)) * page_size + offsets[:, None]).reshape(-1)
    for pool, values in ((k_pool, _rotate(mx, k, cos, sin, table)), (v_pool, v)):
        shape, flat = pool.array.shape, pool.array.reshape(-1, head_dim)
        pool.array = None  # so that the scatter may take the memory over
        flat[rows] = values.reshape(-1, head_dim).astype(flat.dtype)
        pool.array = flat.reshape(shape)
        mx.eval(pool.array)
    return _rotate(mx, q, cos, sin, table)


def _rotate(mx: Any, x: Any, cos: Any, sin: Any, table: RopeTable) -> Any:
    turned, rest = x[..., : table.rot_dim], x[..., table.rot_dim :]
    half = table.rot_dim // 2
    if table.interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = mx.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(turned.shape)
    else:
        a, b = turned[..., :half], turned[..., half:]
        turned = mx.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return mx.concatenate([turned, rest], axis=-1)
