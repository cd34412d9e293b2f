"""The models of a hub: from `hf.co/owner/repo[:file or quant]` to the files to fetch.

The user's token and the addresses of files come from `huggingface_hub`. A repository's listing is not trusted: its size
and the time for it are bounded, names are never used as paths, and every file must state its size and a checksum.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from time import monotonic
from typing import Any
from urllib.parse import urlencode

import httpx

from mlxr.core.errors import HubError, InvalidRequest, NotFound
from mlxr.core.frozen import frozen
from mlxr.core.types import is_tower_file, rank_tower_file
from mlxr.core.work_threads import Stop
from mlxr.registry.library import find as find_short
from mlxr.registry.library import fits_room
from mlxr.registry.library import suggest as suggest_short
from mlxr.registry.record import ModelName

READ_TIMEOUT_S = 20.0
CONNECT_TIMEOUT_S = 15.0
HEAD_TIMEOUT_S = 30.0  # from the request until the head of its answer is whole, redirections included


class PullStopped(HubError):
    """Somebody stopped the pull; the bytes that have come are kept."""

    def __init__(self) -> None:
        super().__init__("the pull was stopped; pull again to go on from there")


class HubClient:
    """An HTTP client with the user's token for the hub, a context manager; `stop` ends its waiting."""

    def __init__(self, stop: Stop, head_timeout_s: float = HEAD_TIMEOUT_S) -> None:
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        self.stop, self._head_timeout_s = stop, head_timeout_s
        headers = {name: str(value) for name, value in build_hf_headers(library_name="mlxr").items()}
        timeout = httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        self._client = httpx.Client(headers=headers, timeout=timeout, follow_redirects=True)
        self._sockets: set[socket.socket] = set()

    def __enter__(self) -> HubClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    @contextlib.contextmanager
    def get(self, url: str, headers: Mapping[str, str] | None = None) -> Iterator[httpx.Response]:
        """The answer to a request, its body not read yet. Raises PullStopped and the HTTP library's errors."""
        request = self._client.build_request("GET", url, headers=headers, extensions={"trace": self._note})
        with self.stop.cutting(self._cut):
            try:
                response = self._send(request)
                try:
                    yield response
                finally:
                    response.close()
            except httpx.HTTPError as error:
                if self.stop.is_set():
                    raise PullStopped from error
                raise

    def _send(self, request: httpx.Request) -> httpx.Response:
        is_late = threading.Event()

        def give_up() -> None:
            is_late.set()
            self._cut()

        timer = threading.Timer(self._head_timeout_s, give_up)
        timer.daemon = True
        timer.start()
        try:
            return self._client.send(request, stream=True)
        except httpx.HTTPError as error:
            if is_late.is_set():
                text = f"no whole head of an answer came within {self._head_timeout_s:g} s"
                raise httpx.ReadTimeout(text, request=request) from error
            raise
        finally:
            timer.cancel()

    def _note(self, event: str, info: Mapping[str, Any]) -> None:
        """Keep the sockets that the HTTP library opens; it calls this for each step of a request."""
        if event.endswith((".connect_tcp.complete", ".start_tls.complete")):
            opened = info["return_value"].get_extra_info("socket")
            if opened is not None:
                self._sockets.add(opened)
                if self.stop.is_set():
                    self._cut()

    def _cut(self) -> None:
        """Shut all sockets down, which ends the reads of other threads; closing them would not."""
        for opened in list(self._sockets):
            with contextlib.suppress(OSError):
                socket.socket.shutdown(opened, socket.SHUT_RDWR)  # for a TLS socket: the plain one below it


LISTING_TIMEOUT_S = 30.0
MAX_FILES = 20000
MAX_LISTING_BYTES = 16 << 20
MAX_LISTING_PARTS = 20 * MAX_FILES  # commas and brackets; a file has about seven
# If the user asks for none, the first of these that the repository has and that fits the machine's memory is taken.
QUANT_ORDER = re.findall(
    r"\w+",
    "q4_k_m q4_k_s q4_0 q5_k_m q5_k_s q6_k q8_0 iq4_nl iq4_xs mxfp4 nvfp4 q3_k_m q3_k_l q3_k_s iq3_m iq3_s iq3_xs "
    "iq3_xxs q2_k iq2_m iq2_s iq2_xs iq2_xxs pq2_0 q2_0 tq2_0 ptq1_0 tq1_0 iq1_m iq1_s q1_0 bf16 f16 f32",
)
_REFERENCE = re.compile(
    r"(?:https?://)?(?:www\.)?(?:hf\.co|huggingface\.co)/([^/:]+)/([^/:]+?)/?(?::(.+))?", re.ASCII | re.IGNORECASE
)
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})", re.ASCII)
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors", re.ASCII)
_BESIDE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*\.(json|jinja|model|txt)", re.ASCII)


