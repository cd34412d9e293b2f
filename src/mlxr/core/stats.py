"""Statistics of an engine, its cache and its kernels at one moment: plain values for any thread.

`Counters` only grow from the moment an engine is made, and the reader subtracts: `/metrics`, the live view, the admin
routes and `LLM.stats` report these same numbers. A `LiveReading` is one update of the live view; docs/page-live.md
explains its fields, and the server sends them as JSON under these names, whole or as differences
(`server/live_events`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import IntEnum, StrEnum
from types import MappingProxyType
from typing import Any, Literal

from mlxr.core.frozen import frozen


@dataclass(slots=True, kw_only=True)
class PrefixCounters:
    """Counts of prompt tokens by the place where their pages were found."""

    memory_hit_tokens: int = 0
    disk_hit_tokens: int = 0
    peer_hit_tokens: int = 0  # computed by another process and brought here
    missed_tokens: int = 0

    @property
    def hit_tokens(self) -> int:
        """The tokens that did not need to be computed."""
        return self.memory_hit_tokens + self.disk_hit_tokens + self.peer_hit_tokens


@dataclass(slots=True, kw_only=True)
class Counters(PrefixCounters):
    """Counts of an engine's work since it was made."""

    steps: int = 0
    failed_steps: int = 0
    prefill_tokens: int = 0  # of prompts, and those computed again after a preemption
    decode_tokens: int = 0  # of answers, written to the cache
    drafted_tokens: int = 0  # computed as part of a draft
    accepted_tokens: int = 0  # drafted tokens that became part of the answer
    recomputed_tokens: int = 0  # computed once more because of a preemption
    preemptions: int = 0  # times that a running answer had to give its pages back
    late_answers: int = 0  # ended by their deadline
    refused_requests: int = 0  # found the queue full
    evicted_pages: int = 0  # cached pages that were evicted
    dropped_pages: int = 0  # pages that were not stored on disk, or did not stay there
    copied_bytes: int = 0  # of keys and values, copied by the cache path instead of being read in place

    def since(self, before: Counters) -> dict[str, int]:
        """Return the counters that grew since `before`, and by how much."""
        added = ((row.name, getattr(self, row.name) - getattr(before, row.name)) for row in fields(self))
        return {name: count for name, count in added if count}


@frozen
class Dispatch:
    """The number of runs of an operator in one implementation.

    Implementations are "cpu" (native), "gpu" (our kernels, and the library that recorded steps multiply with), "mlx"
    (MLX's own operations, on any device) and "reference" (NumPy).
    """

    operator: str
    implementation: str
    variant: str  # names the kernel and the form of the numbers
    count: int


@frozen
class ExpertRows:
    """The number of rows that one kernel multiplied by weights of experts, in one form of the weights.

    Each pair of a token and an expert is a row of two products, gate with up and down; on a CPU weights of several
    types are multiplied separately.
    """

    implementation: str
    kernel: str
    rows: int


MAX_LOG = 256  # entries in a change
Phase = Literal["prefill", "decode"]
Kind = Literal["started", "ended", "preempted", "refused", "evicted", "dropped", "failed"]


class Holder(IntEnum):
    """The kind of holder of a page; the first part of the page's code."""

    FREE = 0
    PRIVATE = 1
    SHARED = 2
    CACHED = 3


class StorePlace(IntEnum):
    """The state of a page on its way to disk; the second part of the page's code."""

    NONE = 0
    WAITING = 1
    ON_DISK = 2


def make_code(holder: int, place: int) -> int:
    """Return the code of a page in `PageMap.codes`."""
    return holder + 4 * place


@frozen
class PageMap:
    """The pages of layers whose cache has one shape, and their evictions and copies since the reading before.

    Recurrent layers hold `states`: a page is a slot for the state of all of them, and a cached one is a snapshot.
    """

    group: int
    name: str
    layers: int
    page_size: int
    page_bytes: int
    holds: Literal["pages", "states"]
    short_tokens: int  # prompt tokens computed because this group lacked pages that another group had
    codes: bytes  # of each page, see `make_code`
    evicted: list[int]  # pages that were evicted
    copied: list[tuple[int, int]]  # copies on write: source, target


