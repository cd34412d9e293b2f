"""From a name on a hub to a model in the store.

List, choose, fetch what is missing, check, and only then write the row: until the very end nothing is listed, and a
pull that was killed goes on where it stopped.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mlxr.core.errors import HubError, MlxrError, RegistryError
from mlxr.core.work_threads import Stop
from mlxr.registry.hub import Reference, RemoteFile, choose_files, list_files, parse_reference
from mlxr.registry.record import ModelRecord
from mlxr.registry.registry import Registry

if TYPE_CHECKING:
    from mlxr.registry.hub_client import HubClient

_LOCAL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}", re.ASCII)


@dataclass(frozen=True, slots=True)
class PullProgress:
    """How far a pull is. While it fetches, `file`, its `digest` and bytes; `total_bytes` is that file's size."""

    stage: Literal["listing", "fetching", "checking", "adding"]
    file: str = ""
    digest: str = ""
    done_bytes: int = 0
    total_bytes: int = 0


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
) -> ModelRecord:
    """Fetch `hf.co/owner/repo[:file or quant]` from the hub at `endpoint` and give it a name, by default that one.

    Under its own name a newer state of the repository takes the place of an older one; another `name` that is taken
    is refused unless it `replaces` that model. `report` is called from this thread, for every piece. Raises
    InvalidRequest, NotFound, HubError, or what the loader says of a file that it cannot run; then nothing is kept.
    """
    from mlxr.registry.hub_client import HubClient

    wanted = parse_reference(reference)
    replaces = replaces or name is None
    registry.check_free(name or str(wanted.name), replaces=replaces)
    report(PullProgress("listing"))
    with HubClient(stop or Stop()) as client:
        files = choose_files(wanted, list_files(wanted, endpoint, client))
        names = _check_names(wanted, files)
        digests = _fetch_all(registry, files, report, client, retry_delay_s)
    report(PullProgress("adding"))
    stored = dict(zip(names, digests, strict=True))
    try:
        return registry.add(name or str(wanted.name), stored, replaces=replaces)
    except RegistryError:
        raise
    except MlxrError:
        registry.discard(digests)
        raise


def _check_names(wanted: Reference, files: Sequence[RemoteFile]) -> list[str]:
    names = [file.name for file in files if file.identity]
    for name in names:
        if _LOCAL_NAME.fullmatch(name) is None or names.count(name) > 1:
            raise HubError(f"{wanted.repo_id}: lists {name[:80]!r}, which cannot be stored under that name")
    return names


def _fetch_all(
    registry: Registry,
    files: Sequence[RemoteFile],
    report: Callable[[PullProgress], None],
    client: HubClient,
    retry_delay_s: float,
) -> list[str]:
    """Bring all files into the store; their SHA-256s, in order."""
    from mlxr.registry.download import Downloader

    missing = [file for file in files if file.sha256 is None or not registry.blobs.has(file.sha256)]
    _check_space(registry, sum(file.size_bytes for file in missing))
    downloader = Downloader(registry.downloads, registry.blobs, client, retry_delay_s)
    digests = []
    for file in files:

        def report_bytes(done_bytes: int, file: RemoteFile = file) -> None:
            report(PullProgress("fetching", file.path, file.identity, done_bytes, file.size_bytes))

        digests.append(downloader.fetch(file, report_bytes))
    report(PullProgress("checking"))
    return digests


def _check_space(registry: Registry, needed_bytes: int) -> None:
    folder = registry.folder
    while not folder.exists():
        folder = folder.parent
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        raise RegistryError(f"{registry.folder}: the model takes {needed_bytes:,} bytes, {free_bytes:,} are free")
