"""Files named by their SHA-256, in one folder of the store.

A blob is written beside its place, checked, synced and renamed: under its name there is either nothing or all of it.
Digests come from strangers: only 64 hexadecimal digits make a file name, and a blob that is a link is refused.

A model that is one GGUF file is its blob. Split files and folders need names: they are a bundle, a folder of links to
blobs, named by a hash of its contents. A link is followed only if it is ours: relative, to the blob that the catalogue
names.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from mlxr.core.errors import InvalidRequest, MlxrError, NoSpace, NotFound, RegistryError
from mlxr.core.types import is_tower_file
from mlxr.registry.record import AdapterRecord, ModelFile, ModelRecord, Progress

REMEDY = "free space, let the folder be written, or name another one with the setting models_folder"
_TAKES_NOTHING = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG}


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Raise NoSpace if the block cannot write in `folder`; other errors pass unchanged."""
    try:
        yield
    except OSError as error:
        if error.errno not in _TAKES_NOTHING:
            raise
        raise explain_disk(error, folder) from error


def explain_disk(error: OSError, folder: Path) -> RegistryError:
    """Return the store's error that stands for `error` of the system."""
    if error.errno in _TAKES_NOTHING:
        return NoSpace(f"{folder}: nothing can be written: {error.strerror}; {REMEDY}")
    return RegistryError(f"{folder}: cannot be used: {error.strerror or error}")


CHUNK_BYTES = 1 << 20
_DIGEST = re.compile(r"(?:sha256[:-])?([0-9a-fA-F]{64})", re.ASCII)
_INCOMING = "incoming-"


def parse_digest(text: str, field: str = "digest") -> str:
    """The 64 hexadecimal digits of `sha256:...` (or of the digits alone), lower case; raises InvalidRequest."""
    match = _DIGEST.fullmatch(text)
    if match is None:
        raise InvalidRequest(field, f"{text[:80]!r} is not sha256: and 64 hexadecimal digits")
    return match[1].lower()


class Blobs:
    """The blobs in `folder`, which is made when the first one is written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, digest: str) -> Path:
        """The path that a blob has or would have; raises InvalidRequest if `digest` is none."""
        return self.folder / f"sha256-{parse_digest(digest)}"

    def has(self, digest: str) -> bool:
        """Return True if the blob is there; raises RegistryError for a link or folder in its place."""
        path = self.path(digest)
        try:
            status = path.lstat()
        except FileNotFoundError:
            return False
        if not stat.S_ISREG(status.st_mode):
            raise RegistryError(f"{path}: is not a plain file, so it is not used; remove it")
        return True

    def find(self, digest: str) -> Path:
        """The path of a blob that is there; raises NotFound."""
        if not self.has(digest):
            raise self._missing(digest)
        return self.path(digest)

    def status(self, digest: str) -> os.stat_result:
        """Size and times of a blob; raises NotFound, also for one that is removed this moment."""
        try:
            return self.find(digest).stat()
        except FileNotFoundError:
            raise self._missing(digest) from None

    def _missing(self, digest: str) -> NotFound:
        return NotFound(f"blob sha256:{parse_digest(digest)} is not in the store; upload it first")

    def write(self, digest: str, chunks: Iterable[bytes]) -> Path:
        """Store the bytes of `chunks`; raises InvalidRequest, and keeps nothing, if they have another digest."""
        with self.receive(digest) as incoming:
            for chunk in chunks:
                incoming.write(chunk)
            return incoming.commit()

    def receive(self, digest: str) -> Incoming:
        """A blob to be written piece by piece; nothing stays of it unless it is committed."""
        target, sha256 = self.path(digest), parse_digest(digest)
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            return Incoming(self, target, sha256)

    def adopt(self, path: Path, sha256: str) -> Path:
        """Move a finished, checked file into the store; where the blob is there already the file goes away."""
        target = self.path(sha256)
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            with path.open("rb") as file:
                os.fsync(file.fileno())
            os.utime(path)  # the sweep counts from now
            os.replace(path, target)
            sync_folder(self.folder)
        return target

    def digests(self) -> Iterator[tuple[str, float]]:
        """Every blob's digest, and for how many seconds it has been there."""
        for path, age_s in list_ages(self.folder):
            match = _DIGEST.fullmatch(path.name)
            if match is not None:
                yield match[1], age_s

    def sweep_incoming(self, min_age_s: float) -> None:
        """Remove what interrupted writers left behind that long ago."""
        for path, age_s in list_ages(self.folder):
            if path.name.startswith(_INCOMING) and age_s >= min_age_s:
                path.unlink(missing_ok=True)


