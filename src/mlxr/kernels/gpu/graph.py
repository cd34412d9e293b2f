"""A decode step as one compiled graph: traced once for each shape class, replayed with one array of integers.

A step of single tokens is the same list of launches every time. MLX keeps that list (`mx.compile`), so a replay costs
no Python per operator. Batches are padded to classes: sequences and pages to powers of two; what is padded writes into
and reads from a page of its own at the end of the pools (`Pool`). The function that is traced runs the same operators
as always; whatever they decide on the host must follow from the class alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mlxr.kernels.checks import refuse
from mlxr.kernels.gpu.deferred import settle
from mlxr.kernels.gpu.pool import Pool
from mlxr.kernels.ledger import Dispatch, Ledger
from mlxr.kernels.ragged import RaggedBatch

if TYPE_CHECKING:
    from mlxr.kernels.gpu.device import Gpu

Compute = Callable[[RaggedBatch], Any]
MAX_SEQUENCES = 256  # larger batches are bound by their arithmetic and run as they are


@dataclass(frozen=True, slots=True)
class _Graph:
    replay: Callable[[Any], tuple[Any, Any, Any]]
    dispatches: list[Dispatch]


def takes_step(batch: RaggedBatch) -> bool:
    """Whether the batch is single tokens, each with its logits wanted."""
    return batch.tokens == batch.sequences == len(batch.output_rows) <= MAX_SEQUENCES


def run_step(gpu: Gpu, ledger: Ledger, compute: Compute, batch: RaggedBatch, pool: Pool, key: object) -> Any:
    """`compute(batch)` by a graph, recorded if it is new; `key` is what it depends on besides the shape.

    The graph starts, and finds the likeliest token of every row as well (`Gpu.drawn`). The batch's pages are those of
    `pool` and its like, which own the graphs. Where launches compute at once, nothing is recorded.
    """
    padded = pad_batch(batch, pool)
    shape = (key, *padded.page_table.shape)
    graph = pool.graphs.get(shape)
    if graph is None:
        graph = pool.graphs[shape] = _record(gpu, ledger, compute, padded)
    else:
        check_step(padded, pool)
    for row in graph.dispatches:
        ledger.count(row.operator, row.implementation, row.variant, row.count)
    logits, ids, logprobs = graph.replay(gpu.mx.array(pack_batch(padded)))
    if padded.tokens > batch.tokens:
        logits, ids, logprobs = (array[: batch.tokens] for array in (logits, ids, logprobs))
    gpu.drawn = (logits, ids, logprobs)
    gpu.submit(ids, logprobs)
    return logits


def _record(gpu: Gpu, ledger: Ledger, compute: Compute, batch: RaggedBatch) -> _Graph:
    mx, before = gpu.mx, ledger.snapshot()

    def step(packed: Any) -> tuple[Any, Any, Any]:
        gpu.place_traced(batch, unpack_batch(packed, *batch.page_table.shape))
        logits = settle(compute(batch)).astype(mx.float32)
        gpu.pending = []
        gpu.forget_placed()
        return logits, mx.argmax(logits, axis=1), mx.max(logits, axis=1) - mx.logsumexp(logits, axis=1)

    if not gpu.launcher.is_lazy:
        return _Graph(step, [])
    replay = mx.compile(step)
    mx.eval(replay(mx.array(pack_batch(batch))))  # traced by this; that the step is computed twice changes nothing
    return _Graph(replay, ledger.take_back(before))


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


def pack_batch(batch: RaggedBatch) -> np.typing.NDArray[np.int32]:
    """All integers of a step in one array."""
    columns = (batch.token_ids, batch.positions, batch.slots, batch.context_lengths)
    return np.concatenate([*columns, batch.page_table.reshape(-1)])


def unpack_batch(packed: Any, rows: int, width: int) -> tuple[Any, ...]:
    """Token ids, positions, slots, lengths and page table out of what `pack_batch` made."""
    columns = [packed[index * rows : (index + 1) * rows] for index in range(4)]
    return (*columns, packed[4 * rows :].reshape(rows, width))


def _extend(values: np.typing.NDArray[np.int32], more: int, filler: int) -> np.typing.NDArray[np.int32]:
    return np.concatenate([values, np.full(more, filler, np.int32)])


def _round_up(count: int) -> int:
    return 1 << (count - 1).bit_length()
