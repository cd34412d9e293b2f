"""The models that are loaded now: brought in when asked for, kept for a while, let go when room or time runs out.

Knows names, sizes and times; what a model is and does is `AsyncSession`'s. Loading runs on a thread of its own, one
model after the other, so that what each takes is known before the next one starts. Everything else belongs on one loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Protocol

from mlxr.core.errors import Busy, DoesNotFit, EngineStopped, ModelError, SettingError, Unavailable
from mlxr.core.memory import return_free_memory
from mlxr.core.settings import Settings
from mlxr.core.work_threads import WorkThreads
from mlxr.engine.memory_plan import read_room_bytes
from mlxr.loading import Adapter
from mlxr.registry.record import ModelRecord
from mlxr.service.async_session import AsyncSession
from mlxr.service.model_size import measure_weights as measure_weights
from mlxr.service.opening import find_own_adapter, open_record
from mlxr.service.remembered import GRACE_S, Remembered
from mlxr.templates.workers import template_workers

logger = logging.getLogger(__name__)
MEMORY_PERCENT = 80  # of the memory that is free at the start, where the settings do not say what models may take
MIN_ARENA_BYTES = 64 * 2**20  # a smaller cache would serve next to nobody
LOOK_THREADS = 4  # that ask the catalogue for names


class Catalogue(Protocol):
    """What the pool needs of the registry."""

    def find(self, name_or_path: str, /) -> ModelRecord:
        """The model of that name or path; raises NotFound."""
        ...

    def touch(self, name: str, /) -> None:
        """Note that a model was used now."""
        ...


def open_session(record: ModelRecord, settings: Settings, memory_bytes: int) -> AsyncSession:
    """Load a model and start its engine, whose cache may take `memory_bytes`. Raises as `loading.load` does."""
    adapter = find_own_adapter(record, settings)
    loaded = open_record(record, settings, needs_draft=True)
    try:
        return AsyncSession(loaded, settings, system=record.system, memory_bytes=memory_bytes, adapter=adapter)
    except BaseException:
        loaded.close()
        raise


OpenSession = Callable[[ModelRecord, Settings, int], AsyncSession]  # the bytes are what its cache may take


@dataclass(frozen=True, slots=True)
class RunningModel:
    """A model that is loaded; it goes at `expires_at` unless it is used until then, or never (None)."""

    name: str
    record: ModelRecord
    size_bytes: int
    expires_at: datetime | None
    context_tokens: int
    session: AsyncSession

    @property
    def short_name(self) -> str:
        """The name without the tag `latest`."""
        return self.record.short_name


@dataclass(eq=False, slots=True)
class _Entry:
    """A model from the moment its load is asked for until its memory is free again."""

    record: ModelRecord
    keep_alive_s: float
    size_bytes: int = 0  # before it is loaded: an estimate
    session: AsyncSession | None = None
    leases: int = 0
    used_at_s: float = 0.0
    expires_at_s: float = math.inf
    is_pinned: bool = False
    is_leaving: bool = False
    loading: asyncio.Task[AsyncSession] | None = None
    timer: asyncio.TimerHandle | None = None
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def name(self) -> str:
        return self.record.name


@dataclass(frozen=True, slots=True)
class Room:
    """Memory that a model would find: `free_bytes` for it, once the models named in `leaving` are unloaded."""

    free_bytes: int
    leaving: tuple[str, ...]


class ModelLease:
    """The right to use a model; while there is one it stays loaded. An asynchronous context manager.

    `load_s` is how long its load was waited for, 0 when it was loaded already.
    """

    def __init__(self, pool: ModelPool, entry: _Entry, session: AsyncSession, load_s: float) -> None:
        self._pool, self._entry = pool, entry
        self.session, self.load_s = session, load_s
        self.record, self.name = entry.record, entry.record.name
        self.adapter: Adapter | None = None  # what its requests have; None leaves that to the model
        self.adapter_name: str | None = None
        self._is_held = True

    def release(self) -> None:
        """Give the right back; once is enough."""
        if self._is_held:
            self._is_held, self.adapter = False, None
            self._pool.release(self._entry)

    async def __aenter__(self) -> ModelLease:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.release()


class ModelPool:
    """Loaded models by name. `clock` gives seconds that only grow; `open_session` loads a model, on any thread."""

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
        self._looks, self._notes = WorkThreads("mlxr-look", LOOK_THREADS), WorkThreads("mlxr-note", 1)
        self._found = Remembered[ModelRecord](registry.find, self._looks, clock)
        self._room = asyncio.Lock()  # one load at a time, first come first served
        self._loader = WorkThreads("mlxr-load", 1)
        self._closing: set[asyncio.Task[None]] = set()
        self._is_stopping = False

    async def acquire(self, name: str | None = None, *, keep_alive_s: float | None = None) -> ModelLease:
        """The model of that name, or the default model, loaded first if need be.

        `keep_alive_s` is how long it stays after its last use from now on (0: not at all, negative: for ever); None
        leaves that as it is. Raises NotFound, DoesNotFit, EngineStopped, and what loading raises.
        """
        record = await self._find(name or self._settings.default_model)
        if record.problem is not None:
            raise ModelError(f"{record.short_name}: {record.problem}")
        entry = await self._enter(record)
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
        """The models that are loaded, the last used one first."""
        return [
            RunningModel(
                entry.name, entry.record, entry.size_bytes, self._tell_end(entry), session.context_tokens, session
            )
            for entry in sorted(self._entries.values(), key=lambda entry: entry.used_at_s, reverse=True)
            if (session := entry.session) is not None and not entry.is_leaving
        ]

    def find_loaded(self, name: str) -> ModelRecord | None:
        """The record of a loaded model of that name, which takes no look into the catalogue."""
        wanted = name.lower()
        return next(
            (model.record for model in self.running() if wanted in (model.name.lower(), model.short_name.lower())), None
        )

    def find_room(self, record: ModelRecord) -> Room:
        """The memory for a model and its cache if it were loaded now; raises DoesNotFit."""
        others = [other for other in self._list_others(record.name) if not other.is_leaving]
        needed_bytes = self._check_fit(record, others)
        free_bytes = self.budget_bytes - sum(other.size_bytes for other in others)
        leaving = []
        for other in sorted((other for other in others if not other.is_pinned), key=_rank_to_leave):
            if needed_bytes <= free_bytes:
                break
            free_bytes += other.size_bytes
            leaving.append(other.record.short_name)
        return Room(free_bytes, tuple(leaving))

    def refresh(self) -> None:
        """Ask the catalogue again for every name; called after it was changed."""
        self._found.forget()

    async def unload(self, name: str) -> None:
        """Let a model go as soon as nobody uses it, and wait until it is gone; nothing happens if it is not loaded."""
        entry = self._entries.get(name) or self._entries.get((await self._find(name)).name)
        if entry is not None:
            self._leave(entry)
            await entry.gone.wait()

    async def stop(self, drain_s: float = 0.0) -> None:
        """Refuse new requests, let those under way end for at most `drain_s` seconds, free all models."""
        self._is_stopping = True
        template_workers.cut_short()  # nobody waits any more for what they do
        await asyncio.gather(*(self._close(entry, drain_s) for entry in list(self._entries.values())))
        await asyncio.gather(*self._closing)
        for threads in (self._loader, self._looks, self._notes):
            threads.stop()

    def release(self, entry: _Entry) -> None:
        """One use less; called by leases."""
        entry.leases -= 1
        entry.used_at_s = self._clock()
        if not entry.leases and entry.session is not None:
            self._rest(entry)

    async def _find(self, name: str) -> ModelRecord:
        """The catalogue's record; where that cannot be asked, the one of a loaded model of that name."""
        try:
            return await self._found.find(name)
        except (Unavailable, Busy):
            record = self.find_loaded(name)
            if record is None:
                raise
            return record

    async def _enter(self, record: ModelRecord) -> _Entry:
        """The entry of a model that is there to stay, with one more lease."""
        while True:
            if self._is_stopping:
                raise EngineStopped
            entry = self._entries.get(record.name)
            if entry is not None and entry.record.digest != record.digest:
                self._leave(entry)  # under this name there is another model now
            elif entry is not None and entry.session is not None and entry.session.failure is not None:
                self._leave(entry)  # it is loaded again
            if entry is None:
                entry = self._begin_load(record)
            if not entry.is_leaving:
                entry.leases += 1
                return entry
            await entry.gone.wait()

    def _begin_load(self, record: ModelRecord) -> _Entry:
        entry = _Entry(record, self._settings.keep_alive_s, is_pinned=self._is_pinned(record))
        entry.loading = asyncio.create_task(self._load(entry))
        entry.loading.add_done_callback(lambda task: task.cancelled() or task.exception())  # may have nobody to tell
        self._entries[record.name] = entry
        return entry

    async def _load(self, entry: _Entry) -> AsyncSession:
        try:
            async with self._room:
                room_bytes = await self._make_room(entry)
                if self._is_stopping:
                    raise EngineStopped
                session = await self._loader.run(self._open_session, entry.record, self._settings, room_bytes)
        except BaseException:
            self._forget(entry)
            raise
        entry.session, entry.size_bytes = session, session.size_bytes
        logger.info("%s is loaded and takes %d MiB", entry.name, entry.size_bytes >> 20)
        note = asyncio.wrap_future(self._notes.submit(self._registry.touch, entry.name))
        note.add_done_callback(lambda note: note.cancelled() or note.exception())  # it matters less than the answer,
        await asyncio.wait({note}, timeout=GRACE_S)  # which does not wait for it long
        if not entry.leases:  # whoever asked has gone away meanwhile
            self._rest(entry)
        return session

    async def _make_room(self, entry: _Entry) -> int:
        """Let others go until the model fits; returns the bytes that its cache may take."""
        others = self._list_others(entry.name)
        entry.size_bytes = self._check_fit(entry.record, others)
        while True:
            others = [other for other in others if not other.gone.is_set()]
            free_bytes = self.budget_bytes - sum(other.size_bytes for other in others)
            if entry.size_bytes <= free_bytes:
                return free_bytes - measure_weights(entry.record, self._settings)
            leaving = [other for other in others if other.is_leaving]
            if not leaving:
                # One in use takes no more requests now and goes when those it has are answered.
                oldest = min((other for other in others if not other.is_pinned), key=_rank_to_leave)
                self._leave(oldest)
                leaving = [oldest]
            await leaving[0].gone.wait()

    def _list_others(self, name: str) -> list[_Entry]:
        """Models besides that of this name that are loaded or on their way out: only those have a size."""
        return [other for other in self._entries.values() if other.name != name and other.size_bytes]

    def _check_fit(self, record: ModelRecord, others: Sequence[_Entry]) -> int:
        """The least that a model takes, with the smallest cache; raises DoesNotFit where pinned ones leave less."""
        needed_bytes = measure_weights(record, self._settings) + (self._settings.arena_bytes or MIN_ARENA_BYTES)
        pinned_bytes = sum(other.size_bytes for other in others if other.is_pinned)
        if needed_bytes > self.budget_bytes - pinned_bytes:
            raise DoesNotFit(record.short_name, needed_bytes, self.budget_bytes, pinned_bytes)
        return needed_bytes

    def _leave(self, entry: _Entry) -> None:
        """From now on the entry is for nobody new; it goes with its last lease."""
        entry.is_leaving = True
        if entry.session is not None and not entry.leases:
            self._rest(entry)

    def _rest(self, entry: _Entry) -> None:
        """Nobody uses the model: it goes now or later."""
        entry.used_at_s = self._clock()
        keeps = entry.is_pinned or entry.keep_alive_s < 0
        entry.expires_at_s = math.inf if keeps else entry.used_at_s + entry.keep_alive_s
        self._end_if_due(entry)

    def _end_if_due(self, entry: _Entry) -> None:
        """Called when a model rests, and again when its time may be over."""
        if entry.timer is not None:
            entry.timer.cancel()
            entry.timer = None
        if entry.leases or entry.gone.is_set():
            return
        left_s = 0.0 if entry.is_leaving else entry.expires_at_s - self._clock()
        if left_s <= 0:
            entry.is_leaving = True
            task = asyncio.create_task(self._close(entry, 0.0))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        elif left_s < math.inf:
            entry.timer = asyncio.get_running_loop().call_later(left_s, self._end_if_due, entry)

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
        await session.stop(drain_s)
        del session
        with contextlib.suppress(EngineStopped):  # the pool is being stopped
            await self._loader.run(return_free_memory)
        self._forget(entry)
        logger.info("%s is unloaded", entry.name)

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

    def _require_task(self, entry: _Entry) -> asyncio.Task[AsyncSession]:
        if entry.loading is None:
            raise EngineStopped
        return entry.loading


def _rank_to_leave(entry: _Entry) -> tuple[bool, float]:
    """Order in which models make room, the lowest first: idle ones before those in use, then the longest unused."""
    return entry.leases > 0, entry.used_at_s
