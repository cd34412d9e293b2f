"""Rows of an embedding table of any type; only the requested rows are decoded, straight from the file's blocks.

First the checks, then the reference in NumPy, then the call of the native kernel; `gpu.py` has the launch.
"""

# ruff: noqa: ARG001 -- every implementation takes the context
from __future__ import annotations

import numpy as np

from mlxr.core.frozen import frozen
from mlxr.kernels.arrays import empty
from mlxr.kernels.checks import check_ints, refuse
from mlxr.kernels.choice import REFERENCE, Choice
from mlxr.kernels.context import Context
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.recurrent import check_states, list_states, place_states
from mlxr.kernels.tensor import FloatArray, IntArray, PoolArray, TensorSource


def embed(ctx: Context, token_ids: IntArray, table: TensorSource) -> FloatArray:
    """Decode rows `token_ids` (T,) of `table` (rows, columns) into (T, columns).

    Raises ValueError for an id outside the table.
    """
    check_ints("embed", "token_ids", token_ids)
    if len(table.shape) != 2:
        refuse("embed", f"table {table.name}", f"of shape {table.shape}", "(rows, columns)")
    if token_ids.shape[0] and (token_ids.min() < 0 or token_ids.max() >= table.shape[0]):
        refuse("embed", "token_ids", token_ids.tolist(), f"ids from 0 to {table.shape[0] - 1}")
    name, implementation = EMBED.pick(ctx.device)
    if name == REFERENCE:
        ctx.ledger.count("embed", name, table.type_name)
    return implementation(ctx, token_ids, table)


def _embed_reference(ctx: Context, token_ids: IntArray, table: TensorSource) -> FloatArray:
    rows = np.empty((token_ids.shape[0], table.shape[1]), np.float32)
    for index, token_id in enumerate(token_ids.tolist()):
        rows[index] = table.to_float32(token_id, token_id + 1)[0]
    return rows


def _embed_native(ctx: Context, token_ids: IntArray, table: TensorSource) -> FloatArray:
    out = empty(ctx, token_ids.shape[0], table.shape[1])
    ctx.module.embed(ctx.native, token_ids, table.type_name, table.data, out)
    return out


EMBED = Choice("embed", _embed_reference, _embed_native, f"{__name__}.gpu")


@frozen
class Ngrams:
    """The rule by which a token and those before it (n-grams) select rows of a table.

    There are n-grams of two to len(multipliers) tokens, with equally many rows each. Let x be the exclusive or of ids
    times multipliers (of the token itself, of the one before it, ...); the rows are x % size + offset, for each size
    and offset of that n. A token `end` ends a text: tokens after it see that id instead of it and of all earlier
    tokens, as do tokens at the start.
    """

    end: int
    multipliers: tuple[int, ...]
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def state_floats(self) -> int:
        """The numbers of a state: ids + 1 of the tokens before the next one, the oldest first."""
        return len(self.multipliers) - 1

    def find_rows(self, ids: list[int]) -> list[int]:
        """Return the rows of the last of these tokens; the oldest comes first, -1 is no token."""
        each, ended, rows = len(self.sizes) // self.state_floats, False, list[int]()
        mixed = ids[-1] * self.multipliers[0]
        for back in range(1, len(self.multipliers)):
            token = ids[-1 - back]
            ended = ended or token in (-1, self.end)
            mixed ^= (self.end if ended else token) * self.multipliers[back]
            heads = range((back - 1) * each, back * each)
            rows += [mixed % 2**64 % self.sizes[head] + self.offsets[head] for head in heads]
        return rows


def embed_ngrams(
    ctx: Context, table: TensorSource, ngrams: Ngrams, batch: RaggedBatch, pool: PoolArray, *, at: int = 0
) -> FloatArray:
    """Decode the rows of `table` (rows, columns) that the n-grams of each token select: (T, heads * columns).

    The tokens before the batch's are in the state of their sequence, in its slot of `pool` from `at` on.
    """
    check_states("ngrams", pool, at, ngrams.state_floats, batch)
    _, implementation = NGRAMS.pick(ctx.device)
    return implementation(ctx, table, ngrams, batch, pool, at)


def _ngrams_reference(
    ctx: Context, table: TensorSource, ngrams: Ngrams, batch: RaggedBatch, pool: FloatArray, at: int
) -> FloatArray:
    held, rows = ngrams.state_floats, list[int]()
    for tokens, before, after in list_states(pool, at, held, batch):
        known = [int(number) - 1 for number in before.tolist()] + batch.token_ids[tokens].tolist()
        for index in range(held, len(known)):
            rows += ngrams.find_rows(known[: index + 1])
        after[:] = np.array(known[-held:], np.float32) + 1
    return embed(ctx, np.array(rows, np.int32), table).reshape(batch.tokens, -1)


def _ngrams_native(
    ctx: Context, table: TensorSource, ngrams: Ngrams, batch: RaggedBatch, pool: FloatArray, at: int
) -> FloatArray:
    columns = table.shape[1]
    out = empty(ctx, batch.tokens, len(ngrams.sizes) * columns)
    ctx.module.ngrams(
        ctx.native,
        batch.token_ids,
        table.type_name,
        table.data,
        columns,
        ngrams.end,
        ngrams.multipliers,
        ngrams.sizes,
        ngrams.offsets,
        out,
        *place_states(batch, pool, at),
    )
    return out


NGRAMS = Choice("embed", _ngrams_reference, _ngrams_native)
