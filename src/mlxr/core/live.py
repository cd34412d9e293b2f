"""What a watcher of an engine is told: its state at one moment, and what has changed since the moment before.

docs/page-live.md explains every field; the server sends these values as JSON under these names. Values are never
changed once they are made, so any thread may read them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

from mlxr.core.counters import Counters

MAX_LOG = 256  # entries in a change
Run = tuple[int, int, int]  # first page, number of pages, their code
Phase = Literal["prefill", "decode"]
Kind = Literal["started", "ended", "preempted", "refused", "evicted", "dropped", "failed"]


class Holder(IntEnum):
    """Says who holds a page; the first part of its code."""

    FREE = 0
    PRIVATE = 1
    SHARED = 2
    CACHED = 3


class StorePlace(IntEnum):
    """Says how far a page is on its way to disk; the second part of its code."""

    NONE = 0
    WAITING = 1
    ON_DISK = 2


def make_code(holder: int, place: int) -> int:
    """The code of a page in runs."""
    return holder + 4 * place


@dataclass(frozen=True, slots=True)
class GroupState:
    """The pages of layers whose cache has one shape; `runs` cover all of them.

    Recurrent layers hold `states`: a page is a slot for the state of all of them, and a cached one is a snapshot.
    `short_tokens` are those of prompts that were computed because this group had nothing where another group had.
    """

    group: int
    name: str
    layers: int
    pages: int
    page_size: int
    page_bytes: int
    holds: Literal["pages", "states"]
    short_tokens: int
    runs: list[Run]


@dataclass(frozen=True, slots=True)
class GroupChange:
    """Pages of a group that have another code now, those that were given up, and copies on write (source, target).

    `short_tokens` are those that were added.
    """

    group: int
    runs: list[Run]
    evicted: list[int]
    copied: list[tuple[int, int]]
    short_tokens: int


@dataclass(frozen=True, slots=True)
class TablePart:
    """The pages of a sequence in one group from place `start` on, to the end."""

    group: int
    start: int
    pages: list[int]


@dataclass(frozen=True, slots=True)
class SequenceRow:
    """An answer that runs."""

    request: int
    index: int
    client: str | None
    priority: int
    phase: Phase
    prompt_tokens: int
    cached_tokens: int
    tokens: int
    written_tokens: int
    end_tokens: int
    tables: list[TablePart]


@dataclass(frozen=True, slots=True)
class Queue:
    """Says how many answers wait for their turn, and how many run."""

    waiting: int
    running: int


@dataclass(frozen=True, slots=True)
class StepSum:
    """The sum of one step or of several that followed one another."""

    steps: int
    seconds: float
    prefill_tokens: int
    decode_tokens: int
    read_bytes: int
    macs: int


@dataclass(frozen=True, slots=True)
class StoreState:
    """A model's pages on disk; `queued_pages` wait to be written."""

    entries: int
    bytes: int
    queued_pages: int


@dataclass(frozen=True, slots=True)
class LogEntry:
    """Something that happened; `time` is in seconds since 1970."""

    time: float
    kind: Kind
    reason: str
    request: int | None
    index: int | None
    text: str


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """Says what the machine can do, as the probe measured it at `measured_at` (seconds since 1970)."""

    read_bytes_per_s: float
    int8_macs_per_s: float
    measured_at: float


@dataclass(frozen=True, slots=True)
class WatchedModel:
    """The model of an engine, and where it runs."""

    name: str
    architecture: str
    device: str
    isa: str
    threads: int
    context_tokens: int
    kv_cache: str
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class PageHolder:
    """An answer that holds a page, as number `place` of its text."""

    request: int
    index: int
    place: int


@dataclass(frozen=True, slots=True)
class PageRecord:
    """One page in full; what only indexed pages have is None for the others."""

    holder: str
    store: str
    references: int
    sequences: list[PageHolder]
    place: int | None
    reuses: int | None
    followers: int | None
    age_pages: int | None


@dataclass(frozen=True, slots=True)
class LiveState:
    """All that is known of an engine at one moment, its kernels aside."""

    groups: list[GroupState] = field(default_factory=list)
    sequences: list[SequenceRow] = field(default_factory=list)
    queue: Queue = Queue(0, 0)
    counters: Counters = field(default_factory=Counters)
    store: StoreState | None = None


@dataclass(frozen=True, slots=True)
class LiveChange:
    """Says what has changed since the moment before, its kernels aside; what has not is empty, None or 0."""

    groups: list[GroupChange] = field(default_factory=list)
    sequences: list[SequenceRow] = field(default_factory=list)
    gone: list[tuple[int, int]] = field(default_factory=list)
    queue: Queue | None = None
    counters: dict[str, int] = field(default_factory=dict)
    steps: list[StepSum] = field(default_factory=list)
    store: StoreState | None = None
    log: list[LogEntry] = field(default_factory=list)
    log_left_out: int = 0
