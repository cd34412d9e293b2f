"""Decode steps that are recorded: traced once for each shape class, started with two arrays of integers.

A step of single tokens is the same list of launches every time. A few tokens of one text, of which all logits are
wanted, are single tokens whose sequences share their pages (`RaggedBatch.split_rows`). Batches are padded to classes:
sequences and pages to powers of two; what is padded writes into and reads from a page of its own at the end of the
pools (`Pool`), and begins with a state of zeros. What is traced runs the same operators as always; whatever they decide
on the host must follow from the class alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from mlxr.kernels.checks import refuse
from mlxr.kernels.gpu.compiled_step import compile_step
from mlxr.kernels.gpu.pool import Pool
from mlxr.kernels.gpu.recorded_step import record_step
from mlxr.kernels.gpu.steps import Ints, Step, StepPools
from mlxr.kernels.ragged import MAX_RUN, NO_STATE, RaggedBatch

if TYPE_CHECKING:
    from mlxr.kernels.gpu.device import Gpu

Compute = Callable[[RaggedBatch], Any]
MAX_SEQUENCES = 256  # larger batches are bound by their arithmetic and run as they are


def takes_step(batch: RaggedBatch) -> bool:
    """Whether the batch is single tokens, or a few of each text, each with its logits wanted, without adapters."""
    if batch.adapters or not batch.tokens == len(batch.output_rows) <= MAX_SEQUENCES:
        return False
    is_single = batch.tokens == batch.sequences
    return is_single or (not batch.has_states and int(np.diff(batch.query_starts).max()) <= MAX_RUN)


def run_step(gpu: Gpu, compute: Compute, batch: RaggedBatch, pools: StepPools, key: object) -> Any:
    """`compute(batch)` by a step, recorded if it is new; `key` is what it depends on besides the shape.

    The step starts, or has run ahead (`Steps`). `pools` have the pages and slots that the batch names.
    """
    padded, graphs = pad_batch(batch if batch.tokens == batch.sequences else batch.split_rows(), pools), pools.graphs
    shape = (key, padded.tokens, padded.longest_run, *(group.page_table.shape[1] for group in padded.groups))
    step = graphs.get(shape)
    if step is None:
        step = graphs[shape] = _make_step(gpu, compute, padded)
    else:
        check_step(padded, pools)
    return gpu.steps.run(step, padded, batch.tokens, pools)


def _make_step(gpu: Gpu, compute: Compute, batch: RaggedBatch) -> Step:
    recorded = None if gpu.machine is None else record_step(gpu, compute, batch)
    return recorded or compile_step(gpu, compute, batch)


def check_step(batch: RaggedBatch, pools: StepPools) -> None:
    """Check of a batch, for a step that is replayed, what operators check when they are traced."""
    for group, pool in pools.pair_groups(batch):
        pages, page_size = pool.shape[0] + 1, pool.shape[2]
        slots, table = group.slots, group.page_table
        if slots.min() < 0 or slots.max() >= pages * page_size or table.min() < 0 or table.max() >= pages:
            refuse("run_step", "slots and pages", f"up to {slots.max()} and {table.max()}", f"within {pages - 1} pages")
    if pools.states is not None and max(batch.state_reads.max(), batch.state_writes.max()) > pools.states.shape[0]:
        highest = max(batch.state_reads.max(), batch.state_writes.max())
        refuse("run_step", "slot", int(highest), f"below {pools.states.shape[0]}")


def pad_batch(batch: RaggedBatch, pools: StepPools) -> RaggedBatch:
    """The batch with sequences and the pages of each group filled up to powers of two."""
    rows = _round_up(batch.sequences)
    more = rows - batch.sequences
    places = [_pad_places(group, rows, pool) for group, pool in pools.pair_groups(batch)]
    if not places:
        places = [(_extend(batch.slots, more, NO_STATE), np.empty((rows, 0), np.int32))]
    first = batch.with_tokens(
        token_ids=_extend(batch.token_ids, more, 0),
        positions=_extend(batch.positions, more, 0),
        slots=places[0][0],
        query_starts=np.arange(rows + 1, dtype=np.int32),
        context_lengths=_extend(batch.context_lengths, more, 1),
        page_table=places[0][1],
        output_rows=np.arange(rows, dtype=np.int32),
    )
    padded = first.with_groups(places[1:]) if places[1:] else first
    if pools.states is None:
        return padded
    spare = pools.states.shape[0]
    reads, writes, nexts = (
        _extend(slots, more, filler)
        for slots, filler in (
            (batch.state_reads, NO_STATE),
            (batch.state_writes, spare),
            (batch.state_nexts, NO_STATE),
        )
    )
    return padded.with_states(reads, writes, nexts, spare=spare)


def _pad_places(group: RaggedBatch, rows: int, pool: Pool) -> tuple[Ints, Ints]:
    """Slots and page table of one group for so many sequences; its pool's spare page stands where there is none."""
    spare, (sequences, columns) = pool.shape[0], group.page_table.shape
    table = np.full((rows, _round_up(columns)), spare, np.int32)
    table[:sequences, :columns] = np.where(group.page_table < 0, spare, group.page_table)
    return _extend(group.slots, rows - sequences, spare * pool.shape[2]), table


def _extend(values: np.typing.NDArray[np.int32], more: int, filler: int) -> np.typing.NDArray[np.int32]:
    return np.concatenate([values, np.full(more, filler, np.int32)]) if more else values


def _round_up(count: int) -> int:
    return 1 << (count - 1).bit_length()
