"""The main class, `Registry`: find, list, add, copy and remove models by name.

Files come first, rows last, when a model is added; rows go first, files last, when it is removed. So a process killed
at any moment leaves files that nobody lists, which `sweep` removes, but never a listed model without its files. Files
outside the store are referenced, never copied and never deleted.

A name that is taken is refused (NameTaken) unless the caller passes `replaces`. Then the old model stays whole until
the new one is in the catalogue, and only files that no other model has are removed.

`RegisteredAdapters` are low-rank adapters beside the models. One names its base, and is checked against it when it is
added. Files elsewhere are referenced; those that were uploaded lie in the store, and go with their row. Names come from
strangers: none can be a path, and none that of a part of a model, which begins with `@`.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType

from mlxr.core.errors import InvalidRequest, MlxrError, NameTaken, NoSpace, NotFound, RegistryError, Unavailable
from mlxr.registry.blobs import Blobs, Bundles, FileCheck, hash_files, list_ages, parse_digest, writing
from mlxr.registry.catalogue import BUSY_TIMEOUT_S, Catalogue
from mlxr.registry.record import (
    AdapterFacts,
    AdapterRecord,
    AdapterRef,
    Changes,
    Inspect,
    InspectAdapter,
    ModelFacts,
    ModelFile,
    ModelName,
    ModelRecord,
    Progress,
    name_for,
)

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", re.ASCII)


def check_adapter_name(name: str, field: str = "NAME") -> str:
    """Return the name; raises InvalidRequest naming `field` if an adapter cannot have it."""
    if _NAME.fullmatch(name) is None:
        reason = "letters, digits, _, . and - make up the name of an adapter, at most 128, and . and - do not begin it"
        raise InvalidRequest(field, f"{name[:80]!r} is none: {reason}")
    return name


class RegisteredAdapters:
    """The adapters of a registry, over its catalogue and its store."""

    def __init__(
        self, catalogue: Catalogue, blobs: Blobs, bundles: Bundles, inspect: InspectAdapter | None, files: FileCheck
    ) -> None:
        self._catalogue, self._blobs, self._bundles = catalogue, blobs, bundles
        self._inspect, self._files = inspect, files

    def use(self, catalogue: Catalogue) -> RegisteredAdapters:
        """The same adapters through another view of the catalogue."""
        return RegisteredAdapters(catalogue, self._blobs, self._bundles, self._inspect, self._files)

    def list(self) -> tuple[AdapterRecord, ...]:
        """All adapters by name except parts of models; `problem` is set if files are gone or changed."""
        return tuple(self._files.check(record) for record in self._catalogue.list_adapters() if not record.is_part)

    def get(self, name: str) -> AdapterRecord:
        """The adapter of that name; raises NotFound, or RegistryError if its files are gone or changed."""
        found = self._catalogue.find_adapter(name)
        if found is None:
            raise NotFound(f"adapter {name[:80]!r} not found; `mlxr adapters list` shows all")
        record = self._files.check(found)
        if record.problem is not None:
            raise RegistryError(f"adapter {record.name}: {record.problem}")
        return record

    def add(self, name: str, path: Path, base: ModelRecord, *, replaces: bool = False) -> AdapterRecord:
        """Give an adapter for `base` a name; its files stay where they are, and may be added again under their name.

        Raises NameTaken for another one of that name, unless this one `replaces` it.
        """
        return self._put(self.describe(check_adapter_name(name), path, base), replaces)

    def make_part(self, source: Path | Mapping[str, str] | AdapterRecord, base: ModelRecord) -> AdapterRef:
        """The adapter that a model is made with: one that has a name, files elsewhere, or blobs (name to digest)."""
        if isinstance(source, AdapterRecord):
            record = self.describe("@", source.path, base, is_owned=source.is_owned, stored=source.files)
        elif isinstance(source, Path):
            record = self.describe("@", source, base)
        else:
            digests = {name: parse_digest(digest, f"adapters.{name}") for name, digest in source.items()}
            path = self._bundles.make(digests)
            stored = [
                ModelFile(name, digest, status.st_size, status.st_mtime_ns)
                for name, digest in sorted(digests.items())
                for status in [self._blobs.status(digest)]
            ]
            record = self.describe("@", path, base, is_owned=True, stored=tuple(stored))
        # the same adapter referenced and in the store are two parts: the latter must not depend on the former's files
        name = f"@{record.digest if record.is_owned else _hash([str(record.path), record.digest])}"
        return self._refer(self._put(replace(record, name=name, is_part=True), True))

    def find_part(self, ref: AdapterRef) -> AdapterRecord:
        """The adapter that a model was made with; raises RegistryError when it is gone or changed."""
        try:
            return self.get(ref.name)
        except NotFound as error:
            raise RegistryError("the adapter that the model was made with is gone; create it again") from error

    def remove(self, name: str) -> AdapterRecord:
        """Remove an adapter; returns its record. Files elsewhere stay. Models that were made with it keep it."""
        with self._catalogue.change() as transaction:
            record = transaction.adapters.find(name)
            if record is None or record.is_part:
                raise NotFound(f"adapter {name[:80]!r} not found; `mlxr adapters list` shows all")
            transaction.adapters.delete(record.name)
        return record

    def describe(
        self,
        name: str,
        path: Path,
        base: ModelRecord,
        *,
        is_owned: bool = False,
        stored: tuple[ModelFile, ...] | None = None,
    ) -> AdapterRecord:
        """A record of the files at `path`, which fit `base`, in no catalogue yet. Raises as the loader does."""
        place = path if is_owned else path.expanduser().absolute()
        facts = self._look(place, base)
        files = hash_files(facts.files) if stored is None else stored
        return AdapterRecord(
            name=name,
            base=base.short_name,
            digest=_hash([[file.name, file.sha256] for file in files]),
            path=place,
            size_bytes=sum(file.size_bytes for file in files),
            format=facts.format,
            rank=facts.rank,
            weights=facts.weights,
            modified_at=datetime.now(UTC),
            is_owned=is_owned,
            files=files,
        )

    def _look(self, path: Path, base: ModelRecord) -> AdapterFacts:
        if self._inspect is None:
            raise InvalidRequest("adapter", "none can be read here")
        return self._inspect(path, base.path)

    def _refer(self, record: AdapterRecord) -> AdapterRef:
        return AdapterRef(record.name, record.digest)

    def _put(self, record: AdapterRecord, replaces: bool) -> AdapterRecord:
        with self._catalogue.change() as transaction:
            old = transaction.adapters.find(record.name)
            if old is not None and not replaces and (old.path, old.base) != (record.path, record.base):
                raise NameTaken("NAME", f"the adapter {old.name}")
            checked = self._files.check(record)
            if checked.problem is not None:
                raise RegistryError(f"adapter {record.name}: {checked.problem}")
            transaction.adapters.put(checked)
        return checked


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


NO_CHANGES = Changes()
CATALOGUE_NAME = "catalogue.db"
LEFTOVER_AGE_S = 24 * 3600.0  # a blob may wait this long for the model that it was uploaded for
DOWNLOAD_AGE_S = 14 * LEFTOVER_AGE_S  # and the beginning of a file for the pull to go on


class Registry:
    """The models in `folder`. Holds only paths until something is written; safe to share and to fork.

    `inspect` reads the facts of model files, `inspect_adapter` those of adapters. `builtin` are models that are always
    there, by name. If another process holds the catalogue, calls wait for up to `wait_s`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        inspect: Inspect,
        inspect_adapter: InspectAdapter | None = None,
        builtin: Mapping[str, Path] = MappingProxyType({}),
        wait_s: float = BUSY_TIMEOUT_S,
    ) -> None:
        self.folder = folder.expanduser().absolute()
        self.blobs = Blobs(self.folder / "blobs")
        self.downloads = self.folder / "downloads"
        self._bundles = Bundles(self.folder / "bundles", self.blobs)
        self._catalogue = Catalogue(self.folder / CATALOGUE_NAME, wait_s)
        self._inspect = inspect
        self._builtin = {str(ModelName.parse(name)): path for name, path in builtin.items()}
        self._files = FileCheck(self._bundles)
        self.adapters = RegisteredAdapters(self._catalogue, self.blobs, self._bundles, inspect_adapter, self._files)
        self._inspected: dict[tuple[Path, tuple[int, int]], ModelRecord] = {}

    def wait_longer(self) -> Registry:
        """The same registry with a longer wait for other processes, for work that is itself long."""
        other = copy.copy(self)
        other._catalogue = Catalogue(self._catalogue.path, BUSY_TIMEOUT_S)
        other.adapters = self.adapters.use(other._catalogue)
        return other

    def list(self) -> tuple[ModelRecord, ...]:
        """All models by name, built-in ones last; `problem` is set for those whose files are gone or changed."""
        checked = map(self._check_now, self._catalogue.list())
        named = [record for record in checked if record is not None]
        taken = {record.name.lower() for record in named}
        builtin = [self._describe(path, name) for name, path in self._builtin.items() if name not in taken]
        return (*named, *builtin)

    def get(self, name: str) -> ModelRecord:
        """The model of that name, ready to be loaded.

        Raises InvalidRequest if `name` is none, NotFound, or RegistryError if its files are gone or changed.
        """
        checked = str(ModelName.parse(name))
        found = self._catalogue.find(checked)
        record = None if found is None else self._check_now(found)
        if record is None:
            path = self._builtin.get(checked.lower())
            if path is None:
                raise NotFound(f"model {name!r} not found; `mlxr pull` fetches one, `mlxr list` shows all")
            return self._describe(path, checked.lower())
        if record.problem is not None:
            raise RegistryError(f"{record.short_name}: {record.problem}")
        return record

    def find(self, name_or_path: str | Path) -> ModelRecord:
        """`get`, or the file or folder at that path if there is no such name; for the machine's owner only."""
        text = str(name_or_path)
        try:
            return self.get(text)
        except (NotFound, InvalidRequest) as error:
            path = _expand(text)
            if path is None:
                raise NotFound(f"{text[:200]}: no such model, file or folder") from error
            return self._describe(path, text)

    def import_file(
        self,
        path: Path,
        name: str | None = None,
        changes: Changes = NO_CHANGES,
        progress: Progress | None = None,
        *,
        replaces: bool = False,
        tower: Path | None = None,
    ) -> ModelRecord:
        """Give a model outside the store a name; its files stay where they are, and a `tower` that fits is one of them.

        They are read once, for their digests; `progress` gets the bytes done and in all. A file may be imported again
        under its name, also after its contents changed.
        """
        model_name = name_for(path) if name is None else ModelName.parse(name, "NAME")
        place = path.expanduser().absolute()
        self.check_free(str(model_name), place, replaces=replaces)
        return self._put(_apply(self._reference(place, str(model_name), progress, tower), changes), replaces)

    def add(
        self,
        name: str,
        files: Mapping[str, str],
        changes: Changes = NO_CHANGES,
        *,
        from_name: str | None = None,
        replaces: bool = False,
    ) -> ModelRecord:
        """Make a model of blobs in the store: file name to digest. Raises NotFound for blobs that are not there."""
        model_name = ModelName.parse(name, "NAME")
        path = self.assemble(files)
        files = {file_name: parse_digest(digest) for file_name, digest in files.items()}
        try:
            facts = self._inspect(path)
        except (OSError, MlxrError):  # perhaps the last model that had a blob was removed meanwhile
            for digest in files.values():
                self.blobs.status(digest)
            raise
        stored = tuple(
            ModelFile(file_name, sha256, status.st_size, status.st_mtime_ns)
            for file_name, sha256 in sorted(files.items())
            for status in [self.blobs.status(sha256)]
        )
        record = _make_record(str(model_name), path, facts, stored, is_owned=True)
        return self._put(_apply(replace(record, from_name=from_name), changes), replaces)

    def inspect(self, files: Mapping[str, str]) -> ModelFacts:
        """The facts of a model made of blobs in the store (file name to digest). Raises as `add` does."""
        return self._inspect(self.assemble(files))

    def assemble(self, files: Mapping[str, str]) -> Path:
        """The file or folder that blobs make up (file name to digest); raises NotFound for blobs that are not there."""
        return self._bundles.make(
            {file_name: parse_digest(digest, f"files.{file_name}") for file_name, digest in files.items()}
        )

    def make_blob(self, write: Callable[[Path], object]) -> str:
        """The digest of a new blob, which `write` writes as a file; if it fails, nothing stays."""
        path = self.downloads / f"made-{secrets.token_hex(8)}"
        with writing(self.downloads):
            self.downloads.mkdir(parents=True, exist_ok=True)
            try:
                write(path)
                (made,) = hash_files([path])
                self.blobs.adopt(path, made.sha256)
            finally:
                path.unlink(missing_ok=True)
        return made.sha256

    def derive(self, name: str, source: ModelRecord, changes: Changes, *, replaces: bool = False) -> ModelRecord:
        """Make a model from another one's files, with `changes`."""
        model_name = ModelName.parse(name, "NAME")
        self.check_free(str(model_name), replaces=replaces)
        from_name, now = source.short_name, datetime.now(UTC)
        if not source.files:  # one that was never imported: a path or a built-in model
            source = self._reference(source.path, str(model_name))
        derived = replace(source, name=str(model_name), from_name=from_name, modified_at=now, last_used_at=None)
        return self._put(_apply(derived, changes), replaces)

    def copy(self, source: str | ModelRecord, destination: str, *, replaces: bool = False) -> ModelRecord:
        """Give a model a second name."""
        record = source if isinstance(source, ModelRecord) else self.get(source)
        name = ModelName.parse(destination, "destination")
        if not record.files:
            return self.import_file(record.path, str(name), replaces=replaces)
        copied = replace(record, name=str(name), modified_at=datetime.now(UTC), last_used_at=None)
        return self._put(copied, replaces)

    def check_free(self, name: str, path: Path | None = None, *, replaces: bool = False) -> None:
        """Raise NameTaken if a model has `name`, unless it is the bare files at `path`, which would be read again.

        With `replaces`, only the names of models that come with mlxr are refused (InvalidRequest).
        """
        checked = str(ModelName.parse(name, "NAME"))
        if checked.lower() in self._builtin:
            raise InvalidRequest("NAME", f"{checked.removesuffix(':latest')} comes with mlxr; choose another name")
        old = None if replaces else self._catalogue.find(checked)
        if old is not None and (path is None or not _is_bare(old, path)):
            raise NameTaken("NAME", old.short_name)

    def remove(self, name: str) -> ModelRecord:
        """Remove a model, and its files in the store that no other model has. Files elsewhere stay."""
        checked = str(ModelName.parse(name))
        with self._catalogue.change() as transaction:
            record = transaction.find(checked)
            if record is None:
                if checked.lower() in self._builtin:
                    raise InvalidRequest("model", f"{name!r} comes with mlxr and cannot be removed")
                raise NotFound(f"model {name!r} not found")
            transaction.delete(record.name)
        if record.is_owned:
            self._drop_unused([file.sha256 for file in record.files], [record.path])
        self._drop_part(record)
        return record

    def find_adapter_of(self, record: ModelRecord) -> AdapterRecord | None:
        """The adapter that a model was made with, None for most; raises RegistryError when it is gone or changed."""
        return None if record.adapter is None else self.adapters.find_part(record.adapter)

    def remove_adapter(self, name: str) -> AdapterRecord:
        """Remove an adapter, and its files in the store that nothing else has. Files elsewhere stay."""
        record = self.adapters.remove(name)
        if record.is_owned:
            self._drop_unused([file.sha256 for file in record.files], [record.path])
        return record

    def touch(self, name: str) -> None:
        """Note that a model was used now; nothing happens for one that is not in the catalogue."""
        if self._catalogue.find(name) is not None:
            with self._catalogue.change() as transaction:
                transaction.mark_used(name, datetime.now(UTC))

    def sweep(self, min_age_s: float = LEFTOVER_AGE_S) -> None:
        """Remove files of no model that uploads, pulls or dead processes left at least that long ago."""
        self.blobs.sweep_incoming(min_age_s)
        for path, age_s in list_ages(self.downloads):
            if age_s >= max(min_age_s, DOWNLOAD_AGE_S):
                path.unlink(missing_ok=True)
        old = [digest for digest, age_s in self.blobs.digests() if age_s >= min_age_s]
        if old:
            self._drop_unused(old)

    def discard(self, digests: Sequence[str]) -> None:
        """Remove the blobs that no model has."""
        self._drop_unused(digests)

    def store_bytes(self) -> int:
        """The bytes that the blobs take on disk."""
        return sum(self.blobs.path(digest).stat().st_size for digest, _ in self.blobs.digests())

    def _reference(
        self, path: Path, name: str, progress: Progress | None = None, tower: Path | None = None
    ) -> ModelRecord:
        """A record of files outside the store, which are read for their digests; it is in no catalogue yet."""
        facts = self._inspect(path, tower)
        return _apply(_make_record(name, path, facts, hash_files(facts.files, progress), is_owned=False), NO_CHANGES)

    def _put(self, record: ModelRecord, replaces: bool) -> ModelRecord:
        """Write the row once all files are known to be there; then remove the files that only the old model had."""
        self.check_free(record.name, replaces=True)
        with self._catalogue.change() as transaction:
            record = self._files.check(record)
            if record.problem is not None:
                raise RegistryError(f"{record.short_name}: {record.problem}")
            old = transaction.find(record.name)
            if old is not None and not replaces and not _is_again(record, old):
                raise NameTaken("NAME", old.short_name)
            transaction.put(record)
        if old is not None and old.is_owned:
            kept = {file.sha256 for file in record.files}
            self._drop_unused([file.sha256 for file in old.files if file.sha256 not in kept], [old.path])
        if old is not None and old.adapter != record.adapter:
            self._drop_part(old)
        return record

    def _drop_part(self, record: ModelRecord) -> None:
        """Remove the adapter of a model that is gone, unless another model was made with it."""
        if record.adapter is None:
            return
        with self._catalogue.change() as transaction:
            part = transaction.adapters.find(record.adapter.name)
            if part is None or transaction.adapters.is_part_of_a_model(part.name):
                return
            transaction.adapters.delete(part.name)
        if part.is_owned:
            self._drop_unused([file.sha256 for file in part.files], [part.path])

    def _drop_unused(self, digests: Sequence[str], gone: Sequence[Path] = ()) -> None:
        """Delete blobs and bundles that no model has. Other writers wait, so that no new model takes one meanwhile."""
        with self._catalogue.change() as transaction:
            for digest in transaction.unused(digests):
                self.blobs.path(digest).unlink(missing_ok=True)
            self._bundles.sweep(transaction.owned_paths(), gone)

    def _describe(self, path: Path, name: str) -> ModelRecord:
        """A record of files that are in no catalogue."""
        place = path.absolute()
        status = place.stat()
        key = (place, (status.st_size, status.st_mtime_ns))
        record = self._inspected.get(key)
        if record is None:
            facts = self._inspect(place)
            size_bytes = sum(file.stat().st_size for file in facts.files)
            record = replace(_make_record(name, place, facts, (), is_owned=False), size_bytes=size_bytes)
            identity = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in facts.files]
            changed = datetime.fromtimestamp(max(ns for _, _, ns in identity) / 1e9, UTC)
            record = replace(record, digest=_hash_json(identity), modified_at=changed)
            self._inspected[key] = record
        return replace(record, name=name)

    def _check_now(self, record: ModelRecord) -> ModelRecord | None:
        """The checked record, or None if the model was removed since it was read.

        Another process or thread may remove a model, whose files go after its record. So a record whose files are gone
        is looked up again before it is said to have a problem.
        """
        checked = self._keep_check(record)
        while checked.problem is not None:
            now = self._catalogue.find(record.name)
            if now is None:
                return None
            if now == record:
                break
            record, checked = now, self._keep_check(now)
        return checked

    def _keep_check(self, record: ModelRecord) -> ModelRecord:
        """The checked record. If only the times of its files changed, they are noted, so that nothing is read again."""
        checked = self._files.check(record)
        if checked.files != record.files:
            # This only saves time, so it does not wait for a catalogue that is held or cannot be written.
            with contextlib.suppress(Unavailable, NoSpace), self._catalogue.change(wait_s=0.0) as transaction:
                if transaction.find(record.name) == record:
                    transaction.put(checked)
        return checked


