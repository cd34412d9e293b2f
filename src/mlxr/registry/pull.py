"""From a name on a hub to a model in the store.

List, choose, fetch the missing files, check, and only then write the row: the model is not listed before the very end,
and a pull that was killed continues from where it stopped.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, BinaryIO, Literal

import httpx

from mlxr.core.errors import HubError, MlxrError, NotFound, RegistryError
from mlxr.core.frozen import frozen
from mlxr.core.work_threads import Stop
from mlxr.registry.blobs import Blobs, writing
from mlxr.registry.hub import (
    HubClient,
    PullStopped,
    Reference,
    RemoteFile,
    choose_files,
    choose_tower,
    explain_choice,
    list_files,
    parse_reference,
)
from mlxr.registry.record import ModelRecord
from mlxr.registry.registry import Registry

if TYPE_CHECKING:
    from mlxr.registry.hub import HubClient


CHUNK_BYTES = 1 << 18
MAX_FRUITLESS_TRIES = 5  # in a row, without a new byte
LOCK_POLL_S = 0.1
MAX_DELAY_S = 10.0
SLOW_S, SLOW_BYTES = 60.0, 1 << 14  # a hub that sends fewer bytes in that time is stuck
_RANGE = re.compile(r"bytes (\d+)-\d+/(?:\d+|\*)", re.ASCII)


@dataclass(slots=True)
class Downloader:
    """Fetches files through `folder` into `blobs`.

    The client's `stop` ends it; `retry_delay_s` is the first of growing pauses.
    """

    folder: Path
    blobs: Blobs
    client: HubClient
    retry_delay_s: float = 1.0

    @property
    def stop(self) -> Stop:
        """The caller's signal to stop."""
        return self.client.stop

    def fetch(self, file: RemoteFile, report: Callable[[int], None]) -> str:
        """Bring a file, whole and checked, into the store; returns its SHA-256. `report` gets the bytes that are there.

        Raises HubError if the hub refuses, keeps failing, or sends another file than it listed.
        """
        path = self.folder / f"partial-{file.identity}"
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            return self._fetch_to(path, file, report)

    def _fetch_to(self, path: Path, file: RemoteFile, report: Callable[[int], None]) -> str:
        with _locked(path, self.stop) as output:
            if file.sha256 is not None and self.blobs.has(file.sha256):  # fetched earlier, or while we waited
                path.unlink()
                report(file.size_bytes)
                return file.sha256
            sums = _Sums(file)
            while chunk := output.read(CHUNK_BYTES):
                sums.update(chunk)
            self._fetch_rest(file, output, sums, report)
            output.flush()
            wrong = sums.find_mismatch()
            if wrong is not None:
                path.unlink()
                raise HubError(f"{file.path}: {wrong}; what came was thrown away")
            sha256 = sums.sha256.hexdigest()
            self.blobs.adopt(path, sha256)
            return sha256

    def _fetch_rest(self, file: RemoteFile, output: BinaryIO, sums: _Sums, report: Callable[[int], None]) -> None:
        """Send requests until all bytes are there."""
        if sums.size_bytes > file.size_bytes:
            _restart(output, sums)
        report(sums.size_bytes)
        fruitless, reason = 0, ""
        while sums.size_bytes < file.size_bytes:
            before_bytes, is_slow = sums.size_bytes, False
            try:
                self._ask(file, output, sums, report)
                reason = "the connection ended early"
            except (httpx.HTTPError, _TryAgain) as error:
                reason, is_slow = str(error) or type(error).__name__, isinstance(error, _TooSlow)
            output.flush()
            if sums.size_bytes == file.size_bytes:
                return
            fruitless = fruitless + 1 if is_slow or sums.size_bytes == before_bytes else 0
            if fruitless >= MAX_FRUITLESS_TRIES:
                raise HubError(
                    f"{file.path}: stuck at {sums.size_bytes} of {file.size_bytes} bytes: {reason}; what has come is "
                    "kept, pull again to go on from there"
                )
            if self.stop.wait(min(self.retry_delay_s * 2**fruitless, MAX_DELAY_S)):
                raise PullStopped

    def _ask(self, file: RemoteFile, output: BinaryIO, sums: _Sums, report: Callable[[int], None]) -> None:
        """Send one request for the missing bytes."""
        headers = {"Accept-Encoding": "identity"}
        if sums.size_bytes:
            headers["Range"] = f"bytes={sums.size_bytes}-"
        with self.client.get(file.url, headers) as response:
            _check_status(file, response)
            if response.status_code == 206:
                _check_range(response, sums.size_bytes)
            else:
                _restart(output, sums)  # the whole file comes, or we are at the start anyway
                _check_length(file, response)
            since_s, since_bytes = monotonic(), sums.size_bytes
            for chunk in response.iter_raw():
                if self.stop.is_set():
                    raise PullStopped
                if monotonic() - since_s > SLOW_S:
                    if sums.size_bytes - since_bytes < SLOW_BYTES:
                        raise _TooSlow(f"only {sums.size_bytes - since_bytes} bytes came in {SLOW_S:g} s")
                    since_s, since_bytes = monotonic(), sums.size_bytes
                if sums.size_bytes + len(chunk) > file.size_bytes:
                    raise HubError(f"{file.path}: more came than the {file.size_bytes} bytes that the hub listed")
                output.write(chunk)
                sums.update(chunk)
                report(sums.size_bytes)


