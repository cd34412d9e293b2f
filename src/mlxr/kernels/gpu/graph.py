"""A decode step as one compiled graph: traced once for each shape class, replayed with two arrays of integers.

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
    replay: Callable[[Any, Any], tuple[Any, Any, Any]]
    dispatches: list[Dispatch]


@dataclass(frozen=True, slots=True, eq=False)
class Ahead:
    """A step that was started before anybody asked for it; `batch` has all but its tokens, which are `token_ids`."""

    graph: _Graph
    batch: RaggedBatch
    token_ids: Any
    results: tuple[Any, Any, Any]

    def is_for(self, graph: _Graph, batch: RaggedBatch, rows: int) -> bool:
        """Whether it computes `batch`, of which `rows` count; waits for the tokens."""
        return (
            graph is self.graph
            and np.array_equal(batch.slots, self.batch.slots)
            and np.array_equal(batch.positions, self.batch.positions)
            and np.array_equal(batch.page_table, self.batch.page_table)
            and np.array_equal(np.asarray(self.token_ids)[:rows], batch.token_ids[:rows])
        )


def takes_step(batch: RaggedBatch) -> bool:
    """Whether the batch is single tokens, each with its logits wanted."""
    return batch.tokens == batch.sequences == len(batch.output_rows) <= MAX_SEQUENCES


def run_step(gpu: Gpu, ledger: Ledger, compute: Compute, batch: RaggedBatch, pool: Pool, key: object) -> Any:
    """`compute(batch)` by a graph, recorded if it is new; `key` is what it depends on besides the shape.

    The graph starts, and finds the likeliest token of every row as well (`Gpu.drawn`). The batch's pages are those of
    `pool` and its like, which own the graphs. While tokens are the likeliest ones, the next step is started on them
    right away, so that the device does not wait for the host; a step that turns out otherwise is dropped, and what it
    wrote is written again before anybody reads it. Where launches compute at once, nothing is recorded nor started.
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
    ahead, gpu.ahead = gpu.ahead, None
    if ahead is not None and ahead.is_for(graph, padded, batch.tokens):
        results = ahead.results
    else:
        results = _start(gpu, graph, gpu.mx.array(padded.token_ids), padded)
    following = advance_batch(padded, batch.tokens, pool) if gpu.is_greedy and gpu.launcher.is_lazy else None
    if following is not None:
        gpu.ahead = Ahead(graph, following, results[1], _start(gpu, graph, results[1], following))
    logits, ids, logprobs = results
    if padded.tokens > batch.tokens:
        logits, ids, logprobs = (array[: batch.tokens] for array in results)
    gpu.drawn = (logits, ids, logprobs)
    return logits


def _start(gpu: Gpu, graph: _Graph, token_ids: Any, batch: RaggedBatch) -> tuple[Any, Any, Any]:
    results = graph.replay(token_ids, gpu.mx.array(pack_batch(batch)))
    gpu.submit(results[1], results[2])
    gpu.last_expanded = results[1]
    return results


def _record(gpu: Gpu, ledger: Ledger, compute: Compute, batch: RaggedBatch) -> _Graph:
    mx, before = gpu.mx, ledger.snapshot()

    def step(token_ids: Any, packed: Any) -> tuple[Any, Any, Any]:
        gpu.place_traced(batch, (token_ids, *unpack_batch(packed, *batch.page_table.shape)))
        logits = settle(compute(batch)).astype(mx.float32)
        gpu.pending = []
        gpu.forget_placed()
        ids = mx.argmax(logits, axis=1).astype(mx.int32)
        return logits, ids, mx.max(logits, axis=1) - mx.logsumexp(logits, axis=1)

    if not gpu.launcher.is_lazy:
        return _Graph(step, [])
    replay = mx.compile(step)
    # traced by this; that the step is computed twice changes nothing
    mx.eval(replay(mx.array(batch.token_ids), mx.array(pack_batch(batch))))
    return _Graph(replay, ledger.take_back(before))


def advance_batch(batch: RaggedBatch, rows: int, pool: Pool) -> RaggedBatch | None:
    """The step after this one, its tokens unknown; None where one of the `rows` sequences has no page for it yet."""
    spare, page_size = pool.shape[0], pool.shape[2]
    positions = batch.positions.copy()
    positions[:rows] += 1
    columns = positions // page_size
    if columns.max() >= batch.page_table.shape[1]:
        return None
    pages = batch.page_table[np.arange(len(columns)), columns]
    if (pages[:rows] == spare).any():
        return None
    return RaggedBatch(
        token_ids=batch.token_ids,
        positions=positions,
        slots=pages * np.int32(page_size) + positions % np.int32(page_size),
        query_starts=batch.query_starts,
        context_lengths=positions + np.int32(1),
        page_table=batch.page_table,
        output_rows=batch.output_rows,
    )


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
    """All integers of a step but its tokens, in one array."""
    columns = (batch.positions, batch.slots, batch.context_lengths)
    return np.concatenate([*columns, batch.page_table.reshape(-1)])


def unpack_batch(packed: Any, rows: int, width: int) -> tuple[Any, ...]:
    """Positions, slots, lengths and page table out of what `pack_batch` made."""
    columns = [packed[index * rows : (index + 1) * rows] for index in range(3)]
    return (*columns, packed[3 * rows :].reshape(rows, width))


def _extend(values: np.typing.NDArray[np.int32], more: int, filler: int) -> np.typing.NDArray[np.int32]:
    return np.concatenate([values, np.full(more, filler, np.int32)])


def _round_up(count: int) -> int:
    return 1 << (count - 1).bit_length()
