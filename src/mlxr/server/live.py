"""Live views of engines: reads watched engines some times a second, and sends all watchers of one the same.

Readings take processor time from the engine, on some machines three times as much as on others. They come ten times a
second, but less often if they would take more than MAX_SHARE of one processor.

A `Watcher` is one stream, a `Channel` the reading of one engine, and `Hub` connects them. Without a watcher there is no
task, no channel and no record in any engine. Belongs to the server's event loop. docs/page-live.md describes the
events, `Snapshot` and `Change`, field by field.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlxr.core.errors import DeviceError, EngineStopped
from mlxr.core.frozen import frozen
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
from mlxr.server.activity import InFlight, in_flight
from mlxr.server.errors import ServerError
from mlxr.server.parts import parts_of
from mlxr.server.routes import Router
from mlxr.server.streaming import SSE, EventStream, sse
from mlxr.server.work import look

if TYPE_CHECKING:
    from mlxr.service.model_pool import RunningModel
    from mlxr.service.session import Session


Run = tuple[int, int, int]  # first page, number of pages, their code
_EQUAL = re.compile(rb"(?s)(.)\1*")


@frozen
class GroupState:
    """The pages of all layers with one shape of cache, see `PageMap`; `runs` cover all of them."""

    group: int
    name: str
    layers: int
    pages: int
    page_size: int
    page_bytes: int
    holds: Literal["pages", "states"]
    short_tokens: int
    runs: list[Run]


@frozen
class GroupChange:
    """The pages of a group whose code has changed, and the events of pages."""

    group: int
    runs: list[Run]
    evicted: list[int]  # pages that were given up
    copied: list[tuple[int, int]]  # copies on write: source, target
    short_tokens: int  # added since then


@frozen(kw_only=True)
class Snapshot:
    """The complete state of an engine."""

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


@frozen(kw_only=True)
class Change:
    """The changes in the `seconds` before `time`; unchanged parts are empty, None or 0."""

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
        """True if nothing has changed."""
        return not any(getattr(self, row.name) for row in fields(self) if row.name not in ("time", "seconds"))


@frozen(kw_only=True)
class PageDetails(PageRecord):
    """One page of a model's cache, with the answers that hold it."""

    model: str
    group: int
    page: int


@frozen
class LiveEvents:
    """The data of each event of the stream, by the event's name."""

    snapshot: Snapshot
    change: Change


def write_snapshot(snapshot: Snapshot) -> bytes:
    """Return the frame of a snapshot."""
    return _write_frame("snapshot", _adapt(Snapshot).dump_json(snapshot))


def write_change(change: Change) -> bytes:
    """Return the frame of a change, without the unchanged sections."""
    return _write_frame("change", _adapt(Change).dump_json(change, exclude_defaults=True))


def _write_frame(event: str, data: bytes) -> bytes:
    return b"event: " + event.encode() + b"\ndata: " + data + b"\n\n"


@cache
def _adapt(kind: type[Any]) -> TypeAdapter[Any]:
    """Return the adapter that turns such values into JSON; it is made when the first is sent."""
    return TypeAdapter(kind)


def make_snapshot(reading: LiveReading, time: float, models: list[str]) -> Snapshot:
    """Make the snapshot of an engine, without its model, kernels and limits."""
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
    """Return the difference between two readings, without kernels and limits; `more` is added to the log."""
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
    """Return the pages whose code has changed, and the events of pages."""
    runs: list[Run] = []
    if now.codes is not before.codes:
        codes = np.frombuffer(now.codes, np.uint8)
        changed = np.flatnonzero(codes != np.frombuffer(before.codes, np.uint8))
        runs = _join_runs(zip(changed.tolist(), codes[changed].tolist(), strict=True))
    return GroupChange(now.group, runs, now.evicted, now.copied, now.short_tokens - before.short_tokens)


def _join_runs(codes: Iterable[tuple[int, int]]) -> list[Run]:
    """Join pages, in ascending order with their codes, to runs of neighbours with one code."""
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
    """Return the row with only those parts of its tables that differ from `before`; None if nothing does."""
    if before is None:
        return now
    if now == before:
        return None
    parts = [cut_table(one, other) for one, other in zip(before.tables, now.tables, strict=True)]
    return replace(now, tables=[part for part in parts if part is not None])


def cut_table(before: TablePart, now: TablePart) -> TablePart | None:
    """Return the part that replaces the end of `before`; None if they are equal."""
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


logger = logging.getLogger(__name__)
INTERVAL_S, MAX_INTERVAL_S = 0.1, 0.5
MAX_SHARE = 0.0025  # a reading delays an engine that computes on all cores by some three times its own time
MAX_FRAMES, MAX_BYTES = 50, 4 << 20  # the most that wait for one watcher
RETRY_S = 5.0


