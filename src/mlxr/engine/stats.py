"""Statistics of an engine: counters, the state of its cache, and a record of what happens for those who watch.

`Work` counts as the engine works. `Live` records what happens between two readings, but only while somebody reads: a
reading turns it on, and it turns itself off when nobody has read for a while. While it is off, it holds nothing and its
notes are not called. All that it keeps is bounded; the reader computes differences (`server/live_events`). For the
engine's thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields, replace
from operator import add

from mlxr.cache.arena import ModelArena
from mlxr.cache.kv_cache import KVCache
from mlxr.cache.page_map import CacheMap, describe_page
from mlxr.cache.prefix import NameChanges
from mlxr.cache.shapes import CacheShape
from mlxr.core.frozen import frozen
from mlxr.core.stats import (
    MAX_LOG,
    CacheStats,
    Counters,
    GroupStats,
    Kind,
    LiveReading,
    LogEntry,
    PageHolder,
    PageRecord,
    PageSums,
    PrefixCounters,
    Queue,
    SequenceRow,
    StepSum,
    StoreState,
    TablePart,
)
from mlxr.core.types import FinishReason
from mlxr.engine.scheduler import Chunk, Scheduler
from mlxr.engine.sequence import Sequence
from mlxr.kernels.ledger import Ledger
from mlxr.models.footprint import StepWork

_SUMS = ("pages", "used_pages", "shared_pages", "cached_pages", "free_pages", "peak_pages", "page_bytes")


@dataclass(slots=True, kw_only=True)
class Work(Counters):
    """The counters of the engine itself; those of the scheduler, the cache and the ledger are added when read."""

    def count(self, chunk: Chunk) -> None:
        """Count `chunk`, which was computed and whose tokens do not count as cached yet."""
        self.recomputed_tokens += chunk.sequence.count_computed(chunk.tokens)
        if chunk.sequence.is_decoding:
            self.decode_tokens += chunk.tokens
            self.count_drafted(chunk)
        else:
            self.prefill_tokens += chunk.tokens

    def count_drafted(self, chunk: Chunk) -> None:
        """Count the drafted tokens of `chunk` as computed, whether they are right or not."""
        self.drafted_tokens += len(chunk.draft)
        chunk.sequence.drafted_tokens += len(chunk.draft)

    def count_accepted(self, chunk: Chunk) -> None:
        """Count a drafted token of `chunk` that is right and does not count as cached yet."""
        self.accepted_tokens += 1
        chunk.sequence.accepted_tokens += 1
        if not chunk.waits_for_draft:
            self.recomputed_tokens += chunk.sequence.count_computed(1)
            self.decode_tokens += 1

    def count_written(self, chunk: Chunk) -> None:
        """Count all of `chunk`, whose draft was right, before it counts as cached."""
        self.recomputed_tokens += chunk.sequence.count_computed(chunk.rows)
        self.decode_tokens += chunk.rows


@frozen
class CacheMemory:
    """Bytes of a cache, which takes memory as it is used."""

    in_use_bytes: int  # now
    held_bytes: int  # of these, in pages that requests hold
    max_bytes: int  # that it may take


@frozen
class EngineReport:
    """The load of an engine and the names of its pages, which decide where a further request is best computed."""

    waiting_tokens: int  # of prompts, still to compute
    running: int  # answers that have a place
    steps: int  # since the engine was made, as `prefill_tokens`
    prefill_tokens: int
    names: NameChanges  # of the pages that can be found


def read_queue(scheduler: Scheduler) -> Queue:
    """Count the answers that wait for their turn, and those that run."""
    return Queue(sum(sequence.width for sequence in scheduler.waiting), scheduler.running_answers)


def read_counters(work: Work, scheduler: Scheduler, cache: KVCache, ledger: Ledger) -> Counters:
    """Return all counters of an engine as they are now."""
    counted = {row.name: getattr(work, row.name) for row in fields(Counters)}
    counted |= {row.name: getattr(cache.found, row.name) for row in fields(PrefixCounters)}
    store = cache.read_store()
    counted |= {
        "preemptions": scheduler.preemptions,
        "evicted_pages": sum(cache.count_evictions().values()),
        "dropped_pages": 0 if store is None else sum(store.drops.values()),
        "copied_bytes": ledger.copied_bytes,
    }
    return Counters(**counted)


@dataclass(slots=True, kw_only=True)
class EngineStats(PageSums, Counters):
    """Counters since the engine was made, and the state of its cache now.

    `cache` has the pages of each group of layers; the pages here are their sums.
    """

    kv_cache: str
    page_size: int
    arena_bytes: int  # that the cache may take
    cache_in_use_bytes: int  # of these, in use now
    heads: int  # query heads of the model
    waiting_sequences: int
    running_sequences: int
    encoded_pictures: int  # by the tower
    queue: Queue  # the same in answers: a sequence whose prompt is not computed yet stands for all answers to it
    cache: CacheStats

    def to_fields(self) -> dict[str, object]:
        """Return all numbers by name, with the sums over the groups."""
        return {**asdict(self), **{name: getattr(self, name) for name in _SUMS}}

    @property
    def groups(self) -> tuple[GroupStats, ...]:
        """The pages of each group of layers."""
        return self.cache.groups

    @property
    def disk_bytes(self) -> int:
        """Bytes of this model's pages in the store."""
        return 0 if self.cache.store is None else self.cache.store.bytes

    @property
    def window_saved_bytes(self) -> int:
        """Bytes that windows saved at the peak: without them, all layers would keep as many pages as those that keep
        everything."""
        groups = [group for group in self.groups if group.kv_heads is not None]
        pages = max((group.peak_pages for group in groups if group.window is None), default=0)
        return sum(max(0, pages - group.peak_pages) * group.page_bytes for group in groups)

    @property
    def gqa_saved_bytes(self) -> int:
        """Bytes that grouped-query attention saved at the peak, against one K and V per query head."""
        return sum(
            group.peak_bytes * (self.heads - group.kv_heads) // group.kv_heads
            for group in self.groups
            if group.kv_heads is not None
        )


