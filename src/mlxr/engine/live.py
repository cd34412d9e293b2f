"""What an engine does, for whoever watches: recorded between two readings, and only while somebody reads.

Belongs to the engine's thread. While it is off it holds nothing and its notes are not called; a reading turns it on,
and it turns itself off when nobody has read for a while. All that it keeps is bounded.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from operator import add
from typing import TypeVar

from mlxr.cache.arena import ModelArena
from mlxr.cache.kv_cache import KVCache
from mlxr.cache.shapes import CacheShape
from mlxr.cache.stats import CacheTotals
from mlxr.cache.watch import CacheWatch
from mlxr.core.counters import Counters
from mlxr.core.live import (
    MAX_LOG,
    Kind,
    LiveChange,
    LiveState,
    LogEntry,
    PageHolder,
    PageRecord,
    SequenceRow,
    StepSum,
    StoreState,
    TablePart,
)
from mlxr.core.types import FinishReason
from mlxr.engine.chunk import Chunk
from mlxr.engine.scheduler import Scheduler
from mlxr.engine.sequence import Sequence
from mlxr.engine.stats import Work, read_counters, read_queue
from mlxr.kernels.ledger import Ledger
from mlxr.models.step_work import StepWork

MAX_STEP_SUMS = 16
FORGET_S = 10.0  # after which a record that nobody reads ends
MAX_ERROR_CHARACTERS = 500
Cause = TypeVar("Cause", bound=str)
Key = tuple[int, int]  # request and index of an answer


@dataclass(frozen=True, slots=True)
class LiveReading:
    """`change` is what happened since the reading before, None if there was none; `state` is there where asked for.

    `processor_s` are the seconds of processor time that the reading took the engine's thread.
    """

    change: LiveChange | None
    state: LiveState | None
    processor_s: float = 0.0


class Live:
    """The record of one engine, off at first."""

    def __init__(
        self,
        arena: ModelArena,
        cache: KVCache,
        scheduler: Scheduler,
        work: Work,
        ledger: Ledger,
        clock: Callable[[], float],
    ) -> None:
        self._arena, self._cache, self._scheduler, self._clock = arena, cache, scheduler, clock
        self._work, self._ledger = work, ledger
        self.record: Record | None = None

    def read(self, step_work: StepWork, *, full: bool) -> LiveReading:
        """Return what has happened since the last reading, with `full` the state too. The first begins the record."""
        start_s, change = time.thread_time(), None
        if self.record is None:
            watch = self._cache.watch()
            self._scheduler.preempted = []
            meter = _Meter(step_work, self._arena)
            self.record = Record(watch, self._scheduler, self._work, meter, self.count)
        else:
            change = self.record.read_change()
        self.record.read_s = self._clock()
        state = self.record.read_state() if full else None
        return LiveReading(change, state, time.thread_time() - start_s)

    def stop(self) -> None:
        """End the record and forget it."""
        if self.record is not None:
            self.record = None
            self._scheduler.preempted = None
            self._cache.unwatch()

    def stop_if_forgotten(self, now: float) -> None:
        """End a record that nobody reads."""
        if self.record is not None and now - self.record.read_s > FORGET_S:
            self.stop()

    def describe_page(self, group: int, page: int) -> PageRecord | None:
        """One page of a group in full; None if there is no such page."""
        record = self._cache.describe_page(group, page)
        if record is None:
            return None
        holders = [
            PageHolder(sequence.id, sequence.index, table.pages.index(page))
            for sequence in self._scheduler.running
            if page in (table := sequence.table.groups[group]).pages
        ]
        return replace(record, sequences=holders)

    def count(self) -> tuple[Counters, CacheTotals]:
        """Return the counters, and the cache's part of them by cause."""
        totals = self._cache.totals()
        return read_counters(self._work, self._scheduler, totals, self._ledger), totals


