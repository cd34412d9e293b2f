"""Which low-rank adapters requests may name, and for which model: those of the registry, of the settings, and those
that were given to the server since it started.

A model of a name counts before an adapter. `base:adapter` is an adapter of that model, or of one of the same files; an
adapter's name alone is that adapter on its own base. Nothing here opens a file of a request's choice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mlxr.core.errors import InvalidRequest, MlxrError, NotFound, SettingError
from mlxr.core.settings import Settings
from mlxr.core.work_threads import WorkThreads
from mlxr.registry import AdapterRecord
from mlxr.registry.adapters import check_adapter_name
from mlxr.service.remembered import FRESH_S, Remembered

if TYPE_CHECKING:
    from mlxr.server.served import ServedModels

LOOK_THREADS = 2


class ServedAdapters:
    """The adapters of `served`. Safe to use from several threads."""

    def __init__(self, served: ServedModels, settings: Settings) -> None:
        self._served, self._settings = served, settings
        self._given: dict[str, AdapterRecord] = {}  # by name in lower case
        self._kept: tuple[float, Mapping[str, AdapterRecord]] | None = None
        self._scales: dict[str, Mapping[str, float]] = {}  # name of a base in lower case to factors by adapter
        self._lock = threading.Lock()
        self._is_read = False
        self._threads = WorkThreads("mlxr-adapter", LOOK_THREADS)
        self.matches = Remembered(self.match, self._threads, time.monotonic)  # `match`, and
        self.listed = Remembered(self.list_for, self._threads, time.monotonic)  # `list_for`, for routes that answer

    def read_settings(self) -> None:
        """Read the adapters of the settings, once. Raises SettingError for one that is wrong."""
        with self._lock:
            if self._is_read:
                return
            for row in self._settings.adapters:
                name, equals, path = row.partition("=")
                base, _, own = name.rpartition(":")
                if not equals or not path:
                    raise SettingError(f"adapters: must be name=path or model:name=path; got {row!r}")
                try:
                    record = self._describe(own, Path(path).expanduser(), base or None)
                except MlxrError as error:
                    raise SettingError(f"adapters: {error}") from error
                self._given[own.lower()] = record
            self._is_read = True

    def list(self) -> tuple[AdapterRecord, ...]:
        """All adapters: those that were given to this server in their order, then those of the registry by name."""
        kept = self._read_kept()
        return (*self._given.values(), *(record for name, record in kept.items() if name not in self._given))

    def get(self, name: str) -> AdapterRecord:
        """The adapter of that name; raises NotFound, with those that there are, for an unknown one."""
        record = self._find(name)
        if record is None:
            known = ", ".join(one.name for one in self.list()[:8]) or "none"
            raise NotFound(f"adapter {name[:80]!r} not found; there are: {known}")
        return record

    def match(self, name: str) -> tuple[str, AdapterRecord] | None:
        """The model and the adapter that `name` means; None where it means no adapter. Waits for the disk."""
        self.read_settings()
        head, _, tail = name.rpartition(":")
        own, of_base = self._find(name), self._find(tail)
        if (own is None and of_base is None) or self._served.has(name):
            return None
        if own is not None:
            return own.base, own
        if of_base is None or not self._served.has(head):
            return None
        base, wanted = self._served.find(of_base.base), self._served.find(head)
        if base.path != wanted.path:
            raise InvalidRequest("model", f"the adapter {of_base.name} is for {of_base.base}, not for {head[:80]}")
        return head, of_base

    def list_for(self, model: str) -> tuple[AdapterRecord, ...]:
        """The adapters for a model, by its name. Their places in this list are their ids."""
        self.read_settings()
        path = self._served.find(model).path
        found = []
        for record in self.list():
            try:
                if self._served.find(record.base).path == path:
                    found.append(record)
            except MlxrError:  # its base is not here
                continue
        return tuple(found)

    def describe(self, name: str, path: Path, base: str | None = None, *, replaces: bool = False) -> AdapterRecord:
        """A record of the adapter at `path`, which nobody may name before it is given. Raises InvalidRequest for a name
        that is taken, unless it `replaces` that, and what the loader says of files that are none of the base's.
        """
        self.read_settings()
        self._check_free(name, replaces)
        return self._describe(name, path, base)

    def give(self, record: AdapterRecord, *, replaces: bool = False) -> None:
        """Let requests name an adapter for as long as the server runs; raises InvalidRequest as `describe` does."""
        self._check_free(record.name, replaces)
        with self._lock:
            self._given[record.name.lower()] = record
        self._forget()

    def take_back(self, name: str) -> AdapterRecord:
        """Let requests name an adapter no longer, if it was given; those of the registry stay. Raises NotFound."""
        record = self.get(name)
        with self._lock:
            self._given.pop(record.name.lower(), None)
        self._forget()
        return record

    def read_scales(self, base: str) -> Mapping[str, float]:
        """The factors, by adapter, of requests to a model that name no adapter; without any they have none."""
        return self._scales.get(base.lower(), {})

    def set_scales(self, base: str, scales: Mapping[str, float]) -> None:
        """Set these factors; 0 counts as not named."""
        self._scales[base.lower()] = {name: factor for name, factor in scales.items() if factor}

    def choose(
        self, listed: Sequence[AdapterRecord], shares: Sequence[tuple[int, float]]
    ) -> Sequence[tuple[AdapterRecord, float]]:
        """Those of the `listed` adapters that have the ids, in their order, with factors; others are left out."""
        factors = dict(shares)
        return [(record, factors[index]) for index, record in enumerate(listed) if factors.get(index)]

    def _check_free(self, name: str, replaces: bool) -> None:
        check_adapter_name(name, "name")
        if self._served.has(name):
            raise InvalidRequest("name", f"a model has the name {name!r} already")
        if not replaces and self._find(name) is not None:
            raise InvalidRequest("name", f"the adapter {name!r} has been loaded already; unload it first")

    def stop(self) -> None:
        """Look for nothing more."""
        self._threads.stop()

    def _forget(self) -> None:
        for remembered in (self.matches, self.listed):
            remembered.forget()

    def _find(self, name: str) -> AdapterRecord | None:
        return self._given.get(name.lower()) or self._read_kept().get(name.lower())

    def _read_kept(self) -> Mapping[str, AdapterRecord]:
        kept = self._kept
        if kept is None or time.monotonic() - kept[0] > FRESH_S:
            records = self._served.registry.adapters.list()
            kept = (time.monotonic(), {record.name.lower(): record for record in records if record.problem is None})
            self._kept = kept
        return kept[1]

    def _describe(self, name: str, path: Path, base: str | None) -> AdapterRecord:
        check_adapter_name(name, "adapter")
        model = self._served.find(base or self._served.find_default())
        record = self._served.registry.adapters.describe(name, path, model)
        return replace(record, base=model.short_name)
