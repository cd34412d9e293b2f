"""Recorded steps: the one that runs now, and the one that runs ahead of it.

A step is recorded by the driver or by MLX (`graph`); this module has what both have in common. When tokens are drawn,
the next step is started on them before they are read, so that nothing waits for the host. If another step is wanted
then, the started one is dropped, and what it wrote is written again before anybody reads it. This module knows no
model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from types import EllipsisType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mlxr.core.frozen import frozen
from mlxr.kernels.gpu.kernel import Kernel
from mlxr.kernels.gpu.mlx import Mlx
from mlxr.kernels.gpu.pool import Pool
from mlxr.kernels.gpu.recording import Launches, Results
from mlxr.kernels.ragged import NO_STATE, RaggedBatch
from mlxr.kernels.tensor import DeviceArray

Numbers = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


@frozen
class StepPools:
    """The pools of a step: one for each group of layers with pages, and one of the recurrent layers' states, or None.

    There is at least one pool.
    """

    pages: Sequence[Pool]
    states: Pool | None = None

    @property
    def graphs(self) -> dict[object, Any]:
        """The recorded steps by shape, which the first pool keeps."""
        pool = self.pages[0] if self.pages else self.states
        assert pool is not None
        return pool.graphs

    def pair_groups(self, batch: RaggedBatch) -> list[tuple[RaggedBatch, Pool]]:
        """Return the batch of each group with pages, with the group's pool."""
        return list(zip(batch.groups, self.pages, strict=True)) if self.pages else []


class Step(Protocol):
    """A step of one class of batches."""

    @property
    def runs_ahead(self) -> bool:
        """True if starting it early pays, as that costs less than waiting for it."""

    def start(self, batch: RaggedBatch, rows: int, before: Run | None) -> Run:
        """Start computing the logits of `batch`, of which `rows` are no padding.

        Its tokens are those drawn from `before`; if that is None, those of the batch.
        """

    def draw(self, run: Run, numbers: Numbers | None) -> Results:
        """Draw tokens by `numbers` (see `launch_draw`), or take the largest logits if these are None."""

    def finish(self, run: Run) -> None:
        """Wait until `run` has written everything, unless later launches wait for that by themselves."""


@dataclass(slots=True, eq=False)
class Run:
    """A step that was started on `batch`: its `logits` (rows, vocabulary), and the tokens drawn from them.

    `token_ids` are the tokens that it computes, None until the previous step is read; `kept` is the step's own object.
    """

    step: Step
    batch: RaggedBatch
    logits: DeviceArray
    token_ids: Ints | None
    kept: Any = None
    numbers: Numbers | None = None
    results: Results | None = None

    @property
    def rows(self) -> int:
        """The number of rows without padding."""
        rows: int = self.logits.shape[0]
        return rows

    def is_for(self, step: Step, batch: RaggedBatch, rows: int, pools: StepPools) -> bool:
        """Return True if it computes `batch`, of which `rows` are no padding, by `step`."""
        owners: list[Pool | None] = [*pools.pages] or [None] * len(batch.groups)
        groups = zip(batch.groups, self.batch.groups, owners, strict=True)
        return (
            step is self.step
            and rows == self.rows
            and np.array_equal(batch.positions, self.batch.positions)
            and np.array_equal(batch.rope_rows, self.batch.rope_rows)
            and all(starmap(_have_same_places, groups))
            and _have_same_states(batch, self.batch)
            and self.token_ids is not None
            and np.array_equal(self.token_ids, batch.token_ids[:rows])
        )

    def draw(self, numbers: Numbers | None) -> None:
        """Draw tokens, unless that was done by the same numbers."""
        if self.results is None or not _are_same(self.numbers, numbers):
            self.numbers, self.results = numbers, self.step.draw(self, numbers)


