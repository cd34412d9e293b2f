"""The events of `GET /v1/admin/live`: made of readings of an engine, and the bytes that are sent.

A snapshot is one reading, a change the difference between two. docs/page-live.md explains every field.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, Literal

import numpy as np
from pydantic import TypeAdapter

from mlxr.core.stats import (
    MAX_LOG,
    Counters,
    Dispatch,
    Kind,
    LiveReading,
    LogEntry,
    MachineLimits,
    PageMap,
    PageRecord,
    Queue,
    SequenceRow,
    StepSum,
    StoreState,
    TablePart,
    WatchedModel,
)

Run = tuple[int, int, int]  # first page, number of pages, their code
_EQUAL = re.compile(rb"(?s)(.)\1*")


@dataclass(frozen=True, slots=True)
class GroupState:
    """The pages of layers whose cache has one shape, see `PageMap`; `runs` cover all of them."""

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
    """The pages of a group that have another code now, and what happened to pages."""

    group: int
    runs: list[Run]
    evicted: list[int]  # pages that were given up
    copied: list[tuple[int, int]]  # copies on write: source, target
    short_tokens: int  # that were added


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Holds all there is to know."""

    time: float
    models: list[str]
    model: WatchedModel | None = None
    groups: list[GroupState] = field(default_factory=list)
    sequences: list[SequenceRow] = field(default_factory=list)
    queue: Queue = field(default_factory=lambda: Queue(0, 0))
    counters: Counters = field(default_factory=Counters)
    store: StoreState | None = None
    kernels: list[Dispatch] = field(default_factory=list)
    limits: MachineLimits | None = None
    limits_hint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Says what has changed in the `seconds` before `time`; what has not is empty, None or 0."""

    time: float
    seconds: float
    models: list[str] = field(default_factory=list)
    groups: list[GroupChange] = field(default_factory=list)
    sequences: list[SequenceRow] = field(default_factory=list)
    gone: list[tuple[int, int]] = field(default_factory=list)
    queue: Queue | None = None
    counters: dict[str, int] = field(default_factory=dict)
    steps: list[StepSum] = field(default_factory=list)
    store: StoreState | None = None
    kernels: list[Dispatch] = field(default_factory=list)
    limits: MachineLimits | None = None
    log: list[LogEntry] = field(default_factory=list)
    log_left_out: int = 0

    @property
    def is_empty(self) -> bool:
        """Tell whether there is nothing to tell."""
        return not any(getattr(self, row.name) for row in fields(self) if row.name not in ("time", "seconds"))


@dataclass(frozen=True, slots=True, kw_only=True)
class PageDetails(PageRecord):
    """One page of a model's cache, with the answers that hold it."""

    model: str
    group: int
    page: int


@dataclass(frozen=True, slots=True)
class LiveEvents:
    """The data of each event of the stream by the event's name."""

    snapshot: Snapshot
    change: Change


def write_snapshot(snapshot: Snapshot) -> bytes:
    """The frame of a snapshot."""
    return _write_frame("snapshot", _adapt(Snapshot).dump_json(snapshot))


def write_change(change: Change) -> bytes:
    """The frame of a change, without the sections in which nothing has changed."""
    return _write_frame("change", _adapt(Change).dump_json(change, exclude_defaults=True))


def write_page(details: PageDetails) -> bytes:
    """The body that tells about one page."""
    return _adapt(PageDetails).dump_json(details)


def write_limits(limits: MachineLimits) -> bytes:
    """The body that tells what the machine can do."""
    return _adapt(MachineLimits).dump_json(limits)


def _write_frame(event: str, data: bytes) -> bytes:
    return b"event: " + event.encode() + b"\ndata: " + data + b"\n\n"


@cache
def _adapt(kind: type[Any]) -> TypeAdapter[Any]:
    """Return what turns such values into JSON; made when the first is sent."""
    return TypeAdapter(kind)


