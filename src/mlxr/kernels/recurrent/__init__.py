"""Recurrent mixers: the gated delta rule, Mamba-2 and the short convolution before them, and the states that they keep.

Operators see slots of a layer's pool of states, of which each has a part. A batch names for each sequence the slot with
the state before its first token, and the slot for the state after its last one; these are never the same, and no slot
is both read and written in one step.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mlxr.kernels.checks import refuse
from mlxr.kernels.ragged import NO_STATE, RaggedBatch
from mlxr.kernels.tensor import FLOAT32, FloatArray, IntArray, PoolArray


def check_states(operator: str, pool: PoolArray, at: int, floats: int, batch: RaggedBatch) -> None:
    """The batch has slots of `pool` (slots, floats of a slot), of which `floats` from `at` on are the operator's."""
    slots, held = pool.shape
    if isinstance(pool, np.ndarray) and (pool.dtype != FLOAT32 or not pool.flags.c_contiguous):
        refuse(operator, "pool", f"{pool.dtype} with strides {pool.strides}", "float32, C-contiguous")
    if at < 0 or at + floats > held:
        refuse(operator, "floats of a slot", held, f"at least {at + floats}")
    if not batch.has_states:
        refuse(operator, "the batch", "without states", "slots for those of its sequences")
    highest = int(max(batch.state_reads.max(), batch.state_writes.max()))
    spares = 0 if isinstance(pool, np.ndarray) else 1  # a pool on a GPU has one more, for what is padded
    if highest >= slots + spares:
        refuse(operator, "slot", highest, f"below {slots}")


def place_states(batch: RaggedBatch, pool: PoolArray, at: int) -> tuple[PoolArray, int, IntArray, IntArray, IntArray]:
    """The arguments that native operators take."""
    return pool, at, batch.state_reads, batch.state_writes, batch.query_starts


def list_states(
    pool: FloatArray, at: int, floats: int, batch: RaggedBatch
) -> Iterator[tuple[slice, FloatArray, FloatArray]]:
    """Of each sequence its tokens, its state before them, and where the state after them goes, both (floats,)."""
    for index in range(batch.sequences):
        tokens = slice(int(batch.query_starts[index]), int(batch.query_starts[index + 1]))
        read, write = int(batch.state_reads[index]), int(batch.state_writes[index])
        before = np.zeros(floats, np.float32) if read == NO_STATE else pool[read, at : at + floats].copy()
        yield tokens, before, pool[write, at : at + floats]


def read_heads(state: FloatArray, heads: int, rows: int, columns: int) -> FloatArray:
    """The numbers (heads, rows, columns) of a recurrence's state, each head multiplied by its scale, if there are any.

    The scales (heads,) lie after the numbers; 0 says 1.
    """
    numbers, scales = np.split(state, [heads * rows * columns])
    if scales.size:
        numbers = numbers.reshape(heads, -1) * np.where(scales == 0, np.float32(1), scales)[:, None]
    return numbers.reshape(heads, rows, columns)


def write_heads(state: FloatArray, numbers: FloatArray) -> None:
    """Overwrite a recurrence's state with `numbers` (heads, rows, columns), which have no scales."""
    state[: numbers.size] = numbers.reshape(-1)
    state[numbers.size :] = 0
