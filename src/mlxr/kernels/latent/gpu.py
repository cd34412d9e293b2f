"""Latent attention on a GPU: products of parts by the kernels of experts, and one launch for queries and keys.

A part is like an expert that gets a row of every token, so the host knows which rows go where, once for each number of
tokens. MLX sees the pool as an input of the launch that writes it, as in `rope_and_write_kv`.
"""

from __future__ import annotations

from dataclasses import field
from pathlib import Path

import numpy as np

from mlxr.core.frozen import frozen
from mlxr.kernels.checks import refuse
from mlxr.kernels.context import Context
from mlxr.kernels.gpu.deferred import settle
from mlxr.kernels.gpu.device import Gpu, PlacedBatch
from mlxr.kernels.gpu.kernel import LANES, Kernel
from mlxr.kernels.gpu.launcher import MIN_ARRAY
from mlxr.kernels.gpu.pool import Pool
from mlxr.kernels.latent import Parts
from mlxr.kernels.linear import LinearWeight
from mlxr.kernels.linear.blocks import limit_tokens
from mlxr.kernels.moe.gpu import gather_products
from mlxr.kernels.moe.products import (
    Stack,
    Tiling,
    can_multiply,
    choose_width,
    multiply_experts,
    stack_weights,
    takes_squares,
)
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.rope import RopeTable
from mlxr.kernels.rope_and_write_kv.gpu import check_values, rotate, scatter_rows
from mlxr.kernels.tensor import DeviceArray, FloatArray

FOLDER = Path(__file__).parent
LATENT = Kernel(
    "rope_and_write_latent",
    FOLDER,
    "latent.body",
    (
        "q", "latent", "slots", "positions", "cosines", "sines", "temperatures", "norm", "pool", "numbers", "sizes",
    ),
    ("out",),
)  # fmt: skip
COLUMNS = Kernel("latent_columns", FOLDER, "columns.body", ("x", "y", "sizes"), ("out",), operator="linear")
KERNELS = (LATENT, COLUMNS)
SIMD_GROUPS, COLUMNS_THREADS, WIDTHS = 4, 256, (8, 4, 2, 1)


@frozen(eq=False)
class Payload:
    """The weights of all parts together, and the tiles for each number of tokens seen so far."""

    stack: Stack
    tilings: dict[int, Tiling] = field(default_factory=dict)


def prepare_parts(ctx: Context, weights: tuple[LinearWeight, ...]) -> Payload:
    """Return the weights of all parts as one stack."""
    return Payload(stack_weights(ctx.gpu, weights))


def project_parts(ctx: Context, x: DeviceArray, parts: Parts, passed: int) -> DeviceArray:
    """Multiply each part as a row of its own; passed numbers are cut off before and joined to the result."""
    gpu, x, payload, count = ctx.gpu, settle(x), parts.payload, len(parts.weights)
    assert isinstance(payload, Payload)
    stack, tokens = payload.stack, x.shape[0]
    rows = x.reshape(tokens * count, -1)
    if not can_multiply(gpu, stack):
        numbers = gpu.mx.tile(gpu.mx.arange(count), tokens)
        made = gather_products(ctx, "linear", rows[:, : stack.in_features].astype(gpu.mx.float32), stack, numbers)
        joined = gpu.mx.concatenate([rows[:, stack.in_features :].astype(made.dtype), made], axis=1)
        return joined.reshape(tokens, -1).astype(gpu.activations)
    own = _put_beside(ctx, rows, 0, stack.in_features, None) if passed else rows
    tiling = _tile(gpu, payload, tokens, count, takes_squares(gpu, stack))
    made = multiply_experts(gpu, own, stack, tiling, 0, None, gpu.activations)
    if passed:
        made = _put_beside(ctx, rows, stack.in_features, passed, made)
    return made.reshape(tokens, -1)


