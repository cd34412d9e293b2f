"""`rope_and_write_kv` on a GPU: one launch, which writes keys and values straight into their pages.

MLX sees the pools as inputs of that launch. Attention takes its queries from the same launch, so it runs after the
writes. The newest queries are kept as pending, so that pages are written even if nobody needs a result. Devices
without our kernels compose MLX's operations; their writes are scatters, in place because nobody else holds the pools.
"""

from __future__ import annotations

from pathlib import Path

from mlxr.kernels.checks import refuse
from mlxr.kernels.context import Context
from mlxr.kernels.gpu.deferred import settle
from mlxr.kernels.gpu.device import PlacedBatch
from mlxr.kernels.gpu.kernel import LANES, Kernel
from mlxr.kernels.gpu.mlx import Mlx
from mlxr.kernels.gpu.pool import Pool
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.rope import RopeTable
from mlxr.kernels.rope_and_write_kv import HeadNorms, Projected
from mlxr.kernels.tensor import DeviceArray, FloatArray

SIMD_GROUPS = 4
NORMED = {"each": 1, "joint": 2, "layer": 3, "turned": 4}
HEADS = Kernel(
    "rope_and_write_kv",
    Path(__file__).parent,
    "heads.body",
    (
        "qkv", "slots", "positions", "cosines", "sines", "temperatures", "q_norm", "k_norm", "factors", "k_pool",
        "v_pool", "numbers", "sizes",
    ),
    ("q",),
)  # fmt: skip
FACTORS = Kernel("head_factors", Path(__file__).parent, "factors.body", ("qkv", "numbers", "sizes"), ("factors",))
FACTORS_THREADS = 256
KERNELS = (HEADS, FACTORS)