class _TryAgain(Exception):
    """The request failed, and may succeed if it is sent again."""


class _TooSlow(_TryAgain):
    """The bytes come so slowly that the file would never be whole."""


class _Sums:
    """Size and checksums of the bytes that have come."""

    def __init__(self, file: RemoteFile) -> None:
        self._file = file
        self.reset()

    def reset(self) -> None:
        """Forget all bytes that were counted, for a file that is fetched from its beginning."""
        self.size_bytes = 0
        self.sha256 = hashlib.sha256()
        # Git names a file by the SHA-1 of this header and its contents.
        self._git = hashlib.sha1(b"blob %d\0" % self._file.size_bytes, usedforsecurity=False)

    def update(self, chunk: bytes) -> None:
        """Add a piece of the file to the count of bytes and to the checksums."""
        self.size_bytes += len(chunk)
        self.sha256.update(chunk)
        if self._file.sha256 is None:
            self._git.update(chunk)

    def find_mismatch(self) -> str | None:
        """Say how the whole file differs from the hub's listing, None if it does not."""
        if self._file.sha256 is not None:
            kind, found = "SHA-256", self.sha256.hexdigest()
        else:
            kind, found = "Git object id", self._git.hexdigest()
        listed = self._file.sha256 or self._file.git_oid
        return None if listed == found else f"the hub listed the {kind} {listed}, what came has {found}"


def _restart(output: BinaryIO, sums: _Sums) -> None:
    output.seek(0)
    output.truncate()
    sums.reset()


def _check_status(file: RemoteFile, response: httpx.Response) -> None:
    status = response.status_code
    if status in (200, 206):
        return
    if status == 416 or status == 429 or status >= 500:
        raise _TryAgain(f"the hub answered {status}")
    answered = f"{file.path}: the hub answered {status} {response.reason_phrase}".rstrip()
    if status in (401, 403):
        raise HubError(f"{answered}; it wants its terms accepted, or another token (`hf auth login`, or HF_TOKEN)")
    raise HubError(f"{answered}; it listed the file a moment ago, so try again" if status == 404 else answered)


def _check_range(response: httpx.Response, start: int) -> None:
    match = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
    if match is None or int(match[1]) != start:
        raise _TryAgain(f"the hub sent another range than bytes {start}-")


def _check_length(file: RemoteFile, response: httpx.Response) -> None:
    length = response.headers.get("Content-Length")
    if length is not None and length != str(file.size_bytes):
        raise HubError(f"{file.path}: the hub listed {file.size_bytes} bytes and now sends {length}")


@contextmanager
def _locked(path: Path, stop: Stop) -> Iterator[BinaryIO]:
    """Open the file, made if need be, locked against other writers; the lock ends with the process that has it."""
    while True:
        with path.open("a+b") as file:
            if _try_lock(file) and _is_still(file, path):
                file.seek(0)
                yield file
                return
        if stop.wait(LOCK_POLL_S):
            raise PullStopped


