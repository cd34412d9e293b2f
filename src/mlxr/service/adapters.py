"""The low-rank adapters of one open model: by name, loaded and unloaded while it answers, in bounded memory.

An adapter counts until its name is gone and the last answer that uses it has ended, so the bound holds whatever
requests do. Adapters that can be read again (`provide`) make room for others while no answer uses them; the others
(`load`) stay until they are unloaded.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from mlxr.core.errors import AdaptersBusy, InvalidRequest
from mlxr.core.frozen import frozen
from mlxr.core.work_threads import WorkThreads
from mlxr.loading import Adapter, add_adapters, measure_adapter
from mlxr.registry import AdapterRecord

MAX_NAME_CHARACTERS = 200
MAX_FACTOR = 1e6
Measure = Callable[[str | Path], int]
AdapterChoice = str | Mapping[str, float]  # one name, or factors by name: a sum, added in this order


@dataclass(slots=True)
class _Entry:
    """An adapter under a name; `version` tells what it was read from, None for one that stays until it is unloaded.

    Requests get a copy that shares its matrices; the copy lives as long as one of them uses it.
    """

    adapter: Adapter
    number: int
    version: str | None = None
    lent: weakref.ref[Adapter] | None = None

    @property
    def is_in_use(self) -> bool:
        return self.lent is not None and self.lent() is not None

    def lend(self) -> Adapter:
        """Return the adapter that requests compute with, one object for all of them."""
        lent = None if self.lent is None else self.lent()
        if lent is None:
            lent = replace(self.adapter, sources=(self.adapter,))
            self.lent = weakref.ref(lent)
        return lent


@frozen
class AdaptersUse:
    """The memory of adapters; `held_bytes` includes unloaded ones that answers still use."""

    held_bytes: int
    most_bytes: int
    uses: tuple[AdapterUse, ...]


@frozen
class AdapterUse:
    """An adapter in memory: its bytes, how often requests chose it, whether answers use it now."""

    name: str
    size_bytes: int
    requests: int
    is_in_use: bool


class Adapters:
    """Adapters that `read` makes of files, in at most `most_bytes` altogether. Safe to use from several threads.

    `measure` returns the bytes of one before it is read.
    """

    def __init__(
        self, read: Callable[[str | Path], Adapter], most_bytes: int, measure: Measure = measure_adapter
    ) -> None:
        self._read, self._most_bytes, self._measure = read, most_bytes, measure
        self._entries: dict[str, _Entry] = {}  # the last used one last
        self._held: dict[int, tuple[weakref.ref[Adapter], int]] = {}
        self._numbers = count()
        self._requests: Counter[str] = Counter()
        self._waiting: list[Callable[[], None]] = []
        self._lock = threading.RLock()
        self._loading = threading.Lock()  # one is read at a time, so that its bytes are known before the next one

    @property
    def names(self) -> list[str]:
        """The names of the loaded adapters, sorted."""
        return sorted(self._entries)

    @property
    def held_bytes(self) -> int:
        """Bytes of all adapters in memory, including those whose names are gone."""
        return sum(size_bytes for _, size_bytes in list(self._held.values()))

    def measure(self) -> AdaptersUse:
        """List the loaded adapters and the memory that they take."""
        with self._lock:
            uses = [
                AdapterUse(name, entry.adapter.nbytes, self._requests[name], entry.is_in_use)
                for name, entry in sorted(self._entries.items())
            ]
        return AdaptersUse(self.held_bytes, self._most_bytes, tuple(uses))

    def load(self, path: str | Path, name: str | None = None) -> str:
        """Read a PEFT folder or a GGUF adapter; returns its name, by default that of the folder or the file.

        Raises InvalidRequest if the name is taken or the memory does not suffice; NotFound, FormatError or ModelError
        if the files are no adapter of this model.
        """
        chosen = Path(path).resolve().stem if name is None else name
        check_name(chosen)
        with self._loading:
            if chosen in self._entries:
                raise InvalidRequest("adapter", f"{chosen} is loaded already; unload it first, or choose another name")
            self._add(chosen, path, None)
        return chosen

    def provide(self, name: str, path: Path, version: str) -> Adapter:
        """Return the adapter at `path`. It is read unless this `version` of it is loaded, and replaces other versions.

        Raises as `load` does, and AdaptersBusy while answers use the adapters that would have to make room.
        """
        found = self.peek(name, version)
        if found is not None:
            return found
        with self._loading:
            found = self.peek(name, version)
            if found is not None:
                return found
            check_name(name)
            return self._add(name, path, version).lend()

    def peek(self, name: str, version: str) -> Adapter | None:
        """Return the adapter of that name if that version of it is loaded."""
        with self._lock:
            entry = self._entries.get(name)
            return self.find(name) if entry is not None and entry.version == version else None

    def find(self, name: str) -> Adapter:
        """Return the adapter of that name; raises InvalidRequest, which lists the known ones, for an unknown name."""
        with self._lock:
            entry = self._entries.pop(name, None)
            if entry is not None:
                self._entries[name] = entry
                return entry.lend()
        known = ", ".join(self.names[:8]) or "none"
        raise InvalidRequest("adapter", f"{name[:MAX_NAME_CHARACTERS]!r} is not loaded; loaded are: {known}")

    def choose(self, wanted: AdapterChoice) -> Adapter | None:
        """Return the adapter, or the sum of several, for a request; raises InvalidRequest as `find` does."""
        shares = {wanted: 1.0} if isinstance(wanted, str) else wanted
        found = []
        for name, factor in shares.items():
            if isinstance(factor, bool) or not isinstance(factor, int | float) or not abs(factor) <= MAX_FACTOR:
                text = (
                    f"{name[:MAX_NAME_CHARACTERS]!r} must have a number of at most {MAX_FACTOR:g}; got {factor!r:.40}"
                )
                raise InvalidRequest("adapter", text)
            found.append((self.find(name), float(factor)))
        for name in shares:
            self.count_request(name)
        return add_adapters(found)

    def count_request(self, name: str) -> None:
        """Count a request that has chosen the adapter."""
        with self._lock:
            self._requests[name] += 1

    def unload(self, name: str) -> None:
        """Forget an adapter. Raises InvalidRequest if the name is unknown or answers use the adapter."""
        with self._lock:
            if name in self._entries and self._entries[name].is_in_use:
                raise InvalidRequest("adapter", f"{name} is in use; unload it when the answers with it have ended")
            self.find(name)
            del self._entries[name]

    def release(self, name: str, on_gone: Callable[[], None]) -> None:
        """Forget an adapter if it is there; `on_gone` is called, on any thread, once no answer uses it any more."""
        with self._lock:
            entry = self._entries.pop(name, None)
            number = None if entry is None else entry.number
            del entry

        def look() -> None:
            with self._lock:  # as two threads may look at once
                is_gone = number not in self._held and look in self._waiting
                if is_gone:
                    self._waiting.remove(look)
            if is_gone:
                on_gone()

        self._waiting.append(look)
        look()

    def _add(self, name: str, path: str | Path, version: str | None) -> _Entry:
        """Read an adapter and give it the name; the caller holds `_loading`."""
        self._make_room(name, self._measure(path))
        adapter = self._read(path)
        number = next(self._numbers)
        self._make_room(name, adapter.nbytes)

        def forget(_: object) -> None:
            self._held.pop(number, None)
            for look in list(self._waiting):
                look()

        with self._lock:
            self._held[number] = (weakref.ref(adapter, forget), adapter.nbytes)
            self._entries.pop(name, None)
            entry = self._entries[name] = _Entry(adapter, number, version)
        return entry

    def _make_room(self, name: str, size_bytes: int) -> None:
        """Let go of adapters that no answer uses and that can be read again, the longest unused first."""
        if size_bytes > self._most_bytes:
            text = f"{name} takes {size_bytes} bytes, and all may take {self._most_bytes}; raise adapter_bytes"
            raise InvalidRequest("adapter", text)
        with self._lock:
            for other in list(self._entries):
                if self.held_bytes + size_bytes <= self._most_bytes:
                    return
                if self._can_go(other, name):
                    del self._entries[other]
        held_bytes = self.held_bytes
        if held_bytes + size_bytes > self._most_bytes:
            stays = any(entry.version is None for entry in self._entries.values())
            remedy = "unload another one" if stays else "try again when answers with others have ended"
            text = f"{name} takes {size_bytes} bytes, and {held_bytes} of {self._most_bytes} are taken; {remedy}, or "
            raise (InvalidRequest if stays else AdaptersBusy)("adapter", f"{text}raise adapter_bytes")

    def _can_go(self, other: str, name: str) -> bool:
        """Return True if `other` may make room for `name`."""
        entry = self._entries[other]
        return entry.version is not None and (other == name or not entry.is_in_use)


def check_name(name: str) -> None:
    """Raise InvalidRequest if `name` cannot be the name of an adapter."""
    if not name or len(name) > MAX_NAME_CHARACTERS or not name.isprintable():
        raise InvalidRequest("adapter", f"cannot be named {name[:40]!r}")


class SessionAdapters(Adapters):
    """`Adapters` whose files are those of records. The methods that are awaited belong on one loop."""

    _reader: WorkThreads | None = None

    async def bring(self, record: AdapterRecord) -> Adapter:
        """Return the adapter of a record, read if need be, one at a time. Raises as `Adapters.provide` does."""
        found = self.peek(record.name, record.digest)
        if found is None:
            found = await self._require_reader().run(self.provide, record.name, record.path, record.digest)
        return found

    async def bring_sum(
        self, shares: Sequence[tuple[AdapterRecord, float]], is_served: Callable[[AdapterRecord], bool]
    ) -> Adapter | None:
        """Return the sum of the adapters of records, in their order, each times its factor; otherwise as `bring`.

        One that is served no more, as it was unloaded while it was read, is gone when the last answer with it ends.
        """
        found = []
        for record, factor in shares:
            found.append((await self.bring(record), factor))
            if not is_served(record):
                self.forget(record)
        return add_adapters(found)

    def forget(self, record: AdapterRecord) -> None:
        """Forget the adapter of a record if it is loaded; its memory is free once no answer uses it."""
        self.release(record.name, lambda: None)

    async def unload_and_wait(self, name: str) -> None:
        """Forget an adapter, and wait until no answer uses it any more."""
        loop = asyncio.get_running_loop()
        gone = asyncio.Event()

        def on_gone() -> None:
            loop.call_soon_threadsafe(gone.set)

        self.release(name, on_gone)
        await gone.wait()

    def stop(self) -> None:
        """End the thread that reads; adapters that wait for it are not read."""
        if self._reader is not None:
            self._reader.stop()

    def _require_reader(self) -> WorkThreads:
        if self._reader is None:
            self._reader = WorkThreads("mlxr-adapters", 1)
        return self._reader