@frozen
class Reference:
    """A repository, and which of its models: a file or a quantisation, "" for the usual one."""

    owner: str
    repository: str
    selector: str
    short: str = ""  # the name that was asked for, if it is one of the library's

    @property
    def repo_id(self) -> str:
        """The repository's id as the hub spells it: `owner/name`."""
        return f"{self.owner}/{self.repository}"

    @property
    def name(self) -> ModelName:
        """The name that the model gets here."""
        if self.short:
            return ModelName.parse(self.short)
        tag = PurePosixPath(self.selector).name.removesuffix(".gguf")
        return ModelName.parse(f"hf.co/{self.repo_id}" + (f":{tag}" if tag else ""))


@frozen
class RemoteFile:
    """A file to fetch. It is checked against `sha256` if the hub knows one, else against `git_oid`."""

    path: str
    url: str
    size_bytes: int
    sha256: str | None
    git_oid: str | None

    @property
    def name(self) -> str:
        """The file's name without the folders before it."""
        return PurePosixPath(self.path).name

    @property
    def identity(self) -> str:
        """The checksum that names the file; raises HubError for a listing without one, or without a size."""
        identity = self.sha256 or self.git_oid or ""
        if re.fullmatch(r"[0-9a-f]{64}" if self.sha256 else r"[0-9a-f]{40}", identity) is None:
            raise HubError(f"{self.path[:200]!r}: the hub lists the checksum {identity[:80]!r}, which is none")
        if not 0 <= self.size_bytes < 1 << 50:
            raise HubError(f"{self.path[:200]!r}: the hub lists no size that could be")
        return identity


def parse_reference(text: str, library: Path | None = None) -> Reference:
    """Read `hf.co/owner/repo[:file or quant]`, or a short name of the library (a models folder may have a newer one).

    Raises InvalidRequest for anything else, with the short names that are near.
    """
    match = _REFERENCE.fullmatch(text)
    if match is None:
        known = find_short(text, library)
        if known is not None:
            owner, _, repository = known.repository.partition("/")
            return Reference(owner, repository, known.quant, text)
        near = suggest_short(text, library)
        if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*(:\S+)?", text, re.ASCII):
            near = [f"hf.co/{text}"]
        remedy = f"did you mean {' or '.join(near)}?" if near else "`mlxr search WORDS` finds models"
        raise InvalidRequest(
            "model",
            f"{text[:120]!r} cannot be pulled: it is neither a name that `mlxr search` lists nor "
            f"hf.co/owner/repo[:file or quant]; {remedy}",
        )
    reference = Reference(match[1], match[2], match[3] or "")
    _ = reference.name  # refuses parts that make no name
    return reference


def list_files(reference: Reference, endpoint: str, client: HubClient) -> list[RemoteFile]:
    """All files of the repository's main branch, as of now. Raises NotFound or HubError."""
    from huggingface_hub import hf_hub_url

    _refuse_offline(reference.repo_id, endpoint)
    listing = _read_listing(reference, endpoint, client)
    siblings, revision = listing.get("siblings") or [], listing.get("sha")
    if not isinstance(revision, str) or not revision or not isinstance(siblings, list) or len(siblings) > MAX_FILES:
        count = len(siblings) if isinstance(siblings, list) else 0
        raise HubError(f"{reference.repo_id}: the hub's listing has {count} files and revision {revision!r}")
    files = []
    for sibling in siblings:
        name = sibling.get("rfilename") if isinstance(sibling, dict) else None
        if not isinstance(name, str):
            raise HubError(f"{reference.repo_id}: the hub's listing has a file without a name")
        size, stored, oid = sibling.get("size"), sibling.get("lfs"), sibling.get("blobId")
        files.append(
            RemoteFile(
                path=name,
                url=hf_hub_url(reference.repo_id, name, revision=revision, endpoint=endpoint),
                size_bytes=size if isinstance(size, int) else -1,
                sha256=str(stored.get("sha256")) if isinstance(stored, dict) else None,
                git_oid=oid if isinstance(oid, str) else None,
            )
        )
    return files


def _read_listing(reference: Reference, endpoint: str, client: HubClient) -> dict[str, object]:
    """The hub's listing of a repository."""
    listing = _read_json(
        reference.repo_id,
        endpoint,
        f"/api/models/{reference.repo_id}?blobs=true",
        client,
        lambda response: _check_listed(reference, endpoint, response),
    )
    if not isinstance(listing, dict):
        raise HubError(f"{reference.repo_id}: the hub's listing is no object")
    return listing