class Incoming:
    """A blob that is being written. Leaving the `with` block without `commit` removes it."""

    def __init__(self, blobs: Blobs, target: Path, sha256: str) -> None:
        self._target, self._sha256 = target, sha256
        self._hash = hashlib.sha256()
        self._path = blobs.folder / f"{_INCOMING}{secrets.token_hex(8)}"
        self._file = self._path.open("xb")

    def write(self, chunk: bytes) -> None:
        """Append a piece of the blob's contents."""
        self._hash.update(chunk)
        with writing(self._target.parent):
            self._file.write(chunk)

    def commit(self) -> Path:
        """Check the digest and give the blob its name; raises InvalidRequest when the contents have another digest."""
        if self._hash.hexdigest() != self._sha256:
            raise InvalidRequest("digest", f"the contents are sha256:{self._hash.hexdigest()}, not {self._sha256}")
        with writing(self._target.parent):
            self._file.flush()
            os.fsync(self._file.fileno())
            os.replace(self._path, self._target)
            sync_folder(self._target.parent)
        return self._target

    def __enter__(self) -> Incoming:
        return self

    def __exit__(self, *_: object) -> None:
        self._path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # what could not be written is given up
            self._file.close()


def list_ages(folder: Path) -> Iterator[tuple[Path, float]]:
    """The paths in a folder, and the seconds since each last changed; none if the folder does not exist."""
    now_s = time.time()
    if folder.is_dir():
        for path in list(folder.iterdir()):
            with contextlib.suppress(FileNotFoundError):  # others remove them too
                yield path, now_s - path.lstat().st_mtime