class Record:
    """From the first reading on: what was given out last, and what has happened since. Notes come from the engine."""

    def __init__(
        self,
        watch: CacheWatch,
        scheduler: Scheduler,
        work: Work,
        meter: _Meter,
        count: Callable[[], tuple[Counters, CacheTotals]],
    ) -> None:
        self.watch, self.read_s = watch, 0.0
        self._scheduler, self._work, self._meter, self._count = scheduler, work, meter, count
        self._sums = _StepSums()
        self._log: deque[LogEntry] = deque(maxlen=MAX_LOG)
        self._logged = 0
        self._tokens = work.prefill_tokens, work.decode_tokens
        self._placed = list(scheduler.running)  # as they were when moves were looked for last
        self._running = {_key(sequence) for sequence in self._placed}
        self._preempted = {_key(sequence) for sequence in scheduler.waiting if _was_running(sequence)}
        self._rows = {_key(sequence): _describe(sequence) for sequence in scheduler.running}
        self._queue = read_queue(self._scheduler)
        self._counters, self._totals = count()

    def begin_step(self, chunks: Iterable[Chunk]) -> tuple[int, int]:
        """A step with `chunks` is about to be computed; what it reads and computes, for `end_step`."""
        if self._scheduler.preempted or self._scheduler.running != self._placed:
            self._note_moves()
        return self._meter.measure(chunks)

    def end_step(self, measures: tuple[int, int], seconds: float) -> None:
        """The step has been computed."""
        before, now = self._tokens, (self._work.prefill_tokens, self._work.decode_tokens)
        self._tokens = now
        self._sums.add(1, seconds, now[0] - before[0], now[1] - before[1], *measures)

    def note_failure(self, error: str) -> None:
        """A step has failed."""
        self._note("failed", "step", None, error)

    def note_end(self, sequence: Sequence, reason: FinishReason, error: str | None) -> None:
        """An answer has ended."""
        self._note_moves()
        self._running.discard(_key(sequence))
        self._preempted.discard(_key(sequence))
        self._note("ended", reason.value, sequence, error or "")

    def read_change(self) -> LiveChange:
        """Return what has happened since the last time."""
        self._note_moves()
        counters, totals = self._count()
        self._note_counts("evicted", self._totals.evictions, totals.evictions)
        if totals.store is not None and self._totals.store is not None:
            self._note_counts("dropped", self._totals.store.drops, totals.store.drops)
        queue, store, stored = read_queue(self._scheduler), _describe_store(totals), _describe_store(self._totals)
        rows = {_key(sequence): _describe(sequence) for sequence in self._scheduler.running}
        change = LiveChange(
            groups=self.watch.read_changes(),
            sequences=[changed for key, row in rows.items() if (changed := _compare(self._rows.get(key), row))],
            gone=[key for key in self._rows if key not in rows],
            queue=None if queue == self._queue else queue,
            counters=counters.since(self._counters),
            steps=self._sums.take(),
            store=None if store == stored else store,
            log=list(self._log),
            log_left_out=self._logged - len(self._log),
        )
        self._rows, self._queue, self._counters, self._totals = rows, queue, counters, totals
        self._log.clear()
        self._logged = 0
        return change

    def read_state(self) -> LiveState:
        """Everything as it was when the change was read last."""
        return LiveState(
            groups=self.watch.read_state(),
            sequences=list(self._rows.values()),
            queue=self._queue,
            counters=self._counters,
            store=_describe_store(self._totals),
        )

    def check(self) -> None:
        """Prove that what was given out is how things are, right after a reading; raises AssertionError."""
        self.watch.check()
        rows = {_key(sequence): _describe(sequence) for sequence in self._scheduler.running}
        if rows != self._rows:
            raise AssertionError("the rows of running answers are not those that were given out")
        if read_queue(self._scheduler) != self._queue or self._count()[0] != self._counters:
            raise AssertionError("queue and counters are not those that were given out")

    def _note_moves(self) -> None:
        """Log who was preempted and who has begun to run since the last time."""
        for sequence, reason in self._scheduler.preempted or ():
            self._running.discard(_key(sequence))
            self._preempted.add(_key(sequence))
            self._note("preempted", reason, sequence)
        if self._scheduler.preempted:
            self._scheduler.preempted.clear()
        self._placed = list(self._scheduler.running)
        for sequence in self._scheduler.running:
            key = _key(sequence)
            if key not in self._running:
                self._running.add(key)
                self._note("started", "resumed" if key in self._preempted else "new", sequence)
                self._preempted.discard(key)

    def _note_counts(self, kind: Kind, before: Mapping[Cause, int], now: Mapping[Cause, int]) -> None:
        """Log pages that have gone, by cause."""
        for cause, count in now.items():
            if count != before[cause]:
                self._note(kind, str(cause), None, str(count - before[cause]))

    def _note(self, kind: Kind, reason: str, sequence: Sequence | None, text: str = "") -> None:
        request, index = (None, None) if sequence is None else _key(sequence)
        self._log.append(LogEntry(time.time(), kind, reason, request, index, text[:MAX_ERROR_CHARACTERS]))
        self._logged += 1