class Models(Protocol):
    """The part of the pool that the hub needs."""

    def running(self) -> list[RunningModel]:
        """Return the loaded models, the last used one first."""
        ...


class Watcher:
    """One stream: a bounded queue of frames to send. `name` is the model to watch, None for any."""

    def __init__(self, name: str | None) -> None:
        self.name = name
        self.session: Session | None = None
        self.is_new = True  # it needs a snapshot
        self._frames: deque[bytes] = deque()
        self._bytes = 0
        self._is_closed = False
        self._changed = asyncio.Event()

    @property
    def wants_snapshot(self) -> bool:
        """True if a snapshot is needed and can be sent; a watcher that does not read gets none."""
        return self.is_new and not self._frames

    def push(self, frame: bytes) -> None:
        """Queue a frame; if too much waits, drop frames until the queue was sent, and then ask for a snapshot."""
        if len(self._frames) == MAX_FRAMES or self._bytes + len(frame) > max(MAX_BYTES, len(frame)):
            self.is_new = True
            return
        self._frames.append(frame)
        self._bytes += len(frame)
        self._changed.set()

    async def take(self) -> bytes | None:
        """Return the waiting frames, at least one; None once the stream has ended."""
        while not self._frames and not self._is_closed:
            self._changed.clear()
            await self._changed.wait()
        frames = b"".join(self._frames)
        self._frames.clear()
        self._bytes = 0
        return frames or None

    def close(self) -> None:
        """End the stream once the waiting frames were sent."""
        self._is_closed = True
        self._changed.set()


@dataclass(slots=True)
class Channel:
    """The reading of one engine. `calls` are those of its kernels at the `last` reading.

    `new_limits` is set if the machine was measured since then. `due_s` is the earliest time of the next reading, by
    `time.monotonic`, unless a watcher waits for a snapshot.
    """

    session: Session
    name: str
    models: list[str] = field(default_factory=list)
    calls: dict[tuple[str, str, str], int] = field(default_factory=dict)
    last: LiveReading | None = None
    read_at: float = 0.0
    due_s: float = 0.0
    new_limits: MachineLimits | None = None
    refusals: deque[LogEntry] = field(default_factory=lambda: deque(maxlen=MAX_LOG))
    reading: asyncio.Task[None] | None = None

    async def read(self, watchers: list[Watcher], model: RunningModel, models: list[str]) -> None:
        """Read the engine once and send the result to those of `watchers` that still watch it."""
        begun_s, full = time.monotonic(), any(watcher.wants_snapshot for watcher in watchers)
        kept = await self.session.find_limits() if full else None
        reading = await self.session.read_live()
        start_s = time.thread_time()
        limits = self.new_limits or kept  # it may have been measured since the file was read
        hint = None if limits is not None else self.session.explain_missing_limits()
        watchers = [watcher for watcher in watchers if watcher.session is self.session]
        now, kernels = time.time(), self.session.count_kernels()
        before, self.last = self.last, reading
        if before is None or reading.is_first:  # the record begins here, so earlier changes are unknown
            for watcher in watchers:
                watcher.is_new = True
        else:
            change = compare(before, reading, now, now - self.read_at, self.refusals)
            self.refusals.clear()
            self._send_change(change, watchers, kernels, [] if models == self.models else models)
        self.read_at, self.models = now, models
        self.calls = {_key(row): row.count for row in kernels}
        if full:
            described = self.session.describe(model.name)
            snapshot = make_snapshot(reading, now, models)
            snapshot = replace(snapshot, model=described, kernels=kernels, limits=limits, limits_hint=hint)
            _send_snapshot(snapshot, watchers)
            return  # its time tells nothing of the next reading's
        processor_s = reading.processor_s + time.thread_time() - start_s
        self.due_s = begun_s + min(processor_s / MAX_SHARE, MAX_INTERVAL_S)

    def is_due(self, watchers: list[Watcher]) -> bool:
        """Return True if it is time to read for `watchers`, and the last reading has ended."""
        if self.reading is not None and not self.reading.done():
            return False
        return time.monotonic() >= self.due_s or any(watcher.wants_snapshot for watcher in watchers)

    def _send_change(self, change: Change, watchers: list[Watcher], kernels: list[Dispatch], models: list[str]) -> None:
        whole = replace(change, models=models, kernels=self._count_new(kernels), limits=self.new_limits)
        self.new_limits = None
        if not whole.is_empty:
            frame = write_change(whole)
            for watcher in watchers:
                if not watcher.is_new:
                    watcher.push(frame)

    def _count_new(self, kernels: list[Dispatch]) -> list[Dispatch]:
        """Return the calls since the last reading, of kernels that ran."""
        new = (replace(row, count=row.count - self.calls.get(_key(row), 0)) for row in kernels)
        return [row for row in new if row.count]


