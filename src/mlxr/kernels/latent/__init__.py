"""Latent attention (DeepSeek-AI 2024, arXiv:2405.04434), in the form that attends to the latent vectors themselves.

All heads share one key of each token, and the cache keeps only that: numbers that rotate, then a latent vector, which
is also the value. The matrices that would make each head's keys and values from it multiply queries and results instead
(`project_parts`). `rope_and_write_latent` makes the keys.
"""

# ruff: noqa: ARG001 -- every implementation takes the context
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mlxr.core.frozen import frozen
from mlxr.kernels.arrays import empty
from mlxr.kernels.checks import check_floats, check_pools, check_size, refuse
from mlxr.kernels.choice import Choice
from mlxr.kernels.context import Context
from mlxr.kernels.linear import LinearWeight, linear
from mlxr.kernels.norms import rms_norm
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.rope import RopeTable, rope
from mlxr.kernels.rope_and_write_kv import write_pages
from mlxr.kernels.tensor import FloatArray, PoolArray, pool_head_dim

__all__ = ["Parts", "make_parts", "project_parts", "rope_and_write_latent"]


@frozen(eq=False)
class Parts:
    """Weights of one shape, one for each part of a row. Only the implementation that made `payload` knows its type."""

    weights: tuple[LinearWeight, ...]
    payload: Any

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(weight.nbytes for weight in self.weights)


def make_parts(ctx: Context, weights: Sequence[LinearWeight]) -> Parts:
    """Return weights for `project_parts`. Raises ValueError if there are none or their shapes differ."""
    if not weights:
        refuse("make_parts", "weights", "empty", "at least one")
    for weight in weights:
        check_size("make_parts", "in_features", weight.in_features, weights[0].in_features)
        check_size("make_parts", "out_features", weight.out_features, weights[0].out_features)
    own = tuple(weights)
    return Parts(own, PREPARE_PARTS.pick(ctx.device)[1](ctx, own))


def _prepare(ctx: Context, weights: tuple[LinearWeight, ...]) -> Any:
    """Return the payloads that `linear` made."""
    return tuple(weight.payload for weight in weights)


PREPARE_PARTS = Choice("prepare_parts", _prepare, _prepare, f"{__name__}.gpu")


def rope_and_write_latent(
    ctx: Context,
    q: FloatArray,
    latent: FloatArray,
    batch: RaggedBatch,
    table: RopeTable,
    pool: PoolArray,
    norm: FloatArray,
    eps: float,
) -> FloatArray:
    """Return the rotated queries (T, heads, head_dim) of q (T, heads * head_dim), and write keys to the pool.

    The pool has one key head. `latent` (T, head_dim) has for each token the latent vector, which is as long as its
    `norm`, and then the other numbers of the key. The table rotates these, and they come first in keys, as in queries.
    Raises ValueError for positions beyond the table and for slots outside the pool.
    """
    check_floats("rope_and_write_latent", "q", q, 2)
    check_floats("rope_and_write_latent", "latent", latent, 2)
    check_floats("rope_and_write_latent", "norm", norm, 1)
    check_pools("rope_and_write_latent", pool, pool)
    head_dim = pool_head_dim(pool)
    check_size("rope_and_write_latent", "key heads of the pool", pool.shape[1], 1)
    check_size("rope_and_write_latent", "rows of q", q.shape[0], batch.tokens)
    check_size("rope_and_write_latent", "rows of latent", latent.shape[0], batch.tokens)
    check_size("rope_and_write_latent", "columns of latent", latent.shape[1], head_dim)
    if q.shape[1] % head_dim:
        refuse("rope_and_write_latent", "columns of q", q.shape[1], f"a multiple of the {head_dim} of a key")
    if table.rot_dim > head_dim - len(norm):
        refuse("rope_and_write_latent", "rot_dim of table", table.rot_dim, f"at most {head_dim - len(norm)}")
    _, implementation = ROPE_AND_WRITE_LATENT.pick(ctx.device)
    return implementation(ctx, q, latent, batch, table, pool, norm, eps)


def _run_operators(
    ctx: Context,
    q: FloatArray,
    latent: FloatArray,
    batch: RaggedBatch,
    table: RopeTable,
    pool: PoolArray,
    norm: FloatArray,
    eps: float,
) -> FloatArray:
    """Run one operator after another."""
    rank = len(norm)
    normed, _ = rms_norm(ctx, np.ascontiguousarray(latent[:, :rank]), norm, eps)
    keys = np.concatenate([latent[:, rank:], normed], axis=1)[:, None]
    queries = q.reshape(len(q), -1, latent.shape[1])
    rope(ctx, queries, batch.rope_rows, table, queries=True)
    rope(ctx, keys, batch.rope_rows, table)
    write_pages(ctx, keys, None, pool, pool, batch.slots)
    return queries


ROPE_AND_WRITE_LATENT = Choice("rope_and_write_latent", _run_operators, _run_operators, f"{__name__}.gpu")


def project_parts(ctx: Context, x: FloatArray, parts: Parts, passed: int = 0) -> FloatArray:
    """Multiply each part of a row by its own weight: x (T, parts * (in + passed)) to (T, parts * (passed + out)).

    The first `in` numbers of a part are multiplied; the `passed` numbers after them are put before the result. On the
    CPU the bits of a row do not depend on other rows.
    """
    check_floats("project_parts", "x", x, 2)
    if passed < 0:
        refuse("project_parts", "passed", passed, "0 or more")
    columns = len(parts.weights) * (parts.weights[0].in_features + passed)
    check_size("project_parts", "columns of x", x.shape[1], columns)
    _, implementation = PROJECT_PARTS.pick(ctx.device)
    return implementation(ctx, x, parts, passed)


def _project_reference(ctx: Context, x: FloatArray, parts: Parts, passed: int) -> FloatArray:
    """Run one product after another."""
    count, columns = len(parts.weights), parts.weights[0].in_features
    rows = x.reshape(len(x), count, columns + passed)
    out = np.empty((len(x), count, passed + parts.weights[0].out_features), np.float32)
    out[:, :, :passed] = rows[:, :, columns:]
    for index, weight in enumerate(parts.weights):
        out[:, index, passed:] = linear(ctx, np.ascontiguousarray(rows[:, index, :columns]), weight)
    return out.reshape(len(x), -1)


def _project_native(ctx: Context, x: FloatArray, parts: Parts, passed: int) -> FloatArray:
    """Run the products of all parts at once."""
    out = empty(ctx, len(x), len(parts.weights) * (passed + parts.weights[0].out_features))
    ctx.module.project_parts(ctx.native, x, parts.payload, passed, out)
    return out


PROJECT_PARTS = Choice("project_parts", _project_reference, _project_native, f"{__name__}.gpu")