def _read_json(
    what: str, endpoint: str, path: str, client: HubClient, check: Callable[[httpx.Response], None]
) -> object:
    """The hub's answer at a path; as it comes from a stranger, time and size are bounded. Raises HubError."""
    end_s = monotonic() + LISTING_TIMEOUT_S
    data = bytearray()
    try:
        with client.get(f"{endpoint.rstrip('/')}{path}") as response:
            check(response)
            for chunk in response.iter_bytes():
                data += chunk
                if len(data) > MAX_LISTING_BYTES:
                    raise ValueError(f"its listing has more than {MAX_LISTING_BYTES} bytes")
                if monotonic() > end_s:
                    raise TimeoutError(f"its listing did not come within {LISTING_TIMEOUT_S:g} s")
        if sum(map(data.count, (b"[", b"{", b","))) > MAX_LISTING_PARTS:
            raise ValueError(f"its listing has more than {MAX_LISTING_PARTS} values")
        return json.loads(data)
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, RecursionError) as error:
        raise HubError(
            f"{what}: {endpoint} cannot be asked: {_one_line(error)}; check the network (the variable "
            "HTTPS_PROXY names a proxy) and the hub's address (HF_ENDPOINT, or the setting hub_url)"
        ) from error


@frozen
class Found:
    """A repository with GGUF files that a search of the hub found."""

    repo_id: str
    downloads: int  # of the last month

    @property
    def reference(self) -> str:
        """The name to give to `mlxr pull`."""
        return f"hf.co/{self.repo_id}"


def search_hub(words: str, endpoint: str, client: HubClient, limit: int = 10) -> list[Found]:
    """The repositories with GGUF files that have all the words in their names, the most downloaded first."""
    _refuse_offline(words, endpoint)
    query = urlencode({"search": words, "filter": "gguf", "sort": "downloads", "direction": -1, "limit": limit})
    rows = _read_json(words, endpoint, f"/api/models?{query}", client, _check_found)
    found = []
    for row in rows if isinstance(rows, list) else []:
        name, downloads = (row.get("id"), row.get("downloads")) if isinstance(row, dict) else (None, None)
        with contextlib.suppress(InvalidRequest):  # its name could not be pulled
            parse_reference(f"hf.co/{name}")
            found.append(Found(str(name), downloads if isinstance(downloads, int) else 0))
    return found[:limit]


def _check_found(response: httpx.Response) -> None:
    response.raise_for_status()


def _refuse_offline(what: str, endpoint: str) -> None:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise HubError(f"{what}: the variable HF_HUB_OFFLINE forbids it to ask {endpoint}")


def _check_listed(reference: Reference, endpoint: str, response: httpx.Response) -> None:
    """Raise NotFound or HubError for an answer that is no listing."""
    status, code = response.status_code, response.headers.get("X-Error-Code")
    if status == 200:
        return
    if code == "GatedRepo":
        raise HubError(
            f"{reference.repo_id}: the hub wants its terms accepted, and a token (`hf auth login`, or HF_TOKEN)"
        )
    bad_token = response.headers.get("X-Error-Message") == "Invalid credentials in Authorization header"
    if code == "RepoNotFound" or status == 404 or (status == 401 and not bad_token):
        has_token = "authorization" in response.request.headers
        access = "this token may not see it" if has_token else "wants a token (`hf auth login`, or HF_TOKEN)"
        raise NotFound(
            f"{reference.repo_id}: {endpoint} has no repository of that name (`mlxr search WORDS` finds some), or it "
            f"is private and {access}"
        )
    reason = "it refuses the token; `hf auth login` sets another" if bad_token else f"it answered {status}"
    raise ValueError(reason)


def choose_files(reference: Reference, files: Sequence[RemoteFile], room_bytes: int | None = None) -> list[RemoteFile]:
    """The files that make up the model asked for. Raises NotFound, which lists what there is.

    Of several quantisations it takes the first usual one that fits the memory, or the smallest if none fits.
    """
    models = _group_gguf(files)
    if models:
        return models[_choose_model(reference, models, room_bytes)]
    if reference.selector:
        raise NotFound(f"{reference.repo_id} has no GGUF files, so there is no {reference.selector!r} to choose")
    top = [file for file in files if "/" not in file.path]
    weights = [file for file in top if _WEIGHTS.fullmatch(file.path)]
    if not weights or not any(file.path == "config.json" for file in top):
        raise NotFound(f"{reference.repo_id} has neither GGUF files nor config.json with model.safetensors")
    return weights + [file for file in top if _BESIDE.fullmatch(file.path)]