def _is_again(record: ModelRecord, old: ModelRecord) -> bool:
    """Return True if `record` equals `old`, has the same weights, or is a new state of the same files."""
    is_equal = [file.sha256 for file in old.files] == [file.sha256 for file in record.files]
    return old.digest == record.digest or (
        record.from_name is None and (_is_bare(old, record.path) or (is_equal and _is_bare(old, old.path)))
    )


def _is_bare(record: ModelRecord, path: Path) -> bool:
    """Return True if a record only names the files at `path`: it has no settings that could be lost."""
    is_set = record.from_name or record.template or record.system or record.messages or record.adapter
    return record.path == path and not is_set


def _expand(text: str) -> Path | None:
    """The path that `text` means, None if nothing is there."""
    try:
        path = Path(text).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError, ValueError):  # too long, no such user, a null character
        return None


def _make_record(
    name: str, path: Path, facts: ModelFacts, files: tuple[ModelFile, ...], *, is_owned: bool
) -> ModelRecord:
    return ModelRecord(
        name=name,
        digest="",
        path=path,
        size_bytes=sum(file.size_bytes for file in files),
        format=facts.format,
        architecture=facts.architecture,
        parameters_count=facts.parameters,
        quantization=facts.quantization,
        context_tokens=facts.context_tokens,
        embedding_length=facts.embedding_length,
        modified_at=datetime.now(UTC),
        last_used_at=None,
        is_owned=is_owned,
        parameters=facts.sampling,
        own_template=facts.template,
        capabilities=facts.capabilities,
        files=files,
        license=facts.license,
    )


def _apply(record: ModelRecord, changes: Changes) -> ModelRecord:
    """The record with the changes, and its new digest."""
    parameters = {**record.parameters, **(changes.parameters or {})}
    changed = replace(
        record,
        template=record.template if changes.template is None else changes.template,
        system=record.system if changes.system is None else changes.system,
        parameters=parameters,
        messages=record.messages if changes.messages is None else tuple(changes.messages),
        license=record.license if changes.license is None else changes.license,
        capabilities=record.capabilities if changes.capabilities is None else changes.capabilities,
        adapter=record.adapter if changes.adapter is None else changes.adapter,
    )
    parts = [[file.name, file.sha256] for file in changed.files]
    settings = [changed.template, changed.system, parameters, [dict(message) for message in changed.messages]]
    settings += [] if changed.adapter is None else [changed.adapter.digest]
    return replace(changed, digest=_hash_json([parts, settings, changed.license]))


def _hash_json(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