@frozen
class TablePart:
    """The pages of a sequence in one group from place `start` on, to the end."""

    group: int
    start: int
    pages: list[int]


@frozen
class SequenceRow:
    """An answer that runs."""

    request: int
    index: int  # among the answers to the request
    client: str | None
    priority: int
    phase: Phase
    prompt_tokens: int
    cached_tokens: int  # of the prompt, from the cache
    tokens: int  # of prompt and answer so far
    written_tokens: int  # with keys and values in pages
    end_tokens: int  # at which it ends at the latest
    tables: list[TablePart]


@frozen
class Queue:
    """The numbers of waiting and of running answers."""

    waiting: int
    running: int


@frozen
class StepSum:
    """The sums of one step or of several in a row."""

    steps: int
    seconds: float
    prefill_tokens: int
    decode_tokens: int
    read_bytes: int
    macs: int


@frozen
class StoreState:
    """Counts of a model's pages on disk."""

    entries: int
    bytes: int
    queued_pages: int  # that wait to be written


@frozen
class LogEntry:
    """An event for the log of the live view."""

    time: float  # in seconds since 1970
    kind: Kind
    reason: str
    request: int | None
    index: int | None
    text: str


@frozen
class MachineLimits:
    """The limits of the machine, as the probe measured them."""

    read_bytes_per_s: float
    int8_macs_per_s: float
    measured_at: float  # in seconds since 1970


@frozen
class WatchedModel:
    """The model of an engine, and the device that it runs on."""

    name: str
    architecture: str
    device: str
    isa: str
    threads: int
    context_tokens: int
    kv_cache: str
    weight_bytes: int


@frozen
class PageHolder:
    """An answer that holds a page."""

    request: int
    index: int
    place: int  # of the page in its text


@frozen
class PageRecord:
    """All facts of one page; fields that only indexed pages have are None for others."""

    holder: str
    store: str
    references: int
    sequences: list[PageHolder]
    place: int | None
    reuses: int | None
    followers: int | None
    age_pages: int | None


@frozen(kw_only=True)
class LiveReading:
    """The state of an engine at one moment, without its kernels; the reader subtracts the one before.

    `steps`, `log`, and the evictions and copies in the maps happened since the reading before.
    """

    is_first: bool = False  # the record begins here: nothing earlier is known
    maps: list[PageMap] = field(default_factory=list)
    sequences: list[SequenceRow] = field(default_factory=list)
    queue: Queue = Queue(0, 0)
    counters: Counters = field(default_factory=Counters)
    evictions: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))  # pages by cause, in all
    drops: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))  # pages by cause, in all
    store: StoreState | None = None
    steps: list[StepSum] = field(default_factory=list)
    log: list[LogEntry] = field(default_factory=list)
    log_left_out: int = 0  # entries beyond MAX_LOG
    processor_s: float = 0.0  # processor time of the engine's thread that the reading took


@frozen
class KernelTime:
    """The calls of one kernel: their total seconds, bytes read and written, and multiply-adds.

    Without seconds it was fused into a product, and is part of the product's time. `grid` and `threads` are the
    threadgroups of a launch on a GPU, and the threads of each; launches that differ in them have separate rows.
    """

    operator: str
    implementation: str
    variant: str
    calls: int
    seconds: float
    nbytes: int
    macs: int
    grid: tuple[int, int, int] | None = None
    threads: int = 0


@frozen
class Moment:
    """One call, from `start_ns` to `end_ns` of `time.perf_counter_ns`."""

    operator: str
    variant: str
    start_ns: int
    end_ns: int


@frozen
class Profile:
    """The kernels that ran during a profile; `moments` are single calls ordered by their ends, as many as were kept."""

    kernels: list[KernelTime]
    moments: list[Moment]

    @property
    def seconds(self) -> float:
        """The seconds that were spent in kernels."""
        return sum(row.seconds for row in self.kernels)