class Steps:
    """The running recorded steps of one GPU. `listener` is called with the numbers of a draw before it."""

    def __init__(self) -> None:
        self.listener: Callable[[Numbers | None, Any], None] | None = None
        self._current: Run | None = None
        self._ahead: Run | None = None
        self._pools = StepPools(())

    def run(self, step: Step, batch: RaggedBatch, rows: int, pools: StepPools) -> DeviceArray:
        """Start the step on `batch`, unless it has run ahead; return its logits (rows, vocabulary)."""
        run, self._ahead = self._ahead, None
        if run is None or not run.is_for(step, batch, rows, pools):
            if run is not None:
                run.step.finish(run)
            run = step.start(batch, rows, None)
        run.batch = batch  # it has the slots that the next step writes
        self._current, self._pools = run, pools
        return run.logits

    def goes_on(self, logits: object) -> bool:
        """Return True if these are the logits of the step that runs now, and the one after it was started."""
        return self.has(logits) and self._ahead is not None

    def finish_ahead(self) -> None:
        """Let a step that runs ahead write before later launches; it may still be used afterwards."""
        if self._ahead is not None:
            self._ahead.step.finish(self._ahead)

    def has(self, logits: object) -> bool:
        """Return True if these are the logits of the step that runs now."""
        return self._current is not None and self._current.logits is logits

    def draw(self, numbers: Numbers | None, following: Numbers | EllipsisType | None) -> tuple[Ints, Numbers]:
        """Start the next step, if possible, then return the tokens of the present one, and their log-probabilities.

        `numbers` (rows, NUMBERS) say how to draw; `following` are those of the next step, ... if they are unknown.
        """
        current = self._current
        assert current is not None
        if self.listener is not None:
            self.listener(numbers, following)
        current.draw(numbers)
        if not isinstance(following, EllipsisType) and current.step.runs_ahead:
            batch = advance_batch(current.batch, current.rows, self._pools)
            if batch is not None:
                self._ahead = current.step.start(batch, current.rows, current)
                self._ahead.draw(following)
        assert current.results is not None
        ids, logprobs = split_drawn(current.results.wait(), current.rows)
        if self._ahead is not None:
            self._ahead.token_ids = ids
        return ids, logprobs

    def draw_chain(self, places: int) -> list[tuple[Ints, Numbers]]:
        """Return the likeliest tokens, and their log-probabilities, of the present step and of the steps after it.

        There are `places` steps in all, started one after another without waiting, or fewer if the pages or slots of
        the next one are unknown.
        """
        run = self._current
        assert run is not None
        run.draw(None)
        runs = [run]
        while len(runs) < places and self.listener is None and run.step.runs_ahead:
            batch = advance_batch(run.batch, run.rows, self._pools)
            if batch is None:
                break
            run = run.step.start(batch, run.rows, run)
            run.draw(None)
            runs.append(run)
        self._current = run
        return [split_drawn(run.results.wait(), run.rows) for run in runs if run.results is not None]


def advance_batch(batch: RaggedBatch, rows: int, pools: StepPools) -> RaggedBatch | None:
    """Return the batch of the next step, with unknown tokens.

    That is None if one of the `rows` sequences has no page or no slot for it yet, and after drafts, as the number of
    right ones is not known yet.
    """
    if batch.longest_run > 1 or (batch.state_nexts[:rows] == NO_STATE).any():
        return None
    positions, turns = batch.positions.copy(), batch.turns.copy()
    positions[:rows] += 1
    turns[:rows] += 1
    places = [] if pools.pages else [(batch.slots, batch.page_table)]
    for group, pool in pools.pair_groups(batch):
        slots = _find_slots(group.page_table, positions, rows, pool)
        if slots is None:
            return None
        places.append((slots, group.page_table))
    first = batch.with_tokens(
        positions=positions, turns=turns, slots=places[0][0], context_lengths=positions + np.int32(1)
    )
    following = first.with_groups(places[1:])
    if pools.states is None:
        return following
    spare = pools.states.shape[0]
    reads, writes = batch.state_writes.copy(), batch.state_nexts.copy()
    reads[rows:], writes[rows:] = NO_STATE, spare
    return following.with_states(reads, writes, spare=spare)


def _find_slots(table: Ints, positions: Ints, rows: int, pool: Pool) -> Ints | None:
    spare, page_size = pool.shape[0], pool.shape[2]
    columns = positions // page_size
    if columns.max() >= table.shape[1]:
        return None
    pages = table[np.arange(len(columns)), columns]
    if (pages[:rows] == spare).any():
        return None
    return np.asarray(pages * np.int32(page_size) + positions % np.int32(page_size), np.int32)


