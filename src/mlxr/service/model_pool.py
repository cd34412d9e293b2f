"""The pool of loaded models: loads them on demand, keeps them for a while, unloads them when room or time runs out.

Knows names, sizes and times; `Session` is the model itself. Names of the same files share one load. Loading runs on its
own thread, one model after the other, so that the memory of each is known before the next one starts. Everything else
belongs on one event loop.

All models together may take `budget_bytes`. Each counts with its weights and the least that its cache needs; the rest
is divided evenly among the caches, anew whenever a model comes or goes, and caches that took more give memory back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Coroutine, Hashable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Protocol

from mlxr.core.errors import Busy, DoesNotFit, EngineStopped, ModelError, SettingError, Unavailable
from mlxr.core.frozen import frozen
from mlxr.core.memory import return_free_memory
from mlxr.core.settings import Settings
from mlxr.core.work_threads import WorkThreads
from mlxr.engine.memory_plan import MIN_ARENA_BYTES as MIN_ARENA_BYTES
from mlxr.engine.memory_plan import read_room_bytes
from mlxr.loading import Adapter
from mlxr.registry.record import ModelRecord
from mlxr.service.catalogue import GRACE_S, Remembered
from mlxr.service.opening import closing_on_failure, find_own_adapter, find_template, open_files
from mlxr.service.opening import measure_weights as measure_weights
from mlxr.service.session import Session
from mlxr.templates.workers import template_workers

logger = logging.getLogger(__name__)
MEMORY_PERCENT = 80  # of the memory that is free at the start; the budget if the settings give none
LOAD_END_S = 1.0  # a pool that stops waits this long for a load
LOOK_THREADS = 4  # these ask the catalogue for names


class Catalogue(Protocol):
    """The part of the registry that the pool needs."""

    def find(self, name_or_path: str, /) -> ModelRecord:
        """Return the model of that name or path; raises NotFound."""
        ...

    def find_default(self) -> str:
        """Return the name of the model that answers if a request names none."""
        ...

    def touch(self, name: str, /) -> None:
        """Note that a model was used now."""
        ...


def open_session(record: ModelRecord, settings: Settings, memory_bytes: int) -> Session:
    """Load a model and start its engine, whose cache may take `memory_bytes`. Raises as `loading.load` does."""
    adapter = find_own_adapter(record, settings)
    loaded = open_files(record, settings, needs_draft=True)
    with closing_on_failure(loaded):
        template = find_template(record, loaded, settings)
        return Session(
            loaded,
            settings,
            template=template,
            system=record.system,
            memory_bytes=memory_bytes,
            adapter=None if adapter is None else adapter.path,
            adapter_name=loaded.name,
        )


def share_session(session: Session, record: ModelRecord, settings: Settings) -> Session:
    """Return a session of a record whose files `session` has loaded; raises as `open_session` does."""
    adapter, template = find_own_adapter(record, settings), find_template(record, session.loaded, settings)
    return session.share(record.short_name, template, record.system, adapter)


OpenSession = Callable[[ModelRecord, Settings, int], Session]  # the bytes are what its cache may take
Files = tuple[Hashable, ...]


def identify_files(record: ModelRecord) -> Files:
    """Return a key that is equal for records of the same files: device, inode, size and modification time of each.

    If the files cannot be looked at, it is the path and the record's digest.
    """
    folder = record.path if record.path.is_dir() else record.path.parent
    try:
        listed = [folder / file.name for file in record.files]
        if not listed:
            listed = sorted(record.path.iterdir()) if record.path.is_dir() else [record.path]
        stats = [path.stat() for path in listed]
    except OSError:
        return record.path, record.digest
    return tuple((stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats)


@frozen
class RunningModel:
    """A loaded model; it is unloaded at `expires_at` unless it is used before, never if that is None.

    The models named in `shared_with` have the same weights and cache, which count once.
    """

    name: str
    record: ModelRecord
    expires_at: datetime | None
    context_tokens: int
    session: Session
    shared_with: tuple[str, ...] = ()

    @property
    def short_name(self) -> str:
        """The name without the tag `latest`."""
        return self.record.short_name

    @property
    def size_bytes(self) -> int:
        """The bytes of memory that weights and cache take now."""
        return self.session.size_bytes


@dataclass(eq=False, slots=True)
class _Load:
    """The weights and the engine of the same files, from the first request until their memory is free again."""

    record: ModelRecord  # of the first name
    files: Files
    entries: list[_Entry] = field(default_factory=list)
    needed_bytes: int = 0  # an estimate before the load
    session: Session | None = None
    opening: asyncio.Task[Session] | None = None
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def least_bytes(self) -> int:
        """The least bytes that it takes, whatever other models want; 0 while it waits for its turn."""
        return self.needed_bytes if self.session is None else self.session.least_bytes

    @property
    def is_pinned(self) -> bool:
        return any(entry.is_pinned for entry in self.entries)

    @property
    def is_leaving(self) -> bool:
        return all(entry.is_leaving for entry in self.entries)

    @property
    def rank_to_leave(self) -> tuple[bool, float]:
        """The rank in making room, the lowest first: idle models before those in use, then the longest unused."""
        used_at_s = max((entry.used_at_s for entry in self.entries), default=0.0)
        return any(entry.leases > 0 for entry in self.entries), used_at_s


@dataclass(eq=False, slots=True)
class _Entry:
    """A model under one name, from the first request until it is gone."""

    record: ModelRecord
    keep_alive_s: float
    load: _Load
    session: Session | None = None
    leases: int = 0
    used_at_s: float = 0.0
    expires_at_s: float = math.inf
    is_pinned: bool = False
    is_leaving: bool = False
    loading: asyncio.Task[Session] | None = None
    timer: asyncio.TimerHandle | None = None
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def name(self) -> str:
        return self.record.name


@frozen
class Room:
    """The memory for a model: `free_bytes`, once the models named in `leaving` are unloaded."""

    free_bytes: int
    leaving: tuple[str, ...]


class ModelLease:
    """The right to use a model, which stays loaded while one exists. An asynchronous context manager.

    `load_s` is the time spent waiting for its load, 0 if it was loaded already.
    """

    def __init__(self, pool: ModelPool, entry: _Entry, session: Session, load_s: float) -> None:
        self._pool, self._entry = pool, entry
        self.session, self.load_s = session, load_s
        self.record, self.name = entry.record, entry.record.name
        self.adapter: Adapter | None = None  # of its requests; None: the model's own
        self.adapter_name: str | None = None
        self._is_held = True

    def release(self) -> None:
        """Give the right back; may be called more than once."""
        if self._is_held:
            self._is_held, self.adapter = False, None
            self._pool.release(self._entry)

    async def __aenter__(self) -> ModelLease:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.release()


class ModelPool:
    """Loaded models by name. `clock` returns seconds that only grow; `open_session` loads a model, on any thread."""

    def __init__(
        self,
        settings: Settings,
        registry: Catalogue,
        *,
        clock: Callable[[], float] = time.monotonic,
        open_session: OpenSession = open_session,
    ) -> None:
        self._settings, self._registry, self._clock, self._open_session = settings, registry, clock, open_session
        free_bytes = read_room_bytes(settings.device)
        share_bytes = 2**62 if free_bytes is None else free_bytes * MEMORY_PERCENT // 100
        self.budget_bytes = settings.models_memory_bytes or share_bytes
        if (settings.arena_bytes or 0) > self.budget_bytes:
            raise SettingError(
                f"arena_bytes: {(settings.arena_bytes or 0) >> 20} MiB are more than the {self.budget_bytes >> 20} MiB "
                "that all models may take; lower arena_bytes or raise models_memory_bytes, which is "
                f"{MEMORY_PERCENT} % of free memory where it is not set"
            )
        self._entries: dict[str, _Entry] = {}
        self._loads: dict[Files, _Load] = {}
        self._looks, self._notes = WorkThreads("mlxr-look", LOOK_THREADS), WorkThreads("mlxr-note", 1)
        self._found = Remembered[tuple[ModelRecord, Files]](self._look_up, self._looks, clock)
        self._defaults = Remembered[str](lambda _: registry.find_default(), self._looks, clock)
        self._default_name: str | None = None
        self._room = asyncio.Lock()  # one load at a time, first come first served
        self._loader = WorkThreads("mlxr-load", 1)
        self._closing: set[asyncio.Task[None]] = set()
        self._is_stopping = self.has_given_up = False

    async def acquire(self, name: str | None = None, *, keep_alive_s: float | None = None) -> ModelLease:
        """Return a lease of the model of that name, or of the default model; loads it if need be.

        From now on it stays for `keep_alive_s` after its last use (0: not at all, negative: for ever); None changes
        nothing. Raises NotFound, DoesNotFit, EngineStopped, and what loading raises.
        """
        record, files = await self._find(name or await self._name_default())
        if record.problem is not None:
            raise ModelError(f"{record.short_name}: {record.problem}")
        entry = await self._enter(record, files)
        if keep_alive_s is not None:
            entry.keep_alive_s = keep_alive_s
        if entry.session is not None:
            return ModelLease(self, entry, entry.session, 0.0)
        start_s = self._clock()
        try:
            session = await asyncio.shield(self._require_task(entry))
        except BaseException:
            self.release(entry)
            raise
        return ModelLease(self, entry, session, self._clock() - start_s)

    def running(self) -> list[RunningModel]:
        """Return the loaded models, the last used one first."""
        return [
            RunningModel(
                entry.name,
                entry.record,
                self._tell_end(entry),
                session.context_tokens,
                session,
                self._list_twins(entry),
            )
            for entry in sorted(self._entries.values(), key=lambda entry: entry.used_at_s, reverse=True)
            if (session := entry.session) is not None and not entry.is_leaving
        ]

    def find_loaded(self, name: str) -> ModelRecord | None:
        """Return the record of a loaded model of that name, without a look into the catalogue; None if not loaded."""
        entry = self._find_entry(name)
        return None if entry is None else entry.record

    def _find_entry(self, name: str) -> _Entry | None:
        wanted = name.lower()
        names = ((model.name, model.short_name) for model in self.running())
        found = next((full for full, short in names if wanted in (full.lower(), short.lower())), None)
        return None if found is None else self._entries[found]

    async def find_session(self, record: ModelRecord) -> Session | None:
        """Return the session that has the files of a model in memory, under any name."""
        load = self._loads.get(await self._looks.run(identify_files, record))
        return None if load is None or load.is_leaving else load.session

    async def find_room(self, record: ModelRecord) -> Room:
        """Return the memory for a model and its cache if it were loaded now; raises DoesNotFit."""
        own = self._loads.get(await self._looks.run(identify_files, record))
        others = [other for other in self._list_others(own) if not other.is_leaving]
        needed_bytes = self._check_fit(record, others)
        free_bytes = self.budget_bytes - sum(other.least_bytes for other in others)
        leaving: list[str] = []
        for other in sorted((other for other in others if not other.is_pinned), key=lambda one: one.rank_to_leave):
            if needed_bytes <= free_bytes:
                break
            free_bytes += other.least_bytes
            leaving += (entry.record.short_name for entry in other.entries)
        return Room(free_bytes, tuple(leaving))

    def refresh(self) -> None:
        """Ask the catalogue again for every name; called after it was changed."""
        self._found.forget()
        self._defaults.forget()

    async def unload(self, name: str) -> None:
        """Unload a model as soon as no request uses it, and wait until it is gone; does nothing if it is not loaded."""
        entry = self._entries.get(name) or self._entries.get((await self._find(name))[0].name)
        if entry is not None:
            self._leave(entry)
            await entry.gone.wait()

    async def stop(self, drain_s: float = 0.0) -> None:
        """Refuse new requests, give running ones at most `drain_s` seconds to end, and free all models.

        A load that does not end within LOAD_END_S is given up, as it may hang; `has_given_up` is then true.
        """
        self._is_stopping = True
        template_workers.cut_short()  # nobody waits for their results any more
        entries = list(self._entries.values())
        loading = {entry.loading for entry in entries if entry.session is None and entry.loading is not None}
        late = (await asyncio.wait(loading, timeout=LOAD_END_S))[1] if loading else set()
        self.has_given_up = bool(late)
        await asyncio.gather(*(self._close(entry, drain_s) for entry in entries if entry.loading not in late))
        await asyncio.gather(*self._closing)
        for threads in (self._loader, self._looks, self._notes):
            threads.stop()

    def release(self, entry: _Entry) -> None:
        """Count one use less; called by leases."""
        entry.leases -= 1
        entry.used_at_s = self._clock()
        if not entry.leases and entry.session is not None:
            self._rest(entry)

    async def _name_default(self) -> str:
        """Return the name of the default model; the last known one if the catalogue cannot be asked."""
        if self._settings.default_model is not None:
            return self._settings.default_model
        try:
            self._default_name = await self._defaults.find("")
        except (Unavailable, Busy):
            if self._default_name is None:
                raise
        return self._default_name

    async def _find(self, name: str) -> tuple[ModelRecord, Files]:
        """Return the catalogue's record and its files; those of a loaded model if the catalogue cannot be asked."""
        try:
            return await self._found.find(name)
        except (Unavailable, Busy):
            entry = self._find_entry(name)
            if entry is None:
                raise
            return entry.record, entry.load.files

    def _look_up(self, name: str) -> tuple[ModelRecord, Files]:
        record = self._registry.find(name)
        return record, identify_files(record)

    async def _enter(self, record: ModelRecord, files: Files) -> _Entry:
        """Return an entry of the model that is not leaving, with one more lease."""
        while True:
            if self._is_stopping:
                raise EngineStopped
            entry = self._entries.get(record.name)
            if entry is not None and entry.record.digest != record.digest:
                self._leave(entry)  # the name now means another model
            elif entry is not None and entry.session is not None and entry.session.failure is not None:
                self._leave_load(entry.load)  # it is loaded again
            load = self._loads.get(files)
            if entry is None and load is not None and load.is_leaving:
                await load.gone.wait()
                continue
            if entry is None:
                entry = self._begin(record, files)
            if not entry.is_leaving:
                entry.leases += 1
                return entry
            await entry.gone.wait()

    def _begin(self, record: ModelRecord, files: Files) -> _Entry:
        """Make an entry, which waits for its files to be loaded, or shares them if they are."""
        load = self._loads.get(files)
        if load is None:
            load = self._loads[files] = _Load(record, files)
            load.opening = _start(self._open(load))
        entry = _Entry(record, self._settings.keep_alive_s, load, is_pinned=self._is_pinned(record))
        load.entries.append(entry)
        entry.loading = _start(self._load(entry, load.opening))
        self._entries[record.name] = entry
        return entry

    async def _open(self, load: _Load) -> Session:
        """Load files and start their engine, once there is room for them."""
        try:
            async with self._room:
                room_bytes = await self._make_room(load)
                if self._is_stopping:
                    raise EngineStopped
                await self._divide(load)
                load.session = await self._loader.run(self._open_session, load.record, self._settings, room_bytes)
                await self._divide()
        except BaseException:
            if load.session is None:
                self._drop(load)
            raise
        logger.info("%s is loaded: %s", load.record.name, _describe_memory(load.session))
        return load.session

    async def _load(self, entry: _Entry, opening: asyncio.Task[Session] | None) -> Session:
        try:
            if opening is None:
                raise EngineStopped
            session = await asyncio.shield(opening)
            if entry.record is not entry.load.record:
                session = await self._loader.run(share_session, session, entry.record, self._settings)
                logger.info("%s is loaded and shares what %s has", entry.name, entry.load.record.name)
        except BaseException:
            entry.load.entries.remove(entry)
            self._forget(entry)
            await self._close_unused(entry.load, 0.0)
            raise
        entry.session = session
        note = asyncio.wrap_future(self._notes.submit(self._registry.touch, entry.name))
        note.add_done_callback(lambda note: note.cancelled() or note.exception())  # it matters less than the answer,
        await asyncio.wait({note}, timeout=GRACE_S)  # which does not wait for it long
        if not entry.leases:  # the request has gone away meanwhile
            self._rest(entry)
        return session

    async def _make_room(self, load: _Load) -> int:
        """Unload others until the model fits; returns the bytes that its cache may take."""
        others = self._list_others(load)
        load.needed_bytes = self._check_fit(load.record, others)
        while True:
            others = [other for other in others if not other.gone.is_set()]
            free_bytes = self.budget_bytes - sum(other.least_bytes for other in others)
            if load.needed_bytes <= free_bytes:
                return free_bytes - measure_weights(load.record, self._settings)
            leaving = [other for other in others if other.is_leaving]
            if not leaving:
                self._check_fit(load.record, others)  # pinned ones may hold more by now
                # A model in use takes no more requests from now on and goes once its requests are answered.
                oldest = min((other for other in others if not other.is_pinned), key=lambda one: one.rank_to_leave)
                self._leave_load(oldest)
                leaving = [oldest]
            await leaving[0].gone.wait()

    async def _divide(self, coming: _Load | None = None) -> None:
        """Divide the memory beside the weights evenly among the caches; none gets more than it can use.

        The model that is `coming` gets its part, too.
        """
        sessions = [load.session for load in self._loads.values() if load.session is not None]
        weights = [session.weight_bytes for session in sessions]
        if coming is not None:
            weights.append(measure_weights(coming.record, self._settings))
        left_bytes, parts = max(0, self.budget_bytes - sum(weights)), len(weights)
        changes = []
        for session in sorted(sessions, key=lambda session: session.measure_cache().max_bytes):
            part_bytes = left_bytes // parts
            left_bytes -= min(part_bytes, session.measure_cache().max_bytes)
            parts -= 1
            changes.append(session.limit_cache(part_bytes))
        for result in await asyncio.gather(*changes, return_exceptions=True):
            if isinstance(result, BaseException) and not isinstance(result, EngineStopped):
                raise result

    def _list_others(self, load: _Load | None) -> list[_Load]:
        """Return the other models that are loaded or leaving: only those have a size."""
        return [other for other in self._loads.values() if other is not load and other.least_bytes]

    def _list_twins(self, entry: _Entry) -> tuple[str, ...]:
        """Return the other names that share this entry's files in memory."""
        return tuple(
            other.name
            for other in entry.load.entries
            if other is not entry and other.session is not None and not other.is_leaving
        )

    def _check_fit(self, record: ModelRecord, others: Sequence[_Load]) -> int:
        """Return the least bytes of a model, with the smallest cache; raises DoesNotFit if pinned ones leave less."""
        needed_bytes = measure_weights(record, self._settings) + (self._settings.arena_bytes or MIN_ARENA_BYTES)
        pinned_bytes = sum(other.least_bytes for other in others if other.is_pinned)
        if needed_bytes > self.budget_bytes - pinned_bytes:
            raise DoesNotFit(record.short_name, needed_bytes, self.budget_bytes, pinned_bytes)
        return needed_bytes

    def _leave_load(self, load: _Load) -> None:
        """Take no new requests under any of its names."""
        for entry in list(load.entries):
            self._leave(entry)

    def _leave(self, entry: _Entry) -> None:
        """Take no new requests; the entry goes with its last lease."""
        entry.is_leaving = True
        if entry.session is not None and not entry.leases:
            self._rest(entry)

    def _rest(self, entry: _Entry) -> None:
        """Called when no request uses the model: it goes now or later."""
        entry.used_at_s = self._clock()
        keeps = entry.is_pinned or entry.keep_alive_s < 0
        entry.expires_at_s = math.inf if keeps else entry.used_at_s + entry.keep_alive_s
        self._end_if_due(entry)

    def _end_if_due(self, entry: _Entry) -> None:
        """Unload an unused model if its time is over; called when it rests, and when its time may be over."""
        if entry.timer is not None:
            entry.timer.cancel()
            entry.timer = None
        if entry.leases or entry.gone.is_set():
            return
        left_s = 0.0 if entry.is_leaving else entry.expires_at_s - self._clock()
        if left_s <= 0:
            entry.is_leaving = True
            self._close_soon(self._close(entry, 0.0))
        elif left_s < math.inf:
            entry.timer = asyncio.get_running_loop().call_later(left_s, self._end_if_due, entry)

    def _close_soon(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _close(self, entry: _Entry, drain_s: float) -> None:
        """Stop a model's session; its memory is free afterwards."""
        entry.is_leaving = True
        if entry.session is None and entry.loading is not None:
            with contextlib.suppress(Exception):
                await asyncio.shield(entry.loading)
        session, entry.session = entry.session, None
        if session is None:  # it did not load, or is being closed already
            await entry.gone.wait()
            return
        entry.loading = None
        session.leave()
        del session
        entry.load.entries.remove(entry)
        await self._close_unused(entry.load, drain_s)
        self._forget(entry)
        logger.info("%s is unloaded", entry.name)

    async def _close_unused(self, load: _Load, drain_s: float) -> None:
        """Stop the engine of a load that no name has any more; its memory is free afterwards."""
        if load.entries or load.session is None:
            return
        await load.session.stop(drain_s)
        load.session = load.opening = None
        if not self._is_stopping:  # when stopping, a hung load may block the thread, and the process ends anyway
            with contextlib.suppress(EngineStopped):
                await self._loader.run(return_free_memory)
        self._drop(load)
        self._close_soon(self._divide())

    def _drop(self, load: _Load) -> None:
        if self._loads.get(load.files) is load:
            del self._loads[load.files]
        load.gone.set()

    def _forget(self, entry: _Entry) -> None:
        if entry.timer is not None:
            entry.timer.cancel()
        if self._entries.get(entry.name) is entry:
            del self._entries[entry.name]
        entry.gone.set()

    def _is_pinned(self, record: ModelRecord) -> bool:
        names = {record.name, record.short_name}
        return any(
            pinned.removesuffix(":latest") in names or Path(pinned).expanduser().absolute() == record.path
            for pinned in self._settings.pinned_models
        )

    def _tell_end(self, entry: _Entry) -> datetime | None:
        if entry.is_pinned or entry.keep_alive_s < 0:
            return None
        left_s = entry.keep_alive_s if entry.leases else entry.expires_at_s - self._clock()
        return datetime.now(UTC) + timedelta(seconds=min(left_s, 1e9))

    def _require_task(self, entry: _Entry) -> asyncio.Task[Session]:
        if entry.loading is None:
            raise EngineStopped
        return entry.loading


def _start(work: Coroutine[Any, Any, Session]) -> asyncio.Task[Session]:
    """Start a task whose failure may go unseen."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task


def _describe_memory(session: Session) -> str:
    cache = session.measure_cache()
    sizes = (
        f"{nbytes / 2**20:.0f} MiB" if nbytes < 2**30 else f"{nbytes / 2**30:.1f} GiB"
        for nbytes in (session.weight_bytes, cache.max_bytes, cache.in_use_bytes)
    )
    return "weights {}, cache up to {}, in use {}".format(*sizes)