def sync_folder(folder: Path) -> None:
    """Write the names in a folder to disk; a rename is safe only when its folder is synced."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


MAX_FILES = 4096
LEFTOVER_AGE_S = 3600.0
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}", re.ASCII)
_FIRST_PART = re.compile(r".*-00001-of-\d{5}\.gguf", re.ASCII)


class Bundles:
    """The folders of links in `folder`, over `blobs`."""

    def __init__(self, folder: Path, blobs: Blobs) -> None:
        self.folder, self._blobs = folder, blobs

    def make(self, files: Mapping[str, str]) -> Path:
        """The path to load for `files` (name to SHA-256), made if need be. Raises InvalidRequest and NotFound."""
        _check_names(files)
        blobs = {name: self._blobs.find(digest) for name, digest in files.items()}
        if len(files) == 1 and next(iter(files)).endswith(".gguf"):
            return next(iter(blobs.values()))
        target = self.folder / _name_bundle(files)
        if not target.is_dir():
            with writing(self.folder):
                self._write(target, blobs)
        return _find_entry(target, files)

    def find_problem(self, path: Path, files: Sequence[ModelFile]) -> str | None:
        """Say why `path` is not `make`'s result for these files, None if it is; raises NotFound for a lost blob."""
        digests = {file.name: file.sha256 for file in files}
        for file in files:
            blob, size_bytes = self._blobs.path(file.sha256), self._blobs.status(file.sha256).st_size
            if size_bytes != file.size_bytes:
                return f"{blob} has {size_bytes} bytes, it had {file.size_bytes}; pull or create the model again"
        if path.parent == self._blobs.folder:
            return None if [path] == [self._blobs.path(file.sha256) for file in files] else f"{path} is not its file"
        folder = self.folder / _name_bundle(digests)
        if path != _find_entry(folder, digests) or folder.is_symlink():
            return f"{path} is not in the store"
        for name, digest in digests.items():
            if os.readlink(folder / name) != _link_to(self._blobs.path(digest)):
                return f"{folder / name} leads out of the store, so it is not used"
        return None

    def sweep(self, used: Collection[Path], gone: Collection[Path] = ()) -> None:
        """Remove the folders of the paths `gone`, and old ones of no model, unless one of the paths `used` needs them.

        A young folder may belong to a model whose row is yet to be written.
        """
        keep = {self._find_folder(path) for path in used}
        drop = {self._find_folder(path) for path in gone}
        for folder, age_s in list_ages(self.folder):
            if folder not in keep and (folder in drop or age_s >= LEFTOVER_AGE_S) and not folder.is_symlink():
                shutil.rmtree(folder, ignore_errors=True)

    def _find_folder(self, path: Path) -> Path:
        return path if path.parent == self.folder else path.parent

    def _write(self, target: Path, blobs: Mapping[str, Path]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        beside = self.folder / f"incoming-{secrets.token_hex(8)}"
        beside.mkdir()
        try:
            for name, blob in blobs.items():
                os.symlink(_link_to(blob), beside / name)
            sync_folder(beside)
        except OSError:
            shutil.rmtree(beside, ignore_errors=True)
            raise
        try:
            os.rename(beside, target)
        except OSError:
            shutil.rmtree(beside)
            if not target.is_dir():  # else another writer made the same one
                raise RegistryError(f"{target}: cannot be made") from None
        sync_folder(self.folder)


def _check_names(files: Mapping[str, str]) -> None:
    if not 1 <= len(files) <= MAX_FILES:
        raise InvalidRequest("files", f"a model has from 1 to {MAX_FILES} files, got {len(files)}")
    for name in files:
        if _FILE_NAME.fullmatch(name) is None:
            raise InvalidRequest("files", f"{name[:80]!r} cannot be the name of a file of a model")


def _link_to(blob: Path) -> str:
    return os.path.join("..", "..", blob.parent.name, blob.name)


def _name_bundle(files: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(sorted(files.items())).encode()).hexdigest()


def _find_entry(folder: Path, files: Mapping[str, str]) -> Path:
    """The first part of a split GGUF file, or the one beside its tower; the folder itself for everything else."""
    first = [name for name in files if _FIRST_PART.fullmatch(name)]
    if not first and all(name.endswith(".gguf") for name in files):
        first = [name for name in files if not is_tower_file(name)]
    return folder / first[0] if len(first) == 1 else folder


Record = TypeVar("Record", ModelRecord, AdapterRecord)


def hash_files(paths: Sequence[Path], progress: Progress | None = None) -> tuple[ModelFile, ...]:
    """Read the files for their digests. If one changes meanwhile, that shows when it is used."""
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
    """Compares the files of models and adapters with their records, and remembers the digests that it computed."""

    def __init__(self, bundles: Bundles) -> None:
        self._bundles = bundles
        self._read: dict[Path, ModelFile] = {}

    def check(self, record: Record) -> Record:
        """Return the record with its `problem`: why its files cannot be used, None if their contents are unchanged."""
        if record.problem is not None:  # its row is damaged
            return record
        try:
            if record.is_owned:
                return replace(record, problem=self._bundles.find_problem(record.path, record.files))
            folder = record.path if record.path.is_dir() else record.path.parent
            return replace(record, files=self.refresh(folder, record.files), problem=None)
        except OSError as error:
            return replace(record, problem=f"{error.filename}: {error.strerror or error}")
        except (MlxrError, ValueError) as error:  # ValueError: the text can be no path
            return replace(record, problem=str(error))

    def refresh(self, folder: Path, files: Sequence[ModelFile]) -> tuple[ModelFile, ...]:
        """Return the records of files whose contents are unchanged, with the times that they have now.

        Raises RegistryError if the contents of a file changed, OSError if it is gone.
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
