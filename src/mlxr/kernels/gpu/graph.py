"""Decode steps that are recorded: traced once for each shape class, started with two arrays of integers.

A step of single tokens is the same list of launches every time. Batches are padded to classes: sequences and pages to
powers of two; what is padded writes into and reads from a page of its own at the end of the pools (`Pool`). What is
traced runs the same operators as always; whatever they decide on the host must follow from the class alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from mlxr.kernels.checks import refuse
from mlxr.kernels.gpu.compiled_step import compile_step
from mlxr.kernels.gpu.pool import Pool
from mlxr.kernels.gpu.recorded_step import record_step
from mlxr.kernels.gpu.steps import Step
from mlxr.kernels.ragged import RaggedBatch

if TYPE_CHECKING:
    from mlxr.kernels.gpu.device import Gpu

Compute = Callable[[RaggedBatch], Any]
MAX_SEQUENCES = 256  # larger batches are bound by their arithmetic and run as they are


def takes_step(batch: RaggedBatch) -> bool:
    """Whether the batch is single tokens, each with its logits wanted, and all layers have the same pages alone."""
    if batch.others or batch.has_states:
        return False
    return batch.tokens == batch.sequences == len(batch.output_rows) <= MAX_SEQUENCES


def run_step(gpu: Gpu, compute: Compute, batch: RaggedBatch, pool: Pool, key: object) -> Any:
    """`compute(batch)` by a step, recorded if it is new; `key` is what it depends on besides the shape.

    The step starts, or has run ahead (`Steps`). The batch's pages are those of `pool` and its like, which own steps.
    """
    padded = pad_batch(batch, pool)
    shape = (key, *padded.page_table.shape)
    step = pool.graphs.get(shape)
    if step is None:
        step = pool.graphs[shape] = _make_step(gpu, compute, padded)
    else:
        check_step(padded, pool)
    return gpu.steps.run(step, padded, batch.tokens, pool)


def _make_step(gpu: Gpu, compute: Compute, batch: RaggedBatch) -> Step:
    recorded = None if gpu.machine is None else record_step(gpu, compute, batch)
    return recorded or compile_step(gpu, compute, batch)


def check_step(batch: RaggedBatch, pool: Pool) -> None:
    """What the operators check of a batch when they are traced, for a step that is replayed."""
    pages, page_size = pool.shape[0] + 1, pool.shape[2]
    slots, table = batch.slots, batch.page_table
    if slots.min() < 0 or slots.max() >= pages * page_size or table.min() < 0 or table.max() >= pages:
        refuse("run_step", "slots and pages", f"up to {slots.max()} and {table.max()}", f"within {pages - 1} pages")


def pad_batch(batch: RaggedBatch, pool: Pool) -> RaggedBatch:
    """The batch with sequences and pages filled up to powers of two."""
    spare = pool.shape[0]
    rows, width = _round_up(batch.sequences), _round_up(batch.page_table.shape[1])
    more = rows - batch.sequences
    table = np.full((rows, width), spare, np.int32)
    table[: batch.sequences, : batch.page_table.shape[1]] = np.where(batch.page_table < 0, spare, batch.page_table)
    return RaggedBatch(
        token_ids=_extend(batch.token_ids, more, 0),
        positions=_extend(batch.positions, more, 0),
        slots=_extend(batch.slots, more, spare * pool.shape[2]),
        query_starts=np.arange(rows + 1, dtype=np.int32),
        context_lengths=_extend(batch.context_lengths, more, 1),
        page_table=table,
        output_rows=np.arange(rows, dtype=np.int32),
    )


def _extend(values: np.typing.NDArray[np.int32], more: int, filler: int) -> np.typing.NDArray[np.int32]:
    return np.concatenate([values, np.full(more, filler, np.int32)])


def _round_up(count: int) -> int:
    return 1 << (count - 1).bit_length()
