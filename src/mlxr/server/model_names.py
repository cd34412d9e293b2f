"""The models and adapters that a client may name: those of the catalogue, aliases, and the files that the owner gave.

The pool asks `ServedModels`, so a name from a request never opens a file of its choice. `ServedAdapters` knows the
low-rank adapters: those of the registry, of the settings, and those that were given to the server since it started. A
model of a name goes before an adapter. `base:adapter` is an adapter of that model, or of one of the same files; an
adapter's name alone is that adapter on its own base. `find_importable` checks the files that a request may import.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cached_property, partial
from pathlib import Path

from starlette.requests import Request

from mlxr.core.errors import FormatError, InvalidRequest, MlxrError, ModelError, NotFound, SettingError, Unavailable
from mlxr.core.settings import Settings
from mlxr.core.work_threads import WorkThreads
from mlxr.registry import AdapterRecord, ModelName, ModelRecord, Registry
from mlxr.registry.record import name_for
from mlxr.registry.registry import check_adapter_name
from mlxr.server.errors import ServerError
from mlxr.server.generation import borrow
from mlxr.server.parts import parts_of
from mlxr.server.streaming import until_disconnected
from mlxr.server.work import look, start_make
from mlxr.service.catalogue import BUILTIN_DEFAULT, FRESH_S, DefaultModel, Remembered, choose_default

logger = logging.getLogger(__name__)
NEAR = 0.5  # the similarity, up to 1, from which on a name is suggested for another
SHOWN = 8  # names in an error


class ServedModels:
    """The registry as clients see it, with aliases and with the files that the settings name beside it.

    Such a file has the name that `mlxr import` would give it, or its path if that is taken. Raises SettingError for
    malformed aliases.
    """

    def __init__(self, registry: Registry, settings: Settings) -> None:
        self.registry, self.aliases, self._settings = registry, read_aliases(settings), settings
        given = [settings.default_model, *settings.pinned_models, *self.aliases.values()]
        self._given = tuple(dict.fromkeys(name for name in given if name is not None))
        self.adapters = ServedAdapters(self, settings)
        self._default: DefaultModel | None = None

    def find(self, name: str, /) -> ModelRecord:
        """Return the model of that name or alias, or at a path that the settings name. Raises as the registry."""
        try:
            return self._find_named(name)
        except (NotFound, InvalidRequest) as error:
            model = find_alias(self.aliases, name)
            if model is None:
                near = self._find_near(name) if isinstance(error, NotFound) else ""
                raise NotFound(f"{error}; {near}") if near else error from None
            return self._find_named(model)

    def refuse_file_name(self, name: str, field: str) -> None:
        """Raise InvalidRequest if `name` is that of a file in the settings, which the catalogue does not have.

        A new model of that name could never be found, and the catalogue cannot remove a file of the settings.
        """
        file = self._files.get(name) or self._files.get(_normalise(name))
        if file is not None:
            told = f"{file[0].removesuffix(':latest')} is a file that the server was started with, {file[1]}"
            raise InvalidRequest(field, f"{told}; the catalogue has only what is imported, under another name")

    def find_base(self, name: str) -> ModelRecord:
        """Return the model of that name or alias, or the base of the adapter of that name; raises as `find`."""
        found = self.adapters.match(name)
        return self.find(name if found is None else found[0])

    def has(self, name: str) -> bool:
        """Return True if a model has that name, or an alias without `*` is that name."""
        if name in self._files or _normalise(name) in self._files or name.lower() in self.aliases:
            return True
        return self._is_in_catalogue(name)

    def list(self) -> tuple[ModelRecord, ...]:
        """Return all models, without aliases; `problem` is set for those whose files are gone or changed."""
        files: list[ModelRecord] = []
        for name, path in dict.fromkeys(self._files.values()):
            try:
                files.append(self._find_file(name, path))
            except MlxrError:  # it has gone
                continue
        return (*files, *self.registry.list())

    def find_stand_in(self) -> str | None:
        """Return the model that answers for names that no model has: the default model, or the only model.

        None if that would be a guess, or if the setting `strict_model_names` is on. Models that come with mlxr count
        only if there are no others.
        """
        if self._settings.strict_model_names:
            return None
        if self._settings.default_model is not None:
            return self._settings.default_model
        names = [record.name for record in self.registry.list() if record.files and record.problem is None]
        return names[0] if len(names) == 1 else None if names else BUILTIN_DEFAULT

    def find_default(self) -> str:
        """Return the name of the model that answers if a request names none; see `choose_default`."""
        return self.explain_default().name

    def explain_default(self) -> DefaultModel:
        """Return the default model, and the reason. It stays the same as long as it exists; only a model of the owner
        replaces the demo.

        So a request that names no model does not get the model that another client happened to use.
        """
        kept = self._default
        try:
            if kept is not None and (kept.is_set or (kept.is_own and self._is_in_catalogue(kept.name))):
                return kept
            self._default = chosen = choose_default(self.registry, self._settings)
        except MlxrError:  # the catalogue cannot be read now
            return kept or DefaultModel(BUILTIN_DEFAULT, "the catalogue of models cannot be read", is_own=False)
        if kept is not None and kept != chosen:
            logger.info("the default model is %s now: %s", chosen.name, chosen.reason)
        return chosen

    def touch(self, name: str, /) -> None:
        """Note that a model was used now."""
        self.registry.touch(name)

    @cached_property
    def _files(self) -> dict[str, tuple[str, str]]:
        """Name and path of each file that the settings name, by its name and by its path."""
        files: dict[str, tuple[str, str]] = {}
        for path in self._given:
            if self._is_in_catalogue(path):
                continue
            try:
                name = str(name_for(self.registry.find(path).path))
            except MlxrError:  # no such file, or no model: a request for it will tell why
                continue
            if _normalise(name) in files or self._is_in_catalogue(name):
                name = path
            files[path] = files[_normalise(name)] = (name, path)
        return files

    def _find_named(self, name: str) -> ModelRecord:
        """Return the model of that name, or the file at that path if the settings name it."""
        file = self._files.get(name) or self._files.get(_normalise(name))
        if file is not None:
            return self._find_file(*file)
        return self.registry.find(name) if name in self._given else self.registry.get(name)

    def _find_file(self, name: str, path: str) -> ModelRecord:
        return replace(self.registry.find(path), name=name)

    def _find_near(self, name: str) -> str:
        """Return the names that may be meant, or all names if none is near, as a part of a sentence."""
        names = [record.short_name for record in self.list()]
        names += [alias for alias in self.aliases if "*" not in alias]
        near = get_close_matches(name.lower().removesuffix(":latest"), names, cutoff=NEAR)
        if near:
            return f"near it: {', '.join(near)}"
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        return f"there are: {', '.join(names[:SHOWN])}{more}" if names else ""

    def _is_in_catalogue(self, name: str) -> bool:
        try:
            self.registry.get(name)
        except (NotFound, InvalidRequest):
            return False
        except Unavailable:  # unknown now, and a wrong answer must not be kept
            raise
        except MlxrError:  # it is there and cannot be used
            pass
        return True


def read_aliases(settings: Settings) -> Mapping[str, str]:
    """Read aliases in lower case and their models from the setting `model_aliases`; raises SettingError."""
    aliases: dict[str, str] = {}
    for row in settings.model_aliases:
        alias, _, model = (part.strip() for part in row.partition("="))
        if not alias or not model:
            raise SettingError(f"model_aliases: must be alias=model, such as gpt-4o=llama3:8b; got {row!r}")
        aliases[alias.lower()] = model
    return aliases


def find_alias(aliases: Mapping[str, str], name: str) -> str | None:
    """Return the model of the alias that fits `name`: one that is spelt out goes before one with a `*`."""
    wanted = name.lower().removesuffix(":latest")
    fitting = (model for alias, model in aliases.items() if "*" in alias and fnmatchcase(wanted, _escape(alias)))
    return aliases.get(wanted) or next(fitting, None)


def _escape(alias: str) -> str:
    """Return a pattern of fnmatch in which only `*` has a meaning."""
    return "".join(f"[{char}]" if char in "?[" else char for char in alias)


def _normalise(name: str) -> str:
    """Return one spelling for all spellings of a name; text that is no name stays unchanged."""
    try:
        return str(ModelName.parse(name)).lower()
    except InvalidRequest:
        return name


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
        self.matches = Remembered(self.match, self._threads, time.monotonic)  # `match` for routes, and
        self.listed = Remembered(self.list_for, self._threads, time.monotonic)  # `list_for`, which must not block

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
        """Return all adapters: those that were given to this server in their order, then the registry's by name."""
        kept = self._read_kept()
        return (*self._given.values(), *(record for name, record in kept.items() if name not in self._given))

    def get(self, name: str) -> AdapterRecord:
        """Return the adapter of that name; raises NotFound, with the known names, for an unknown one."""
        record = self._find(name)
        if record is None:
            known = ", ".join(one.name for one in self.list()[:8]) or "none"
            raise NotFound(f"adapter {name[:80]!r} not found; there are: {known}")
        return record

    def match(self, name: str) -> tuple[str, AdapterRecord] | None:
        """Return the model and the adapter that `name` means; None if it means no adapter. Waits for the disk."""
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
        """Return the adapters for a model, by its name. Their places in this list are their ids."""
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
        """Make a record of the adapter at `path`; requests may name it only after `give`. Raises InvalidRequest if the
        name is taken, unless it `replaces` that adapter, and the loader's errors if the files do not fit the base.
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
        """Stop serving an adapter that was given; those of the registry stay. Raises NotFound."""
        record = self.get(name)
        with self._lock:
            self._given.pop(record.name.lower(), None)
        self._forget()
        return record

    def is_served(self, record: AdapterRecord) -> bool:
        """Return False if the adapter has been taken back. Does not wait for the disk."""
        name, kept = record.name.lower(), self._kept
        return name in self._given or (kept is not None and name in kept[1])

    def read_scales(self, base: str) -> Mapping[str, float]:
        """Return the factors, by adapter, for requests to a model that name no adapter; empty if they use none."""
        return self._scales.get(base.lower(), {})

    def set_scales(self, base: str, scales: Mapping[str, float]) -> None:
        """Set these factors; adapters with 0 are left out."""
        self._scales[base.lower()] = {name: factor for name, factor in scales.items() if factor}

    def choose(
        self, listed: Sequence[AdapterRecord], shares: Sequence[tuple[int, float]]
    ) -> Sequence[tuple[AdapterRecord, float]]:
        """Return those of the `listed` adapters that have the ids, in their order, with factors."""
        factors = dict(shares)
        return [(record, factors[index]) for index, record in enumerate(listed) if factors.get(index)]

    def _check_free(self, name: str, replaces: bool) -> None:
        check_adapter_name(name, "name")
        if self._served.has(name):
            raise InvalidRequest("name", f"a model has the name {name!r} already")
        if not replaces and self._find(name) is not None:
            raise InvalidRequest("name", f"the adapter {name!r} has been loaded already; unload it first")

    def stop(self) -> None:
        """Stop the threads that look up adapters."""
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


async def load_adapter(
    request: Request, name: str, path: str, base: str | None, *, replaces: bool = False
) -> AdapterRecord:
    """Read the adapter at `path` for its base, which is loaded first if need be, and let requests name it.

    If this fails, the adapter that it would replace stays.
    Raises ServerError or InvalidRequest for a path that may not be named, a bad name, and files that do not fit.
    """
    served = parts_of(request).served
    try:
        place = await look(request, _find_path, request, path)
        describe = partial(served.adapters.describe, name, place, base, replaces=replaces)
        record = await start_make(request, lambda _registry, _stop: describe())
    except (FormatError, ModelError) as error:
        raise ServerError(400, "model_unusable", str(error), "path") from error
    lease = await borrow(request, record.base, exact=True)
    loaded = lease.session.adapters
    try:
        await until_disconnected(request, loaded.bring(record))
        await look(request, partial(served.adapters.give, record, replaces=replaces))
    except BaseException:
        if not served.adapters.is_served(record):
            loaded.forget(record)
        raise
    return record


async def forget_adapter(request: Request, name: str) -> AdapterRecord:
    """Stop serving an adapter, unless the registry has it; wait until no answer uses it any more.

    Raises NotFound for an unknown name.
    """
    parts = parts_of(request)
    try:
        record: AdapterRecord = await look(request, parts.served.adapters.take_back, name)
    except NotFound as error:
        raise ServerError(404, "not_found", str(error), "name") from error
    waits = [model.session.adapters.unload_and_wait(record.name) for model in parts.pool.running()]
    await until_disconnected(request, _wait_for_all(waits))
    return record


async def _wait_for_all(waits: Sequence[Awaitable[None]]) -> None:
    await asyncio.gather(*waits)


def _find_path(request: Request, text: str) -> Path:
    """Return the files for a request: those of an adapter of the registry, or below the folders for imports."""
    parts = parts_of(request)
    try:
        registered: AdapterRecord = parts.registry.adapters.get(text)
    except (NotFound, InvalidRequest):
        return find_importable(parts.settings, text)
    return registered.path


def find_importable(settings: Settings, text: str) -> Path:
    """Return the file or folder at that path if a request may import it; otherwise raises ServerError.

    Links are followed first, so none leads out of the folders. A path outside is refused in the same words whether it
    exists or not.
    """
    folders = [Path(folder).expanduser().resolve() for folder in settings.import_folders]
    if not folders:
        remedy = "start the server with --import-folders FOLDER, or run `mlxr import PATH` on its machine"
        raise ServerError(403, "forbidden", f"no folder to import from is set; {remedy}", "path")
    try:
        # Joining an absolute path to a folder gives the path itself.
        inside = [path for folder in folders if (path := (folder / text).resolve()).is_relative_to(folder)]
        found = next((path for path in inside if path.exists()), None)
    except (OSError, RuntimeError, ValueError) as error:  # links in a circle, names too long, null characters
        raise ServerError(400, "invalid_request", "path: is not one that a file can have", "path") from error
    if not inside:
        shown = ", ".join(settings.import_folders)
        raise ServerError(403, "forbidden", f"path: only what lies below {shown} can be imported", "path")
    if found is None:
        raise ServerError(404, "not_found", f"path: there is no file or folder {text[:200]!r}", "path")
    return found