MAX_STEP_SUMS = 16
FORGET_S = 10.0  # after which a record that nobody reads ends
MAX_ERROR_CHARACTERS = 500
Key = tuple[int, int]  # request and index of an answer


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

    def read(self, step_work: StepWork) -> LiveReading:
        """Return the state now, and what has happened since the last reading. The first one begins the record."""
        start_s, is_first = time.thread_time(), self.record is None
        if self.record is None:
            self._scheduler.preempted = []
            self.record = Record(self._cache, self._scheduler, self._work, _Meter(step_work, self._arena))
        self.record.read_s = self._clock()
        reading = self.record.read(read_counters(self._work, self._scheduler, self._cache, self._ledger))
        return replace(reading, is_first=is_first, processor_s=time.thread_time() - start_s)

    def stop(self) -> None:
        """End the record and forget it."""
        if self.record is not None:
            self.record.map.close()
            self.record = self._scheduler.preempted = None

    def stop_if_forgotten(self, now: float) -> None:
        """End a record that nobody reads."""
        if self.record is not None and now - self.record.read_s > FORGET_S:
            self.stop()

    def describe_page(self, group: int, page: int) -> PageRecord | None:
        """Return one page of a group in full; None if there is no such page."""
        record = describe_page(self._cache, group, page)
        if record is None:
            return None
        holders = [
            PageHolder(sequence.id, sequence.index, table.pages.index(page))
            for sequence in self._scheduler.running
            if page in (table := sequence.table.groups[group]).pages
        ]
        return replace(record, sequences=holders)


