"""Low-rank adapters beside the models: found, listed, added and removed by name.

An adapter names its base, and is checked against it when it is added. Files elsewhere are referenced; those that were
uploaded lie in the store, and go with their row. Names come from strangers: none can be a path, and none that of a part
of a model, which begins with `@`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from mlxr.core.errors import InvalidRequest, NameTaken, NotFound, RegistryError
from mlxr.registry.blobs import FileCheck, hash_files, parse_digest
from mlxr.registry.record import AdapterFacts, AdapterRecord, AdapterRef, InspectAdapter, ModelFile, ModelRecord

if TYPE_CHECKING:
    from mlxr.registry.blobs import Blobs, Bundles
    from mlxr.registry.catalogue import Catalogue

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", re.ASCII)


def check_adapter_name(name: str, field: str = "NAME") -> str:
    """The name; raises InvalidRequest naming `field` for what cannot be that of an adapter."""
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
        """All adapters by name but those that are parts of models; `problem` is set where files are gone or changed."""
        return tuple(self._files.check(record) for record in self._catalogue.list_adapters() if not record.is_part)

    def get(self, name: str) -> AdapterRecord:
        """The adapter of that name; NotFound, or RegistryError when its files are gone or changed."""
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
        # one that is referenced is another part than the same in the store, which must not depend on it
        name = f"@{record.digest if record.is_owned else _hash([str(record.path), record.digest])}"
        return self._refer(self._put(replace(record, name=name, is_part=True), True))

    def find_part(self, ref: AdapterRef) -> AdapterRecord:
        """The adapter that a model was made with; raises RegistryError when it is gone or changed."""
        try:
            return self.get(ref.name)
        except NotFound as error:
            raise RegistryError("the adapter that the model was made with is gone; create it again") from error

    def remove(self, name: str) -> AdapterRecord:
        """Remove an adapter; returns what it was. Files elsewhere stay. Models that were made with it keep it."""
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