class Hub:
    """All watchers, at most `max_watchers`, and the channels of the engines that they watch.

    Streams end once `is_ending` returns True.
    """

    def __init__(self, pool: Models, max_watchers: int, is_ending: Callable[[], bool]) -> None:
        self._pool, self._max_watchers, self._is_ending = pool, max_watchers, is_ending
        self._watchers: set[Watcher] = set()
        self._channels: dict[Session, Channel] = {}
        self._task: asyncio.Task[None] | None = None
        self._models: list[str] = []
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def watchers(self) -> int:
        """The number of open streams."""
        return len(self._watchers)

    def enter(self, name: str | None) -> Watcher:
        """Add a watcher of the model of that name, or of the last used; raises ServerError if there are too many."""
        if len(self._watchers) >= self._max_watchers:
            raise ServerError(
                429,
                "rate_limited",
                f"{len(self._watchers)} streams watch, at most {self._max_watchers} may; close one, or raise the "
                "setting live_watchers",
                retry_after_s=RETRY_S,
            )
        watcher = Watcher(name)
        self._watchers.add(watcher)
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        return watcher

    def leave(self, watcher: Watcher) -> None:
        """Remove a watcher; the task ends soon after the last one."""
        self._watchers.discard(watcher)

    def close(self) -> None:
        """End all streams that are open."""
        for watcher in self._watchers:
            watcher.close()

    def note_limits(self, session: Session, limits: MachineLimits) -> None:
        """Pass on limits of the machine that were measured with the threads of a model."""
        channel = self._channels.get(session)
        if channel is not None:
            channel.new_limits = limits

    def note_end(self, row: InFlight) -> None:
        """Note the end of a request; if it was refused or failed, the watchers of its model are told."""
        if not self._channels or row.failure is None or row.method != "POST":
            return
        entry = LogEntry(time.time(), "refused", row.failure.code, None, None, row.failure.reason)
        for channel in self._channels.values():
            if row.model in (None, channel.name):
                channel.refusals.append(entry)

    async def stop(self) -> None:
        """End all streams and the readings for them."""
        self.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.gather(*self._ending, return_exceptions=True)

    async def _run(self) -> None:
        """Read until the last watcher has gone, or the server is being stopped."""
        try:
            while self._watchers and not self._is_ending():
                start_s = time.monotonic()
                self._read_all()
                await asyncio.sleep(max(0.0, start_s + INTERVAL_S - time.monotonic()))
        except Exception:
            logger.exception("engines cannot be watched; all streams end")
        finally:
            self._task = None
            for watcher in self._watchers:
                watcher.close()
            self._drop(list(self._channels))

    def _read_all(self) -> None:
        """Begin to read every watched engine that is not being read."""
        running = self._pool.running()
        models = [model.name for model in running]
        watched: dict[Session, tuple[RunningModel, list[Watcher]]] = {}
        idle = []
        for watcher in self._watchers:
            model = _find_model(watcher, running)
            session = None if model is None else model.session.base
            watcher.is_new = watcher.is_new or session is not watcher.session
            watcher.session = session
            if model is None:
                watcher.is_new = watcher.is_new or models != self._models
                idle.append(watcher)
            else:
                watched.setdefault(model.session.base, (model, []))[1].append(watcher)
        self._models = models
        if any(watcher.wants_snapshot for watcher in idle):
            _send_snapshot(Snapshot(time=time.time(), models=models), idle)
        for session, (model, watchers) in watched.items():
            channel = self._channels.setdefault(session, Channel(session, model.name))
            if channel.is_due(watchers):
                channel.reading = asyncio.create_task(self._read(channel, watchers, model, models))
        self._drop([session for session in self._channels if session not in watched])

    async def _read(self, channel: Channel, watchers: list[Watcher], model: RunningModel, models: list[str]) -> None:
        try:
            await channel.read(watchers, model, models)
        except EngineStopped:
            self._channels.pop(channel.session, None)  # the pool will soon drop it
        except Exception:
            logger.exception("the engine of %s cannot be watched; its streams end", channel.name)
            self._channels.pop(channel.session, None)
            for watcher in watchers:
                watcher.close()

    def _drop(self, sessions: Iterable[Session]) -> None:
        """Stop watching the engines' steps."""
        for session in sessions:
            task = asyncio.create_task(_end(self._channels.pop(session)))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)