def _try_lock(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_still(file: BinaryIO, path: Path) -> bool:
    """Return True if the open file still has that name; another process may have finished and moved it."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


_LOCAL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}", re.ASCII)


@frozen
class PullProgress:
    """The state of a pull. While it fetches: `file`, its `digest`, the bytes that are there, and the file's size
    `total_bytes`. `why` is the reason of a choice among several models.
    """

    stage: Literal["listing", "choosing", "fetching", "checking", "adding"]
    file: str = ""
    digest: str = ""
    done_bytes: int = 0
    total_bytes: int = 0
    why: str = ""


def pull(
    registry: Registry,
    reference: str,
    *,
    endpoint: str,
    name: str | None = None,
    report: Callable[[PullProgress], None] = lambda _: None,
    stop: Stop | None = None,
    retry_delay_s: float = 1.0,
    replaces: bool = False,
    room_bytes: int | None = None,
) -> ModelRecord:
    """Fetch `hf.co/owner/repo[:file or quant]` from the hub at `endpoint` and give it a name, by default that one.

    A short name of the library means its repository. Under its own name a newer state of the repository replaces an
    older one; another `name`, or a short one, that other files have is refused unless it `replaces` that model. Among
    several quantisations the memory, `room_bytes`, decides. If a GGUF model takes a tower, that of the repository
    comes along. `report` is called from this thread, for every piece. Raises InvalidRequest, NotFound, HubError, or
    the loader's error for a file that it cannot run; then nothing is kept.
    """
    from mlxr.registry.hub import HubClient

    wanted = parse_reference(reference, registry.folder)
    replaces = replaces or (name is None and not wanted.short)
    if not wanted.short:
        registry.check_free(name or str(wanted.name), replaces=replaces)
    report(PullProgress("listing"))
    with HubClient(stop or Stop()) as client:
        listed = list_files(wanted, endpoint, client)
        files = choose_files(wanted, listed, room_bytes)
        if why := explain_choice(wanted, listed, files, room_bytes):
            report(PullProgress("choosing", why=why))
        tower = choose_tower(files, listed)
        if wanted.short:
            replaces = replaces or _was_pulled(registry, name or wanted.short, files)
            registry.check_free(name or wanted.short, replaces=replaces)
        _check_names(wanted, files if tower is None else [*files, tower])
        stored = _fetch_all(registry, files, report, client, retry_delay_s)
        with _discarding(registry, stored):
            wants_tower = tower is not None and registry.inspect(stored).takes_tower
        if tower is not None and wants_tower:
            fetched = _fetch_all(registry, [tower], report, client, retry_delay_s)
            if tower.name in {path.name for path in registry.inspect(stored | fetched).files}:
                stored |= fetched
            else:  # the tower is another model's, or of a kind that does not run
                registry.discard(list(fetched.values()))
    report(PullProgress("adding"))
    with _discarding(registry, stored):
        return registry.add(name or str(wanted.name), stored, replaces=replaces)


@contextmanager
def _discarding(registry: Registry, stored: Mapping[str, str]) -> Iterator[None]:
    """Discard a model that the block refuses; after an error of the store its files stay, so a pull can continue."""
    try:
        yield
    except RegistryError:
        raise
    except MlxrError:
        registry.discard(list(stored.values()))
        raise


def _was_pulled(registry: Registry, name: str, files: Sequence[RemoteFile]) -> bool:
    """Return True if the model of that name was made of files with these names, so that it may be updated."""
    try:
        record = registry.get(name)
    except NotFound:
        return False
    tower = set() if record.tower is None else {record.tower.name}
    return record.is_owned and {file.name for file in record.files} - tower == {file.name for file in files}


def _check_names(wanted: Reference, files: Sequence[RemoteFile]) -> None:
    names = [file.name for file in files if file.identity]
    for name in names:
        if _LOCAL_NAME.fullmatch(name) is None or names.count(name) > 1:
            raise HubError(f"{wanted.repo_id}: lists {name[:80]!r}, which cannot be stored under that name")


def _fetch_all(
    registry: Registry,
    files: Sequence[RemoteFile],
    report: Callable[[PullProgress], None],
    client: HubClient,
    retry_delay_s: float,
) -> dict[str, str]:
    """Bring all files into the store; returns their names and SHA-256s."""
    missing = [file for file in files if file.sha256 is None or not registry.blobs.has(file.sha256)]
    _check_space(registry, sum(file.size_bytes for file in missing))
    downloader = Downloader(registry.downloads, registry.blobs, client, retry_delay_s)
    digests = {}
    for file in files:

        def report_bytes(done_bytes: int, file: RemoteFile = file) -> None:
            report(PullProgress("fetching", file.path, file.identity, done_bytes, file.size_bytes))

        digests[file.name] = downloader.fetch(file, report_bytes)
    report(PullProgress("checking"))
    return digests


def _check_space(registry: Registry, needed_bytes: int) -> None:
    folder = registry.folder
    while not folder.exists():
        folder = folder.parent
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        raise RegistryError(f"{registry.folder}: the model takes {needed_bytes:,} bytes, {free_bytes:,} are free")