class Record:
    """Keeps what has happened since the last reading. Notes come from the engine."""

    def __init__(self, cache: KVCache, scheduler: Scheduler, work: Work, meter: _Meter) -> None:
        self.map, self.read_s = CacheMap(cache), 0.0
        self._cache, self._scheduler, self._work, self._meter = cache, scheduler, work, meter
        self._sums = _StepSums()
        self._log: deque[LogEntry] = deque(maxlen=MAX_LOG)
        self._logged = 0
        self._tokens = work.prefill_tokens, work.decode_tokens
        self._placed = list(scheduler.running)  # as they were at the last look for moves
        self._running = {_key(sequence) for sequence in self._placed}
        self._preempted = {_key(sequence) for sequence in scheduler.waiting if _was_running(sequence)}

    def begin_step(self, chunks: Iterable[Chunk]) -> tuple[int, int]:
        """Note that a step with `chunks` begins; return its bytes read and its multiply-adds, for `end_step`."""
        if self._scheduler.preempted or self._scheduler.running != self._placed:
            self._note_moves()
        return self._meter.measure(chunks)

    def end_step(self, measures: tuple[int, int], seconds: float) -> None:
        """Add the step, which has been computed, to the sums."""
        before, now = self._tokens, (self._work.prefill_tokens, self._work.decode_tokens)
        self._tokens = now
        self._sums.add(1, seconds, now[0] - before[0], now[1] - before[1], *measures)

    def note_failure(self, error: str) -> None:
        """Note that a step has failed."""
        self._note("failed", "step", None, error)

    def note_end(self, sequence: Sequence, reason: FinishReason, error: str | None) -> None:
        """Note that an answer has ended."""
        self._note_moves()
        self._running.discard(_key(sequence))
        self._preempted.discard(_key(sequence))
        self._note("ended", reason.value, sequence, error or "")

    def read(self, counters: Counters) -> LiveReading:
        """Return the state now, and what has happened since the last reading."""
        self._note_moves()
        store = self._cache.read_store()
        reading = LiveReading(
            maps=self.map.read(),
            sequences=[_describe(sequence) for sequence in self._scheduler.running],
            queue=read_queue(self._scheduler),
            counters=counters,
            evictions={str(cause): count for cause, count in self._cache.count_evictions().items()},
            drops={} if store is None else {str(cause): count for cause, count in store.drops.items()},
            store=None if store is None else StoreState(store.entries, store.bytes, store.queued_pages),
            steps=self._sums.take(),
            log=list(self._log),
            log_left_out=self._logged - len(self._log),
        )
        self._log.clear()
        self._logged = 0
        return reading

    def _note_moves(self) -> None:
        """Log which sequences were preempted and which have begun to run since the last call."""
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
        """Return the bytes read and the multiply-adds of one step, whose tokens do not count as written yet."""
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
    """Sums of steps in the order of time, at most MAX_STEP_SUMS: when there are more, neighbours are added up.

    A sum is a list while it grows, as making a StepSum takes longer than all else that is done for a step.
    """

    def __init__(self) -> None:
        self._sums: list[list[float]] = []
        self._width = 1  # steps in each sum; the last one may have fewer

    def add(self, *step: float) -> None:
        """Add one more step: the fields of a StepSum, of which the first is 1."""
        if self._sums and self._sums[-1][0] < self._width:
            self._sums[-1] = list(map(add, self._sums[-1], step))
            return
        if len(self._sums) == MAX_STEP_SUMS:
            pairs = zip(self._sums[::2], self._sums[1::2], strict=True)
            self._sums = [list(map(add, one, other)) for one, other in pairs]
            self._width *= 2
        self._sums.append(list(step))

    def take(self) -> list[StepSum]:
        """Return all sums since the last call."""
        taken, self._sums, self._width = self._sums, [], 1
        return [StepSum(*values) for values in taken]  # type: ignore[arg-type]  # only the seconds are no integers


def _key(sequence: Sequence) -> Key:
    return sequence.id, sequence.index


def _was_running(sequence: Sequence) -> bool:
    """Return True if a sequence that waits has run before."""
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
