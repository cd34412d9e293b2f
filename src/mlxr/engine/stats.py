"""What an engine has done and what its cache holds, as plain numbers at one moment."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING

from mlxr.cache.prefix import NameChanges
from mlxr.cache.stats import CacheStats, CacheTotals
from mlxr.core.stats import Counters, PrefixCounters, Queue
from mlxr.engine.scheduler import Chunk
from mlxr.kernels.ledger import Ledger

if TYPE_CHECKING:
    from mlxr.engine.scheduler import Scheduler

_SUMS = ("pages", "used_pages", "shared_pages", "cached_pages", "free_pages", "peak_pages", "page_bytes")


@dataclass(slots=True, kw_only=True)
class Work(Counters):
    """The counters as the engine counts; what the scheduler, the cache and the ledger count comes in when read."""

    def count(self, chunk: Chunk) -> None:
        """`chunk` was computed, and its tokens do not count as cached yet."""
        self.recomputed_tokens += chunk.sequence.count_computed(chunk.tokens)
        if chunk.sequence.is_decoding:
            self.decode_tokens += chunk.tokens
            self.count_drafted(chunk)
        else:
            self.prefill_tokens += chunk.tokens

    def count_drafted(self, chunk: Chunk) -> None:
        """The drafted tokens of `chunk` were computed, whether they are right or not."""
        self.drafted_tokens += len(chunk.draft)
        chunk.sequence.drafted_tokens += len(chunk.draft)

    def count_accepted(self, chunk: Chunk) -> None:
        """A drafted token of `chunk` is right, and does not count as cached yet."""
        self.accepted_tokens += 1
        chunk.sequence.accepted_tokens += 1
        if not chunk.waits_for_draft:
            self.recomputed_tokens += chunk.sequence.count_computed(1)
            self.decode_tokens += 1

    def count_written(self, chunk: Chunk) -> None:
        """All of `chunk`, whose draft was right, is about to count as cached."""
        self.recomputed_tokens += chunk.sequence.count_computed(chunk.rows)
        self.decode_tokens += chunk.rows


@dataclass(frozen=True, slots=True)
class CacheMemory:
    """Bytes of a cache, which takes memory as it is used."""

    in_use_bytes: int  # of memory now
    held_bytes: int  # of these, in pages that requests hold
    max_bytes: int  # that it may take


@dataclass(frozen=True, slots=True)
class EngineReport:
    """Says what decides where a further request is best computed."""

    waiting_tokens: int  # of prompts, still to compute
    running: int  # answers that have a place
    steps: int  # since the engine was made, as `prefill_tokens`
    prefill_tokens: int
    names: NameChanges  # tells which pages can be found


def read_queue(scheduler: Scheduler) -> Queue:
    """Count the answers that wait for their turn, and those that run."""
    return Queue(sum(sequence.width for sequence in scheduler.waiting), scheduler.running_answers)


def read_counters(work: Work, scheduler: Scheduler, cache: CacheTotals, ledger: Ledger) -> Counters:
    """Return all counters of an engine as they are now."""
    counted = {row.name: getattr(work, row.name) for row in fields(Counters)}
    counted |= {row.name: getattr(cache, row.name) for row in fields(PrefixCounters)}
    counted |= {
        "preemptions": scheduler.preemptions,
        "evicted_pages": sum(cache.evictions.values()),
        "dropped_pages": 0 if cache.store is None else sum(cache.store.drops.values()),
        "copied_bytes": ledger.copied_bytes,
    }
    return Counters(**counted)


@dataclass(slots=True, kw_only=True)
class EngineStats(Counters):
    """Counters since the engine was made, and the state of its cache now.

    A page is used (some request holds it; shared when several do), cached or free; `cache` has the pages of each group
    of layers, of which those here are the sums.
    """

    kv_cache: str
    page_size: int
    arena_bytes: int  # that the cache may take
    cache_in_use_bytes: int  # of these, memory now
    heads: int  # of the model's queries
    waiting_sequences: int
    running_sequences: int
    queue: Queue  # the same in answers: a sequence whose prompt is not computed yet stands for all answers to it
    cache: CacheStats

    def to_fields(self) -> dict[str, object]:
        """All numbers by name, with the sums over the groups."""
        return {**asdict(self), **{name: getattr(self, name) for name in _SUMS}}

    @property
    def pages(self) -> int:
        """Pages of the arena."""
        return self.cache.pages

    @property
    def used_pages(self) -> int:
        """Pages that requests hold."""
        return self.cache.held_pages

    @property
    def shared_pages(self) -> int:
        """Pages that several requests hold."""
        return self.cache.shared_pages

    @property
    def cached_pages(self) -> int:
        """Pages that nobody holds and that can be found."""
        return self.cache.cached_pages

    @property
    def free_pages(self) -> int:
        """Pages that hold nothing."""
        return self.cache.free_pages

    @property
    def peak_pages(self) -> int:
        """The most pages ever used at once, group by group."""
        return sum(group.peak_pages for group in self.cache.groups)

    @property
    def page_bytes(self) -> int:
        """Bytes that a page of tokens takes in all groups that have pages, together."""
        return sum(group.page_bytes for group in self.cache.groups if group.kv_heads is not None)

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages in use now."""
        return sum(group.held_pages * group.page_bytes for group in self.cache.groups)

    @property
    def shared_bytes(self) -> int:
        """Bytes of the pages that several requests hold."""
        return sum(group.shared_pages * group.page_bytes for group in self.cache.groups)

    @property
    def cached_bytes(self) -> int:
        """Bytes of the pages that nobody holds and that can be found."""
        return sum(group.cached_pages * group.page_bytes for group in self.cache.groups)

    @property
    def peak_bytes(self) -> int:
        """Bytes of the most pages ever in use at once."""
        return sum(group.peak_bytes for group in self.cache.groups)

    @property
    def window_saved_bytes(self) -> int:
        """Bytes that windows saved at the peak, against layers that all keep everything as some of them do."""
        groups = [group for group in self.cache.groups if group.kv_heads is not None]
        pages = max((group.peak_pages for group in groups if group.window is None), default=0)
        return sum(max(0, pages - group.peak_pages) * group.page_bytes for group in groups)

    @property
    def gqa_saved_bytes(self) -> int:
        """Bytes that grouped-query attention saved at the peak, against one K and V per query head."""
        return sum(
            group.peak_bytes * (self.heads - group.kv_heads) // group.kv_heads
            for group in self.cache.groups
            if group.kv_heads is not None
        )