def pack_batch(batch: RaggedBatch, rows: int) -> Ints:
    """Return all integers of a step, except its tokens, in one array; `rows` of the batch are no padding.

    They are rows of rotation tables, lengths, the slots of states that are read and written (if there are any), slots
    and page table of each group, and `rows`.
    """
    places = [part for group in batch.groups for part in (group.slots, group.page_table.reshape(-1))]
    states, live = (batch.state_reads, batch.state_writes), np.array([rows], np.int32)
    return np.concatenate([batch.rope_rows, batch.context_lengths, *states, *places, live])


def count_packed(batch: RaggedBatch) -> int:
    """Return the number of integers that `pack_batch` makes of such a batch."""
    return int(sum(map(math.prod, _list_shapes(batch))))


def unpack_batch(batch: RaggedBatch, take: Callable[[int, tuple[int, ...]], Any]) -> list[Any]:
    """Return the arrays that `pack_batch` joins for such a batch; those of states are empty if it has none.

    `take(start, shape)` returns the array of this shape from number `start` on.
    """
    shapes = _list_shapes(batch)
    starts = np.cumsum([0, *map(math.prod, shapes)])
    return [take(int(start), shape) for start, shape in zip(starts, shapes, strict=False)]


def _list_shapes(batch: RaggedBatch) -> list[tuple[int, ...]]:
    """Return the shapes of the arrays in `pack_batch`."""
    shapes: list[tuple[int, ...]] = [(batch.tokens,)] * 2
    shapes += [batch.state_reads.shape, batch.state_writes.shape]
    shapes += [shape for group in batch.groups for shape in (group.slots.shape, group.page_table.shape)]
    return [*shapes, (1,)]


def _have_same_states(a: RaggedBatch, b: RaggedBatch) -> bool:
    return np.array_equal(a.state_reads, b.state_reads) and np.array_equal(a.state_writes, b.state_writes)


def _have_same_places(now: RaggedBatch, before: RaggedBatch, pool: Pool | None) -> bool:
    """Return True if both write to the same slots, and read the same pages, as far as `now` has pages.

    `before` may lack pages that only later positions need, and may have pages that no position sees any more.
    """
    if not np.array_equal(now.slots, before.slots) or now.page_table.shape != before.page_table.shape:
        return False
    same = now.page_table == before.page_table
    if pool is not None and not same.all():
        spare, _, page_size, *_ = pool.shape
        later = np.arange(same.shape[1]) * page_size >= now.context_lengths[:, None]
        same |= later | (now.page_table == spare)
    return bool(same.all())


def _are_same(a: Numbers | None, b: Numbers | None) -> bool:
    return np.array_equal(a, b) if a is not None and b is not None else a is b


NUMBERS = 8
DRAW_THREADS = 512
DRAW = Kernel(
    "draw", Path(__file__).parents[1] / "sample", "draw.body", ("logits", "numbers", "sizes"), ("out",), ("draw.h",)
)


def launch_draw(mx: Mlx, launcher: Launches, logits: DeviceArray, numbers: DeviceArray | None) -> DeviceArray:
    """Draw from logits (rows, vocabulary) by `numbers` (rows, NUMBERS), or take the largest: (2 * rows,) int32.

    The result has ids, then the bits of log-probabilities in f32.
    """
    rows, vocabulary = logits.shape
    (out,) = launcher.launch(
        DRAW,
        [logits, launcher.numbers(0.0) if numbers is None else numbers, launcher.numbers(vocabulary, rows)],
        groups=(rows, 1, 1),
        threads=DRAW_THREADS,
        outputs=[((2 * rows,), mx.int32)],
        constants={
            "RANDOM": int(numbers is not None),
            "LOWEST": 16 if logits.dtype == mx.bfloat16 else 0,
            "WIDE": 1 if vocabulary % 8 else 8,
        },
        types={"X": logits.dtype},
    )
    return out


def split_drawn(values: npt.NDArray[np.int32], rows: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Return ids and log-probabilities of the first `rows` rows of drawn values."""
    start = len(values) // 2
    return values[:rows], values[start : start + rows].view(np.float32)