class _Meter:
    """Counts what steps read and compute."""

    def __init__(self, work: StepWork, arena: ModelArena) -> None:
        self._work = work
        paged = [group for group in arena.arenas if isinstance(group.shape, CacheShape)]
        arenas = zip(work.attention, paged, strict=True)
        self._groups = [(attention, group.page_bytes / group.page_size) for attention, group in arenas]
        self._state_bytes = sum(group.page_bytes for group in arena.arenas if group not in paged)

    def measure(self, chunks: Iterable[Chunk]) -> tuple[int, int]:
        """Bytes read and multiply-adds of one step, whose tokens do not count as written yet."""
        work = self._work
        tokens = outputs = macs = 0
        read_bytes = 0.0
        for chunk in chunks:
            count, start = chunk.rows, chunk.sequence.table.length_tokens
            tokens += count
            outputs += chunk.output_rows
            if chunk.sequence.scores is not None:
                outputs += chunk.hidden_tokens
            for attention, position_bytes in self._groups:
                pairs, positions = attention.count(start, count)
                macs += attention.pair_macs * pairs
                read_bytes += position_bytes * positions
            read_bytes += self._state_bytes
        return work.count_weight_bytes(tokens) + round(
            read_bytes
        ), macs + tokens * work.token_macs + outputs * work.output_macs


class _StepSums:
    """Steps in the order of time, at most MAX_STEP_SUMS: when more come, neighbours are added up.

    A sum is a list while it grows, as making a StepSum takes longer than all else that is done for a step.
    """

    def __init__(self) -> None:
        self._sums: list[list[float]] = []
        self._width = 1  # steps in each sum, the last one perhaps aside

    def add(self, *step: float) -> None:
        """Take in one more step: the fields of a StepSum, of which the first is 1."""
        if self._sums and self._sums[-1][0] < self._width:
            self._sums[-1] = list(map(add, self._sums[-1], step))
            return
        if len(self._sums) == MAX_STEP_SUMS:
            pairs = zip(self._sums[::2], self._sums[1::2], strict=True)
            self._sums = [list(map(add, one, other)) for one, other in pairs]
            self._width *= 2
        self._sums.append(list(step))

    def take(self) -> list[StepSum]:
        """All since the last time."""
        taken, self._sums, self._width = self._sums, [], 1
        return [StepSum(*values) for values in taken]  # type: ignore[arg-type]  # only the seconds are no integers


def _key(sequence: Sequence) -> Key:
    return sequence.id, sequence.index


def _was_running(sequence: Sequence) -> bool:
    """Tell whether a sequence that waits has run before."""
    return sequence.computed_tokens > sequence.cached_tokens or len(sequence.tokens) > sequence.prompt_tokens


def _describe(sequence: Sequence) -> SequenceRow:
    table = sequence.table
    return SequenceRow(
        request=sequence.id,
        index=sequence.index,
        client=sequence.request.client,
        priority=sequence.request.priority,
        phase="decode" if len(sequence.tokens) > sequence.prompt_tokens else "prefill",
        prompt_tokens=sequence.prompt_tokens,
        cached_tokens=sequence.cached_tokens,
        tokens=len(sequence.tokens),
        written_tokens=table.length_tokens,
        end_tokens=sequence.end_tokens,
        tables=[TablePart(group, 0, list(part.pages)) for group, part in enumerate(table.groups)],
    )


def _compare(before: SequenceRow | None, now: SequenceRow) -> SequenceRow | None:
    """The row with those parts of its tables that are other than `before`; None if nothing is."""
    if before is None:
        return now
    if now == before:
        return None
    parts = [_cut(one, other) for one, other in zip(before.tables, now.tables, strict=True)]
    return replace(now, tables=[part for part in parts if part is not None])


def _cut(before: TablePart, now: TablePart) -> TablePart | None:
    """Return what has to replace the end of `before`."""
    if before.pages == now.pages:
        return None
    start = len(before.pages)
    if now.pages[:start] != before.pages:
        pairs = enumerate(zip(before.pages, now.pages, strict=False))
        start = next((place for place, (one, other) in pairs if one != other), min(start, len(now.pages)))
    return TablePart(now.group, start, now.pages[start:])


def _describe_store(totals: CacheTotals) -> StoreState | None:
    store = totals.store
    return None if store is None else StoreState(store.entries, store.bytes, store.queued_pages)