def _put_beside(ctx: Context, x: DeviceArray, first: int, count: int, y: DeviceArray | None) -> DeviceArray:
    """Return `count` columns of x from `first` on, and those of y, if there is one, after them."""
    gpu, (rows, columns) = ctx.gpu, x.shape
    more = 0 if y is None else y.shape[1]
    width = next(size for size in WIDTHS if not any(number % size for number in (columns, first, count, more)))
    (out,) = gpu.launcher.launch(
        COLUMNS,
        [x, gpu.launcher.numbers(0.0) if y is None else y, gpu.launcher.numbers(columns, first, rows)],
        groups=(-(-rows * (count + more) // (COLUMNS_THREADS * width)), 1, 1),
        threads=COLUMNS_THREADS,
        outputs=[((rows, count + more), x.dtype)],
        constants={"A": count, "B": more, "N": width},
    )
    return out


def _tile(gpu: Gpu, payload: Payload, tokens: int, count: int, has_squares: bool) -> Tiling:
    """Return tiles of the rows of `tokens` tokens, each tile of one part, in the form of `sort_pairs`."""
    found = payload.tilings.get(tokens)
    if found is None:
        widths = gpu.has_tiles, limit_tokens(gpu), has_squares
        width = 1 if tokens == 1 else choose_width(tokens * count, 1, count, *widths)
        each = -(-tokens // width)
        tiles = np.zeros((count, each, 4), np.int32)
        firsts = np.arange(each) * width
        tiles[:, :, 0] = np.arange(count)[:, None]
        tiles[:, :, 1] = np.arange(count)[:, None] * tokens + firsts
        tiles[:, :, 2] = np.minimum(tokens - firsts, width)
        order = np.arange(tokens * count, dtype=np.int32).reshape(tokens, count).T.reshape(-1)
        placed = gpu.mx.array(tiles.reshape(-1, 4)), gpu.mx.array(np.resize(order, max(MIN_ARRAY, order.size)))
        gpu.mx.eval(placed)
        found = payload.tilings[tokens] = Tiling(tokens * count, 1, width, count * each, *placed)
    return found


def rope_and_write_latent(
    ctx: Context,
    q: DeviceArray,
    latent: DeviceArray,
    batch: RaggedBatch,
    table: RopeTable,
    pool: Pool,
    norm: FloatArray,
    eps: float,
) -> DeviceArray:
    """Run the operator in one launch; positions and slots are checked on the host."""
    gpu, (pages, _, page_size, head_dim) = ctx.gpu, pool.shape
    if (head_dim - len(norm)) % 2:
        refuse("rope_and_write_latent", "numbers of a key that rotate", head_dim - len(norm), "an even number")
    placed, q, latent, rank = gpu.place(batch), settle(q), settle(latent), len(norm)
    heads = q.shape[1] // head_dim
    check_values(batch, table, (pages + 1) * page_size)
    if gpu.launcher is None:
        return gpu.watch.run_mlx(
            "rope_and_write_latent",
            pool.kind,
            lambda: _compose(ctx, q.reshape(-1, heads, head_dim), latent, placed, table, pool, norm, eps),
            q,
            latent,
        )
    numbers, factors = gpu.launcher.numbers, table.query_factors
    (out,) = gpu.launcher.launch(
        LATENT,
        [
            q,
            latent,
            placed.slots,
            placed.positions,
            gpu.hold(table.cos) if table.rot_dim else numbers(0.0),
            gpu.hold(table.sin) if table.rot_dim else numbers(0.0),
            numbers(0.0) if factors is None else gpu.hold(factors),
            gpu.hold(norm),
            pool.array,
            numbers(eps),
            numbers(heads, head_dim, rank, table.rot_dim, page_size),
        ],
        groups=(-(-(heads + 1) // SIMD_GROUPS), batch.tokens, 1),
        threads=LANES * SIMD_GROUPS,
        outputs=[((batch.tokens, heads, head_dim), gpu.activations)],
        constants={"INTERLEAVED": int(table.interleaved), "TEMPERED": int(factors is not None)},
        types={"X": q.dtype, "Z": latent.dtype, "Y": gpu.activations, "K": pool.array.dtype},
    )
    gpu.pending = [out]
    return out


def _compose(
    ctx: Context,
    q: DeviceArray,
    latent: DeviceArray,
    placed: PlacedBatch,
    table: RopeTable,
    pool: Pool,
    norm: FloatArray,
    eps: float,
) -> DeviceArray:
    """Return the queries, and write keys into the slots of the `placed` batch, by MLX's operations."""
    gpu, mx, rank = ctx.gpu, ctx.gpu.mx, len(norm)
    cos, sin = (mx.take(gpu.hold(part), placed.positions, axis=0)[:, None] for part in (table.cos, table.sin))
    normed = mx.fast.rms_norm(latent[:, :rank], gpu.hold(norm), eps)
    keys = mx.concatenate([latent[:, rank:], normed], axis=1)[:, None]
    scatter_rows(mx, pool, placed, rotate(mx, keys, cos, sin, table))
    q = rotate(mx, q, cos, sin, table)
    if table.query_factors is not None:
        q = q * mx.take(gpu.hold(table.query_factors), placed.positions)[:, None, None]
    return q
