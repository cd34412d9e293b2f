"""Files named by their SHA-256, in one folder of the store.

A blob is written beside its place, checked, synced and renamed: under its name there is either nothing or all of it.
Digests come from strangers: only 64 hexadecimal digits make a file name, and a blob that is a link is refused.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from mlxr.core.errors import InvalidRequest, NoSpace, NotFound, RegistryError

REMEDY = "free space, let the folder be written, or name another one with the setting models_folder"
_TAKES_NOTHING = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG}


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Raise NoSpace for what the block cannot write in `folder`; other errors pass."""
    try:
        yield
    except OSError as error:
        if error.errno not in _TAKES_NOTHING:
            raise
        raise explain_disk(error, folder) from error


def explain_disk(error: OSError, folder: Path) -> RegistryError:
    """The error of the store for one of the system."""
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
        """Where the blob is or would be; raises InvalidRequest for what is no digest."""
        return self.folder / f"sha256-{parse_digest(digest)}"

    def has(self, digest: str) -> bool:
        """Whether the blob is there; raises RegistryError for a link or folder in its place."""
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
        """Store what `chunks` give; raises InvalidRequest, keeping nothing, when that has another digest."""
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # what could not be written is given up
            self._file.close()


def list_ages(folder: Path) -> Iterator[tuple[Path, float]]:
    """What is in a folder, which need not exist, and for how many seconds it has been as it is."""
    now_s = time.time()
    if folder.is_dir():
        for path in list(folder.iterdir()):
            with contextlib.suppress(FileNotFoundError):  # others remove them too
                yield path, now_s - path.lstat().st_mtime


def sync_folder(folder: Path) -> None:
    """Make names in a folder last; a rename is on disk only when its folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