def make_snapshot(reading: LiveReading, time: float, models: list[str]) -> Snapshot:
    """The snapshot of an engine, its model, kernels and limits aside."""
    return Snapshot(
        time=time,
        models=models,
        groups=[
            GroupState(
                group=pages.group,
                name=pages.name,
                layers=pages.layers,
                pages=len(pages.codes),
                page_size=pages.page_size,
                page_bytes=pages.page_bytes,
                holds=pages.holds,
                short_tokens=pages.short_tokens,
                runs=[(run.start(), run.end() - run.start(), run[0][0]) for run in _EQUAL.finditer(pages.codes)],
            )
            for pages in reading.maps
        ],
        sequences=reading.sequences,
        queue=reading.queue,
        counters=reading.counters,
        store=reading.store,
    )


def compare(
    before: LiveReading, now: LiveReading, time: float, seconds: float, more: Iterable[LogEntry] = ()
) -> Change:
    """The difference between two readings, kernels and limits aside; `more` belongs into the log."""
    rows = {(row.request, row.index): row for row in before.sequences}
    gone = rows.keys() - {(row.request, row.index) for row in now.sequences}
    changes = [_compare_maps(one, other) for one, other in zip(before.maps, now.maps, strict=True)]
    lost = [
        *_log_causes("evicted", before.evictions, now.evictions, time),
        *_log_causes("dropped", before.drops, now.drops, time),
    ]
    entries = sorted([*now.log, *lost, *more], key=lambda entry: entry.time)
    log = entries[-MAX_LOG:]
    return Change(
        time=time,
        seconds=seconds,
        groups=[one for one in changes if one.runs or one.evicted or one.copied or one.short_tokens],
        sequences=[
            changed
            for row in now.sequences
            if (changed := _compare_rows(rows.get((row.request, row.index)), row)) is not None
        ],
        gone=[key for key in rows if key in gone],
        queue=None if now.queue == before.queue else now.queue,
        counters=now.counters.since(before.counters),
        steps=now.steps,
        store=None if now.store == before.store else now.store,
        log=log,
        log_left_out=now.log_left_out + len(entries) - len(log),
    )


def _compare_maps(before: PageMap, now: PageMap) -> GroupChange:
    """The pages that have another code now, and what happened to pages."""
    runs: list[Run] = []
    if now.codes is not before.codes:
        codes = np.frombuffer(now.codes, np.uint8)
        changed = np.flatnonzero(codes != np.frombuffer(before.codes, np.uint8))
        runs = _join_runs(zip(changed.tolist(), codes[changed].tolist(), strict=True))
    return GroupChange(now.group, runs, now.evicted, now.copied, now.short_tokens - before.short_tokens)


def _join_runs(codes: Iterable[tuple[int, int]]) -> list[Run]:
    """Pages in ascending order with their codes; neighbours with one code become one run."""
    runs: list[Run] = []
    first, count, known = 0, 0, -1
    for page, code in codes:
        if code == known and page == first + count:
            count += 1
            continue
        if count:
            runs.append((first, count, known))
        first, count, known = page, 1, code
    return [*runs, (first, count, known)] if count else runs


def _compare_rows(before: SequenceRow | None, now: SequenceRow) -> SequenceRow | None:
    """The row with those parts of its tables that are other than `before`; None if nothing is."""
    if before is None:
        return now
    if now == before:
        return None
    parts = [cut_table(one, other) for one, other in zip(before.tables, now.tables, strict=True)]
    return replace(now, tables=[part for part in parts if part is not None])


def cut_table(before: TablePart, now: TablePart) -> TablePart | None:
    """Return what has to replace the end of `before`; None where they are equal."""
    if before.pages == now.pages:
        return None
    start = len(before.pages)
    if now.pages[:start] != before.pages:
        pairs = enumerate(zip(before.pages, now.pages, strict=False))
        start = next((place for place, (one, other) in pairs if one != other), min(start, len(now.pages)))
    return TablePart(now.group, start, now.pages[start:])


def _log_causes(kind: Kind, before: Mapping[str, int], now: Mapping[str, int], time: float) -> Sequence[LogEntry]:
    """Log pages that have gone, by cause."""
    added = ((cause, count - before.get(cause, 0)) for cause, count in now.items())
    return [LogEntry(time, kind, str(cause), None, None, str(count)) for cause, count in added if count]