def explain_choice(
    reference: Reference, files: Sequence[RemoteFile], chosen: Sequence[RemoteFile], room_bytes: int | None
) -> str:
    """Say why these files were chosen of several models of a repository; "" if there was no choice."""
    models = _group_gguf(files)
    if reference.selector or len(models) < 2 or not chosen[0].name.lower().endswith(".gguf"):
        return ""
    name, size = chosen[0].name, _sum_bytes(chosen)
    usual = models[_choose_model(reference, models, None)]
    first = f"{name} of {len(models)} models: "
    if room_bytes is None:
        return first + "the usual choice; how much memory there is nobody tells"
    has = f"{_show(room_bytes)} of memory"
    if usual[0].path == chosen[0].path and fits_room(size, room_bytes):
        return first + f"the usual choice, {_show(size)}, fits {has}"
    why = f"the usual choice, {usual[0].name} of {_show(_sum_bytes(usual))}, does not fit {has}"
    return (
        first + f"{why}; this is the {'best that does' if fits_room(size, room_bytes) else 'smallest'}, {_show(size)}"
    )


def _sum_bytes(files: Sequence[RemoteFile]) -> int:
    return sum(file.size_bytes for file in files)


def _show(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f} GB"


def choose_tower(model: Sequence[RemoteFile], files: Sequence[RemoteFile]) -> RemoteFile | None:
    """The tower that may belong to the files of a GGUF model: in their folder, else at the top of the repository."""
    folder = PurePosixPath(model[0].path).parent
    ranks = {
        (PurePosixPath(file.path).parent != folder, *rank_tower_file(file.name)): file
        for file in files
        if is_tower_file(file.name) and PurePosixPath(file.path).parent in (folder, PurePosixPath())
    }
    return ranks[min(ranks)] if ranks and model[0].name.lower().endswith(".gguf") else None


def _group_gguf(files: Sequence[RemoteFile]) -> dict[str, list[RemoteFile]]:
    """GGUF models by path without ending and part number, the parts of each in order."""
    models: dict[str, list[RemoteFile]] = {}
    for file in sorted(files, key=lambda file: file.path):
        name = file.name.lower()
        if name.endswith(".gguf") and not is_tower_file(name) and "imatrix" not in name:
            stem = file.path[: -len(".gguf")]
            split = _SPLIT.fullmatch(stem)
            models.setdefault(split[1] if split else stem, []).append(file)
    return models


def _choose_model(reference: Reference, models: dict[str, list[RemoteFile]], room_bytes: int | None) -> str:
    selector = reference.selector
    if selector:
        exact = [stem for stem, files in models.items() if selector in {stem + ".gguf", *(file.path for file in files)}]
        found = _drop_mixtures(exact or [stem for stem in models if _has_quant(stem, selector)])
    else:
        found = list(models) if len(models) == 1 else _choose_quant(models, room_bytes)
    if len(found) == 1:
        _check_parts(reference, models[found[0]])
        return found[0]
    what = f"has {len(found)} models" if found else "has no model"
    asked = f" for {selector!r}" if selector else " that is the usual choice"
    names = ", ".join(sorted(found or models)[:20])
    raise NotFound(f"{reference.repo_id} {what}{asked}; add :file or :quant, there are {names}")


def _choose_quant(models: dict[str, list[RemoteFile]], room_bytes: int | None) -> list[str]:
    """The model of the first quantisation that fits the memory, else the smallest; several if it is ambiguous."""
    per_quant = [_drop_mixtures([stem for stem in models if _has_quant(stem, quant)]) for quant in QUANT_ORDER]
    ranked = [stems for stems in per_quant if stems]
    single = [stems for stems in ranked if len(stems) == 1]
    if not ranked or len(ranked[0]) > 1:
        return ranked[0] if ranked else []
    fitting = [stems for stems in single if fits_room(_sum_bytes(models[stems[0]]), room_bytes)]
    return fitting[0] if fitting else min(single, key=lambda stems: _sum_bytes(models[stems[0]]))


def _drop_mixtures(stems: list[str]) -> list[str]:
    """Return the stems without one publisher's mixtures (`UD`), unless there are no others."""
    return [stem for stem in stems if not _has_quant(stem, "ud")] or stems


def _has_quant(stem: str, quant: str) -> bool:
    return re.search(rf"(^|[-._/]){re.escape(quant)}([-._/]|$)", stem, re.IGNORECASE) is not None


def _check_parts(reference: Reference, files: Sequence[RemoteFile]) -> None:
    """Raise HubError unless all parts of a split model are listed."""
    splits = [_SPLIT.fullmatch(file.path[: -len(".gguf")]) for file in files]
    if splits[0] is None:
        return
    numbers = [int(split[2]) for split in splits if split is not None]
    if numbers != list(range(1, int(splits[0][3]) + 1)):
        raise HubError(f"{reference.repo_id}: of {int(splits[0][3])} parts the hub lists {numbers}")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