async def _end(channel: Channel) -> None:
    if channel.reading is not None:
        await asyncio.gather(channel.reading, return_exceptions=True)
    with suppress(EngineStopped):
        await channel.session.stop_live()


def _find_model(watcher: Watcher, running: list[RunningModel]) -> RunningModel | None:
    """Return the model for a watcher: the one that it names; else the one that it sees already, or the last used."""
    if watcher.name is not None:
        return next((model for model in running if model.name == watcher.name), None)
    seen = next((model for model in running if model.session.base is watcher.session), None)
    return seen or (running[0] if running else None)


def _send_snapshot(snapshot: Snapshot, watchers: list[Watcher]) -> None:
    frame = write_snapshot(snapshot)
    for watcher in watchers:
        if watcher.wants_snapshot:
            watcher.is_new = False
            watcher.push(frame)


def _key(row: Dispatch) -> tuple[str, str, str]:
    return row.operator, row.implementation, row.variant


router = Router(prefix="/v1/admin", tags=["admin"])
PATIENCE_S = 10.0  # after which a watcher that does not read counts as gone


class LiveStream(JSONResponse):
    """The stream's response in the OpenAPI document: events whose data are JSON."""

    media_type = SSE


def _describe_query(name: str, description: str, **schema: object) -> dict[str, object]:
    return {"name": name, "in": "query", "description": description, "schema": schema}


MODEL = _describe_query("model", "Name or alias of a model; without it, the one that was used last.", type="string")
GROUP = _describe_query("group", "Number of the group of layers.", type="integer", default=0)


@router.get("/live", response_class=LiveStream, response_model=LiveEvents, openapi_extra={"parameters": [MODEL]})
async def watch(request: Request) -> Response:
    """Stream the activity of an engine; docs/page-live.md describes the events.

    `model` chooses one of several models; without it, the last used one is watched.
    """
    name = request.query_params.get("model")
    if name is not None:
        record = await look(request, parts_of(request).served.find, name)
        name = record.name
    hub = parts_of(request).live
    watcher, row = hub.enter(name), in_flight(request)
    row.stack.callback(hub.leave, watcher)
    row.cancels.append(watcher.close)
    return EventStream(request, _write_frames(watcher), media_type=SSE, on_error=_error_frame, patience_s=PATIENCE_S)


@router.get("/pages/{page}", response_model=PageDetails, openapi_extra={"parameters": [MODEL, GROUP]})
async def describe_page(request: Request, page: str) -> Response:
    """Describe one page of a model's cache: the answers that hold it, its place in their texts, its age."""
    model = await _find_running(request)
    group = request.query_params.get("group", "0")
    group_number, number = map(_read_number, (group, page))
    record = await model.session.describe_page(group_number, number)
    if record is None:
        raise ServerError(
            404, "not_found", f"{model.short_name} has no page {page[:20]!r} in group {group[:20]!r}", "page"
        )
    details = PageDetails(
        **{row.name: getattr(record, row.name) for row in fields(record)},
        model=model.name,
        group=group_number,
        page=number,
    )
    return Response(_adapt(PageDetails).dump_json(details), media_type="application/json")


@router.post("/probe", response_model=MachineLimits, openapi_extra={"parameters": [MODEL]})
async def measure(request: Request) -> Response:
    """Measure and keep the machine's limits with the threads of a model; answers pause for about a second."""
    model = await _find_running(request)
    try:
        limits = await model.session.measure_limits()
    except DeviceError as error:
        raise ServerError(409, "unavailable", str(error), "model") from error
    parts_of(request).live.note_limits(model.session, limits)
    return Response(_adapt(MachineLimits).dump_json(limits), media_type="application/json")


def _read_number(text: str) -> int:
    """Read the number of a group or page; -1, which none has, for anything else."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1


async def _find_running(request: Request) -> RunningModel:
    """Return the model that the request names, or the last used one; raises ServerError if it is not loaded."""
    pool = parts_of(request).pool
    name, running = request.query_params.get("model"), pool.running()
    if name is not None:
        record = await look(request, parts_of(request).served.find, name)
        running = [model for model in running if model.name == record.name]
    if not running:
        raise ServerError(404, "not_found", f"{'no model' if name is None else name[:100]} is loaded", "model")
    return running[0]


async def _write_frames(watcher: Watcher) -> AsyncGenerator[bytes, None]:
    while (frames := await watcher.take()) is not None:
        yield frames


def _error_frame(error: ServerError) -> bytes:
    return sse({"error": {"code": error.code, "message": error.message}}, "error")
