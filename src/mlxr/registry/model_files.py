"""Files of models that lie outside the store: their digests, and whether they still are what they were.

Size and time of change tell it without reading. Where only the time is new (a copy, a fresh checkout), the digest does.
Knows no names of models.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from mlxr.core.errors import MlxrError, RegistryError
from mlxr.registry.blobs import CHUNK_BYTES
from mlxr.registry.bundles import Bundles
from mlxr.registry.record import AdapterRecord, ModelFile, ModelRecord, Progress

Record = TypeVar("Record", ModelRecord, AdapterRecord)


def hash_files(paths: Sequence[Path], progress: Progress | None = None) -> tuple[ModelFile, ...]:
    """Read the files for their digests. One that changes meanwhile is found changed when it is used."""
    total_bytes = sum(path.stat().st_size for path in paths)
    done_bytes = 0
    files = []
    for path in paths:
        digest = hashlib.sha256()
        with path.open("rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
                done_bytes += len(chunk)
                if progress is not None:
                    progress(done_bytes, total_bytes)
        files.append(ModelFile(path.name, digest.hexdigest(), status.st_size, status.st_mtime_ns))
    return tuple(files)


class FileCheck:
    """Compares the files of models and adapters with their records, and remembers the digests that it had to make."""

    def __init__(self, bundles: Bundles) -> None:
        self._bundles = bundles
        self._read: dict[Path, ModelFile] = {}

    def check(self, record: Record) -> Record:
        """The record with its `problem`: why its files cannot be used, None if they hold what they did."""
        if record.problem is not None:  # its row is damaged
            return record
        try:
            if record.is_owned:
                return replace(record, problem=self._bundles.find_problem(record.path, record.files))
            folder = record.path if record.path.is_dir() else record.path.parent
            return replace(record, files=self.refresh(folder, record.files), problem=None)
        except OSError as error:
            return replace(record, problem=f"{error.filename}: {error.strerror or error}")
        except (MlxrError, ValueError) as error:  # the latter of a path that none can be
            return replace(record, problem=str(error))

    def refresh(self, folder: Path, files: Sequence[ModelFile]) -> tuple[ModelFile, ...]:
        """The records of files that hold what they did, with the times of now.

        Raises RegistryError for a file that holds something else, OSError for one that is gone.
        """
        return tuple(self._refresh_file(folder / file.name, file) for file in files)

    def _refresh_file(self, path: Path, file: ModelFile) -> ModelFile:
        status = path.stat()
        if status.st_size == file.size_bytes:
            if status.st_mtime_ns == file.changed_ns:
                return file
            read = self._read.get(path)
            if read is None or (read.size_bytes, read.changed_ns) != (status.st_size, status.st_mtime_ns):
                (read,) = hash_files([path])
                self._read[path] = read
            if read.sha256 == file.sha256:
                return replace(file, changed_ns=read.changed_ns)
        raise RegistryError(f"{path} changed since it was imported; import it again")