class EvictionCause(StrEnum):
    """The reason why a cached page was evicted."""

    GROW = "grow"  # a sequence needed a page to write into
    RESTORE = "restore"  # pages came back from the store, or from another process
    SHRINK = "shrink"  # other models needed the memory


class StoreDrop(StrEnum):
    """The reason why a page is not, or no longer, in the store."""

    ROOM = "room"  # the least recently used made room for others
    DAMAGED = "damaged"  # its checksum is wrong
    HALF_WRITTEN = "half_written"  # it is shorter or longer than a page, or was never finished
    VERSION = "version"  # another version of the format
    FOREIGN = "foreign"  # it belongs to another model, or lies under another page's name
    UNREADABLE = "unreadable"  # the system could not read it
    UNWRITABLE = "unwritable"  # the system could not write it
    QUEUE_FULL = "queue_full"  # too many pages were waiting to be written
    EVICTED = "evicted"  # it left the arena before it could be written
    CLOSED = "closed"  # the cache was closed before it could be written


@frozen
class StoreStats:
    """The numbers of a store: its contents now, and its work since it was opened."""

    folder: str
    entries: int  # this model's pages on disk
    bytes: int  # of these
    foreign_bytes: int  # of other models' pages in the same folder
    max_bytes: int
    written_pages: int
    read_pages: int
    queued_pages: int  # that wait to be written
    drops: Mapping[StoreDrop, int]  # pages by cause
    writable: bool  # False once writing has stopped


@frozen
class GroupStats:
    """Counts of the pages of one group of layers; for recurrent layers, of the slots of states."""

    name: str  # of the shape of their cache
    window: int | None
    kv_heads: int | None  # None for states
    pages: int
    free_pages: int
    held_pages: int
    shared_pages: int  # held by two or more
    cached_pages: int  # not held, but can be found; for states, snapshots
    peak_pages: int  # the most ever held
    page_bytes: int
    evictions: Mapping[EvictionCause, int]

    @property
    def peak_bytes(self) -> int:
        """The bytes of the most pages ever held."""
        return self.peak_pages * self.page_bytes


class GroupSum:
    """A property that is the sum of a number over the object's `groups`."""

    def __init__(self, count: Callable[[GroupStats], int]) -> None:
        self._count = count

    def __get__(self, stats: Any, owner: object = None) -> int:
        return sum(map(self._count, stats.groups))


class PageSums:
    """Sums over the groups of layers. A page is used (some request holds it), cached (found, not held) or free."""

    __slots__ = ()

    pages = GroupSum(lambda group: group.pages)
    used_pages = GroupSum(lambda group: group.held_pages)
    shared_pages = GroupSum(lambda group: group.shared_pages)  # used pages that several requests hold
    cached_pages = GroupSum(lambda group: group.cached_pages)
    free_pages = GroupSum(lambda group: group.free_pages)
    peak_pages = GroupSum(lambda group: group.peak_pages)  # the most ever used at once, group by group
    page_bytes = GroupSum(lambda group: 0 if group.kv_heads is None else group.page_bytes)  # of a page of tokens
    used_bytes = GroupSum(lambda group: group.held_pages * group.page_bytes)
    shared_bytes = GroupSum(lambda group: group.shared_pages * group.page_bytes)
    cached_bytes = GroupSum(lambda group: group.cached_pages * group.page_bytes)
    peak_bytes = GroupSum(lambda group: group.peak_bytes)


@dataclass(slots=True, kw_only=True)
class CacheStats(PageSums, PrefixCounters):
    """Counts of the cache's work, and the pages of all groups of layers."""

    evictions: Mapping[EvictionCause, int]  # cached pages that were evicted
    store: StoreStats | None  # None without a store
    groups: tuple[GroupStats, ...]
    short_tokens: Mapping[str, int]  # by a group's name: missed tokens that another group had and this one lacked