def rope_and_write_kv(
    ctx: Context,
    qkv: DeviceArray,
    heads: int,
    batch: RaggedBatch,
    table: RopeTable,
    k_pool: Pool,
    v_pool: Pool,
    norms: HeadNorms | None,
    projected: Projected,
) -> DeviceArray:
    """Run the operator in one launch; positions and slots are checked on the host."""
    gpu, (pages, kv_heads, page_size, head_dim) = ctx.gpu, k_pool.shape
    if head_dim % 2:
        refuse("rope_and_write_kv", "head_dim", head_dim, "an even number")
    placed, qkv = gpu.place(batch), settle(qkv)
    checked = "values", id(table), pages, page_size
    if checked not in placed.parts:  # once for all layers
        check_values(batch, table, (pages + 1) * page_size)
        placed.parts[checked] = table
    if gpu.launcher is None:
        return gpu.watch.run_mlx(
            "rope_and_write_kv",
            k_pool.kind,
            lambda: _compose(ctx, qkv, heads, placed, table, k_pool, v_pool, norms, projected),
            qkv,
        )
    numbers = gpu.launcher.numbers
    none = numbers(0.0)
    pairs, lanes = choose_lanes(head_dim, table.rot_dim)
    joint = norms is not None and norms.kind == "joint"
    factors = table.query_factors
    made_heads = heads if projected == "q" else heads + 2 * kv_heads
    (q,) = gpu.launcher.launch(
        HEADS,
        [
            qkv,
            placed.slots,
            placed.positions,
            gpu.hold(table.cos) if table.rot_dim else none,
            gpu.hold(table.sin) if table.rot_dim else none,
            none if factors is None else gpu.hold(factors),
            none if norms is None else gpu.hold(norms.q),
            none if norms is None else gpu.hold(norms.k),
            _measure_rows(ctx, qkv, heads, kv_heads, head_dim, norms.eps) if norms is not None and joint else none,
            k_pool.array,
            v_pool.array,
            none if norms is None else numbers(norms.eps),
            numbers(heads, kv_heads, head_dim, table.rot_dim, page_size),
        ],
        groups=(-(-made_heads * lanes // (LANES * SIMD_GROUPS)), batch.tokens, 1),
        threads=LANES * SIMD_GROUPS,
        outputs=[((batch.tokens, heads, head_dim), gpu.activations)],
        constants={
            "NORMED": 0 if norms is None else NORMED[norms.kind],
            "INTERLEAVED": int(table.interleaved),
            "N": pairs,
            "L": lanes,
            "PARTS": len(projected),
            "VALUES_NORMED": int(norms is not None and norms.values),
            "TEMPERED": int(factors is not None),
        },
        types={"X": qkv.dtype, "Y": gpu.activations, "K": k_pool.array.dtype},
    )
    gpu.pending = [q]
    return q


def _measure_rows(ctx: Context, qkv: DeviceArray, heads: int, kv_heads: int, head_dim: int, eps: float) -> DeviceArray:
    """Return the factors (tokens, 2) that norm all queries of a token as one row, and all of its keys."""
    numbers, (tokens, columns) = ctx.gpu.launcher.numbers, qkv.shape
    (factors,) = ctx.gpu.launcher.launch(
        FACTORS,
        [qkv, numbers(eps), numbers(heads * head_dim, kv_heads * head_dim, columns)],
        groups=(2, tokens, 1),
        threads=FACTORS_THREADS,
        outputs=[((tokens, 2), ctx.gpu.mx.float32)],
        types={"X": qkv.dtype},
    )
    return factors


def choose_lanes(head_dim: int, rot_dim: int) -> tuple[int, int]:
    """Return the pairs of numbers that a lane takes at a time, and the lanes that share a head, a power of two."""
    pairs = 4 if head_dim % 8 == 0 and rot_dim % 8 == 0 else 1
    return pairs, min(LANES, 1 << (-(-head_dim // (2 * pairs)) - 1).bit_length())


def check_values(batch: RaggedBatch, table: RopeTable, slots: int) -> None:
    """Raise ValueError for positions beyond the table, and for slots from `slots` on."""
    if batch.longest_context > table.positions and not batch.axes.shape[1]:  # with axes, each token has a row
        refuse("rope_and_write_kv", "positions", batch.positions.tolist(), f"positions from 0 to {table.positions - 1}")
    if batch.slots.min() < 0 or batch.slots.max() >= slots:
        refuse("rope_and_write_kv", "slots", batch.slots.tolist(), f"slots from 0 to {slots - 1}")


def _compose(
    ctx: Context,
    qkv: DeviceArray,
    heads: int,
    placed: PlacedBatch,
    table: RopeTable,
    k_pool: Pool,
    v_pool: Pool,
    norms: HeadNorms | None,
    projected: Projected,
) -> DeviceArray:
    """Return the queries, and write keys and values into the slots of the `placed` batch, by MLX's operations."""
    gpu, mx, (_, kv_heads, _, head_dim) = ctx.gpu, ctx.gpu.mx, k_pool.shape
    split = qkv.reshape(qkv.shape[0], -1, head_dim)
    q, k = split[:, :heads], split[:, heads : heads + kv_heads]
    v = k if projected == "qk" else split[:, heads + kv_heads :]
    cos, sin = (mx.take(gpu.hold(part), placed.positions, axis=0)[:, None] for part in (table.cos, table.sin))

    def turn(x: DeviceArray, weight: FloatArray | None) -> DeviceArray:
        if norms is None or weight is None:
            return rotate(mx, x, cos, sin, table)
        if norms.kind == "turned":
            return _norm(mx, rotate(mx, x, cos, sin, table), gpu.hold(weight), norms)
        return rotate(mx, _norm(mx, x, gpu.hold(weight), norms), cos, sin, table)

    q = turn(q, None if norms is None else norms.q)
    if table.query_factors is not None:
        q = q * mx.take(gpu.hold(table.query_factors), placed.positions)[:, None, None]
    if projected == "q":
        return q
    k = turn(k, None if norms is None else norms.k)
    if norms is not None and norms.values:
        v = mx.fast.rms_norm(v, None, norms.eps)
    scatter_rows(mx, k_pool, placed, k)
    scatter_rows(mx, v_pool, placed, v)
    return q


def scatter_rows(mx: Mlx, pool: Pool, placed: PlacedBatch, values: DeviceArray) -> None:
    """Write values (T, kv_heads, head_dim) into their slots."""
    _, kv_heads, page_size, head_dim = pool.shape
    page_ids, offsets = placed.slots // page_size, placed.slots % page_size
    rows = ((page_ids[:, None] * kv_heads + mx.arange(kv_heads)) * page_size + offsets[:, None]).reshape(-1)
    shape, flat = pool.array.shape, pool.array.reshape(-1, head_dim)
    del pool.array  # so that the scatter can reuse the memory
    flat[rows] = values.reshape(-1, head_dim).astype(flat.dtype)
    pool.array = flat.reshape(shape)
    mx.eval(pool.array)


def _norm(mx: Mlx, x: DeviceArray, weight: DeviceArray, norms: HeadNorms) -> DeviceArray:
    """Norm rows as long as the weight, or each head by its own weight."""
    if norms.kind == "layer":
        return mx.fast.layer_norm(x, None, None, norms.eps) * weight.reshape(x.shape[1:])
    return mx.fast.rms_norm(x.reshape(-1, weight.shape[0]), weight, norms.eps).reshape(x.shape)


def rotate(mx: Mlx, x: DeviceArray, cos: DeviceArray, sin: DeviceArray, table: RopeTable) -> DeviceArray:
    """Return x (T, heads, head_dim) with the first `rot_dim` numbers of each head rotated."""
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
