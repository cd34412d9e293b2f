"""The one address of a cluster: passes each request to the replica where its first token will come soonest.

Requests and answers pass unchanged: a replica checks the request and writes the answer. Before an answer is begun, some
replica tells which pages the prompt fills (a plan), and the router chooses by them. When a replica dies, or drains and
ends, the request is sent again to another one. It has the same identity, so the answer is the same, and the client gets
the rest of it. The router is told when the first token of an answer comes, and when a request leaves a replica for any
reason, so that prompt and answer no longer count as work there.

A replica is known from its first report on (`Fleet`). It gets requests until it reports that it drains, cannot be
reached, or has been silent for a while; streams that wait for a replica that has gone are told.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlxr.cluster.page_transfer import PEER, TOKEN
from mlxr.cluster.prefix_table import KEY_BYTES
from mlxr.cluster.replica import (
    HOP_HEADERS,
    IDENTITY,
    OWN_HEADERS,
    PLAN,
    REPORT_S,
    Connect,
    Continuation,
    FrameReader,
    Gone,
    Incoming,
    Lines,
    PassedStream,
    Reply,
    Report,
    connect,
    copy_reply,
)
from mlxr.cluster.router import ROUTERS, Choice, Router, Routing
from mlxr.core.errors import NoReplica, RequestFailed
from mlxr.server.app import DIALECTS
from mlxr.server.errors import ServerError
from mlxr.server.routes import find_dialect
from mlxr.server.streaming import encode_json, ndjson, sse
from mlxr.server.work import check_parts
from mlxr.service.identity import Identity

STALE_S = 5.0  # without a report, then a replica counts as gone


class Member:
    """One replica, and the connections to it."""

    def __init__(self, name: str, url: str, connect: Connect) -> None:
        self.name, self.url = name, url
        self.lines = Lines(url, connect)
        self.seen_s = monotonic()


class Fleet:
    """All replicas, for one event loop."""

    def __init__(self, connect: Connect = connect, routing: Routing = Routing.PREFIX) -> None:
        self._connect, self._make_router = connect, ROUTERS[routing]
        self._members: dict[str, Member] = {}
        self._router: Router | None = None  # None until a report tells the size of pages
        self._has_come = asyncio.Condition()
        self._turn = 0

    @property
    def members(self) -> list[Member]:
        """The replicas that take requests."""
        router = self._router
        return [] if router is None else [member for member in self._members.values() if member.name in router]

    async def note(self, report: Report) -> bool:
        """Take in a report; returns True if the next one should name all pages."""
        name = report.replica
        if self._router is None:
            self._router = self._make_router(report.page_size)
        member, now_s = self._members.get(name), monotonic()
        if member is None:
            member = self._members[name] = Member(name, report.url, self._connect)
        age_s = max(0.0, now_s - member.seen_s - REPORT_S)  # a report is made that long after the one before came here
        member.seen_s = now_s
        if report.is_draining:
            self._router.remove(name)
            return False
        if name not in self._router:
            self._router.add(name)
            async with self._has_come:
                self._has_come.notify_all()
        self._router.note_load(name, report.load, age_s)
        self._router.note_pages(name, report.pages)
        return self._router.wants_whole(name)

    def settle(self, number: int) -> None:
        """The first token to the request of a choice has come; see `Router.settle`."""
        if self._router is not None:
            self._router.settle(number)

    def end(self, number: int) -> None:
        """The request of a choice has left its replica; see `Router.end`."""
        if self._router is not None:
            self._router.end(number)

    def find(self, name: str) -> Member | None:
        """The replica of that name, None if it is not known."""
        return self._members.get(name)

    def suspend(self, member: Member) -> None:
        """Send no more requests to a replica that cannot be reached, until it reports again."""
        if self._router is not None:
            self._router.remove(member.name)

    def bury_silent(self) -> list[Member]:
        """Give up the replicas that were silent for a while, if others reported: else the fault is at this end.

        Returns them; the caller closes their lines.
        """
        newest_s, buried = max((member.seen_s for member in self._members.values()), default=0.0), []
        for name, member in list(self._members.items()):
            if newest_s - member.seen_s > STALE_S:
                self.suspend(member)
                del self._members[name]
                buried.append(member)
        return buried

    async def choose(
        self, keys: Sequence[bytes], tokens: int, without: Collection[str], wait_s: float
    ) -> tuple[Member, Choice]:
        """The replica for a request of that many tokens; if no other is left, one of those in `without`.

        Waits up to `wait_s` seconds for a replica; then raises NoReplica.
        """
        end_s = monotonic() + wait_s
        while True:
            router = self._router
            if router is not None and len(router):
                left = without if any(member.name not in without for member in self.members) else ()
                choice = router.choose(keys, tokens, left)
                return self._members[choice.replica], choice
            if monotonic() >= end_s:
                raise NoReplica("no replica is ready")
            await self._wait(end_s - monotonic())

    async def take_turn(self, without: Collection[str], wait_s: float) -> Member:
        """Return the next replica in turn, for requests that all of them can answer equally well and fast."""
        if not self.members:
            await self.choose((), 1, without, wait_s)
        fitting = [member for member in self.members if member.name not in without] or self.members
        self._turn += 1
        return fitting[self._turn % len(fitting)]

    async def _wait(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds), self._has_come:
                await self._has_come.wait()
        except TimeoutError:
            return


GENERATING = frozenset(
    {
        "/v1/chat/completions",
        "/chat/completions",
        "/v1/completions",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/audio/transcriptions",
        "/audio/translations",
        "/v1/responses",
        "/responses",
        "/v1/responses/compact",
        "/responses/compact",
        "/v1/messages",
        "/api/chat",
        "/api/generate",
        "/completion",
        "/completions",
        "/infill",
    }
)
STORED = ("/v1/responses/", "/responses/")  # objects that only one replica keeps, and the front does not know which
ONE_MACHINE = ("/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete", "/api/blobs/", "/v1/admin/models/")


def is_refused(method: str, path: str) -> bool:
    """Return True if a request would change the models of one machine only."""
    return method not in ("GET", "HEAD", "OPTIONS") and path.startswith(ONE_MACHINE)


_SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>.+)")
_registry = CollectorRegistry()
_choices = Counter(
    "mlxr_cluster_requests",
    "Requests by why a replica was chosen for them; `continued` counts answers that went on after one had died.",
    ["reason"],
    registry=_registry,
)
_replicas = Gauge("mlxr_cluster_replicas", "Replicas that take requests.", registry=_registry)


def count_choice(reason: str) -> None:
    """Count the choice of a replica."""
    _choices.labels(reason).inc()


def render_own(replicas: int) -> str:
    """The front's own metrics, in the text format that Prometheus reads."""
    _replicas.set(replicas)
    return generate_latest(_registry).decode()


def join_metrics(texts: Mapping[str, str]) -> str:
    """Join the metrics of several replicas: families stay together, and each sample has the label `replica`."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for replica, text in texts.items():
        family = ""
        for line in text.splitlines():
            if line.startswith("#"):
                _, _, family, *_ = line.split(" ", 3)
                lines = heads.setdefault(family, [])
                if line not in lines and len(lines) < 2:
                    lines.append(line)
            elif (sample := _SAMPLE.fullmatch(line)) is not None:
                labels = f'replica="{replica}"' + (f",{sample['labels']}" if sample["labels"] else "")
                samples.setdefault(family, []).append(f"{sample['name']}{{{labels}}} {sample['value']}")
    return "".join(f"{line}\n" for family in heads for line in (*heads[family], *samples.get(family, ())))


logger = logging.getLogger(__name__)
WAIT_S = 60.0  # for a replica to appear, if there is none
MAX_TRIES = 20
BUSY, STOPPING = 429, 503  # statuses of replicas that are overloaded, or ending
NOT_HERE = (400, 404)  # statuses that may mean that another replica keeps the object
STOPS = "it takes no more requests"
BUSY_S = 0.5  # before an answer that broke off is asked for again
REFUSED = ServerError(
    501, "not_supported", "a cluster changes no models: bring the model to all machines and use `mlxr cluster update`"
)


@dataclass(slots=True)
class Passing:
    """One request under way. `keys` and `tokens` are its plan, `tried` the replicas that could not answer it.

    `number` is the router's number of the choice, by which it counts as work, and `stream` the answer of the replica.
    """

    request: Request
    body: bytes
    headers: list[tuple[bytes, bytes]]
    keys: list[bytes] = field(default_factory=list)
    tokens: int = 1
    tried: set[str] = field(default_factory=set)
    owner: Member | None = None  # the only replica that can answer it
    peer: Member | None = None  # a replica that has pages for the chosen one
    member: Member | None = None  # the replica that answers it
    number: int = 0
    stream: Incoming | None = None

    @property
    def path(self) -> str:
        """Return the path with the query."""
        url = self.request.url
        return f"{url.path}?{url.query}" if url.query else url.path


class Front:
    """The front, described above. For one event loop; `note` takes the reports of replicas."""

    def __init__(self, connect: Connect = connect, routing: Routing = Routing.PREFIX) -> None:
        self.fleet = Fleet(connect, routing)
        self._token = secrets.token_urlsafe(32)  # proves to a replica that a request comes from the cluster
        self._watching: asyncio.Task[None] | None = None

    async def note(self, report: Report) -> Reply:
        """Take in a report; returns the reply to its replica."""
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())
        return Reply(await self.fleet.note(report), self._token)

    async def answer(self, request: Request) -> Response:
        """Answer one request of a client."""
        path = request.url.path
        if path in ("/health", "/health/ready", "/health/live"):
            return self._tell_health(path)
        if is_refused(request.method, path):
            return _render(request, REFUSED)
        passing = Passing(request, await request.body(), _clean_headers(request))
        try:
            if path == "/metrics":
                return await self._collect_metrics(passing)
            if request.method == "POST" and path in GENERATING:
                refusal = await self._plan(passing)
                if refusal is not None:
                    return refusal
            elif path.startswith(STORED):
                return await self._ask_all(passing)
            return await self._pass_on(passing)
        except NoReplica as error:
            return _render(request, ServerError(503, "no_replica", str(error), retry_after_s=1.0))

    def _tell_health(self, path: str) -> Response:
        count = len(self.fleet.members)
        if count or path == "/health/live":
            return JSONResponse({"status": "ok", "replicas": count})
        return JSONResponse({"status": "not ready", "reason": "no replica is ready", "replicas": 0}, 503)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            for member in self.fleet.bury_silent():
                await member.lines.close()

    async def _plan(self, passing: Passing) -> Response | None:
        """Find out which pages the prompt fills; returns the answer if it is an error already."""
        needs_owner = _names_stored(passing)
        if len(self.fleet.members) == 1 and not needs_owner:
            return None
        for _ in range(MAX_TRIES):
            member = await self.fleet.take_turn(passing.tried, WAIT_S)
            try:
                reply, content = await self._ask(member, passing, (PLAN, b"1"))
            except Gone as gone:
                self._note_failure(passing, member, gone)
                continue
            if reply.status == STOPPING:
                self._note_failure(passing, member, STOPS)
                continue
            if PLAN.decode() in reply.headers:
                plan = json.loads(content)
                keys, passing.tokens = bytes.fromhex(plan["keys"]), plan["tokens"]
                passing.keys = [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
                passing.owner = member if needs_owner else None
                passing.tried.clear()
                return None
            may_be_elsewhere = reply.status == BUSY or (needs_owner and reply.status in NOT_HERE)
            if may_be_elsewhere and self._has_other(passing, member):
                passing.tried.add(member.name)
                continue
            return copy_reply(reply, content)
        raise NoReplica("no replica can read the request")

    async def _pass_on(self, passing: Passing) -> Response:
        """Send the request to a replica, or to others if that fails, and pass the reply on."""
        passing.headers.append((IDENTITY, str(Identity.draw()).encode()))
        opened = await self._open(passing)
        if isinstance(opened, Response):
            return opened
        return PassedStream(self._stream(passing), opened, lambda: self._leave(passing))

    async def _open(self, passing: Passing) -> Response | Incoming:
        """Return the first usable reply: whole, or a stream that has begun."""
        for _ in range(MAX_TRIES):
            member = passing.member = await self._choose(passing)
            try:
                reply = await self._begin(member, passing)
                if reply.separator is not None:
                    passing.stream = reply
                    return reply
                content = await reply.read_all()
            except Gone as gone:
                self._note_failure(passing, member, gone)
                continue
            finally:
                if passing.stream is None:
                    await self._leave(passing)
            if reply.status == STOPPING and passing.owner is None:
                self._note_failure(passing, member, STOPS)
                continue
            if reply.status == BUSY and passing.owner is None and self._has_other(passing, member):
                passing.tried.add(member.name)
                continue
            return copy_reply(reply, content)
        raise NoReplica("no replica could answer the request")

    async def _open_again(self, passing: Passing) -> Response | Incoming:
        """The same for an answer that has broken off; waits while all replicas are overloaded."""
        end_s = monotonic() + WAIT_S
        while True:
            opened = await self._open(passing)
            if isinstance(opened, Incoming) or opened.status_code != BUSY or monotonic() >= end_s:
                return opened
            await asyncio.sleep(BUSY_S)

    async def _leave(self, passing: Passing) -> None:
        """Leave the replica that was asked: nothing more is wanted of it."""
        self.fleet.end(passing.number)
        reply, passing.stream = passing.stream, None
        if reply is not None:
            await reply.close()

    async def _stream(self, passing: Passing) -> AsyncIterator[bytes]:
        """Yield the frames of one answer, from as many replicas as it takes."""
        reply = passing.stream
        separator = None if reply is None else reply.separator
        assert reply is not None
        assert separator is not None
        progress = Continuation()
        try:
            for _ in range(MAX_TRIES):
                progress.begin()
                try:
                    async for frames in _read_new(reply, separator, progress):
                        if progress.is_computed:
                            self.fleet.settle(passing.number)
                        if frames:
                            yield frames
                    return
                except Gone as gone:
                    assert passing.member is not None
                    self._note_failure(passing, passing.member, gone)
                finally:
                    await self._leave(passing)
                again = await self._open_again(passing)
                if isinstance(again, Response):
                    raise _read_refusal(again)
                reply = again
                count_choice("continued")
            raise NoReplica("too many replicas have died")
        except NoReplica as error:
            yield _render_frame(passing.request, separator, ServerError(503, "no_replica", str(error)))
        except Exception as error:  # whatever went wrong, the client must learn that its answer is not complete
            if not isinstance(error, RequestFailed):
                logger.exception("an answer broke off")
            yield _render_frame(passing.request, separator, ServerError(500, "internal", str(error)))

    async def _choose(self, passing: Passing) -> Member:
        if passing.owner is not None:
            return passing.owner
        member, choice = await self.fleet.choose(passing.keys, passing.tokens, passing.tried, WAIT_S)
        passing.number = choice.number
        count_choice(choice.reason)
        passing.peer = None if choice.peer is None else self.fleet.find(choice.peer)
        return member

    def _has_other(self, passing: Passing, member: Member) -> bool:
        return any(one.name not in passing.tried and one is not member for one in self.fleet.members)

    def _note_failure(self, passing: Passing, member: Member, why: Gone | str) -> None:
        """Note that a replica did not answer: it gets nothing until it reports, this request only as a last resort."""
        logger.warning("replica %s has broken off: %s", member.name, why)
        passing.tried.add(member.name)
        if member is passing.owner:
            raise NoReplica("the replica that held the conversation has died")
        self.fleet.suspend(member)

    async def _begin(self, member: Member, passing: Passing) -> Incoming:
        headers = passing.headers
        if passing.peer is not None:
            headers = [*headers, (PEER, passing.peer.url.encode()), (TOKEN, self._token.encode())]
        return await member.lines.send(passing.request.method, passing.path, headers, passing.body)

    async def _ask(self, member: Member, passing: Passing, *headers: tuple[bytes, bytes]) -> tuple[Incoming, bytes]:
        """Send the request; returns the whole reply."""
        request = passing.request
        reply = await member.lines.send(request.method, passing.path, [*passing.headers, *headers], passing.body)
        return reply, await reply.read_all()

    async def _ask_all(self, passing: Passing) -> Response:
        """Ask all replicas, as only one keeps the object; returns the first reply that does not say "not found"."""
        found = None
        for member in self.fleet.members:
            try:
                found = await self._ask(member, passing)
            except Gone:
                continue
            if found[0].status not in NOT_HERE:
                break
        if found is None:
            raise NoReplica("no replica is ready")
        return copy_reply(*found)

    async def _collect_metrics(self, passing: Passing) -> Response:
        """The metrics of all replicas, each with the label `replica`, and those of the front."""
        texts: dict[str, str] = {}
        for member in self.fleet.members:
            try:
                reply, content = await self._ask(member, passing)
            except Gone:
                continue
            if reply.status == STOPPING:
                continue
            if reply.status != 200:
                return copy_reply(reply, content)
            texts[member.name] = content.decode()
        if not texts:
            raise NoReplica("no replica is ready")
        text = join_metrics(texts) + render_own(len(texts))
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def _clean_headers(request: Request) -> list[tuple[bytes, bytes]]:
    """The client's headers, without those of its connection and those that only the front may send."""
    own = {*OWN_HEADERS, b"accept-encoding"}
    kept = [(name, value) for name, value in request.headers.raw if name not in own]
    kept = [(name, value) for name, value in kept if name.decode("latin-1") not in HOP_HEADERS]
    return [*kept, (b"accept-encoding", b"identity")]


def _names_stored(passing: Passing) -> bool:
    """Return True if the request continues a stored reply, or names a part of one, which only one replica keeps."""
    if not passing.request.url.path.removeprefix("/v1").startswith("/responses"):
        return False
    if b"previous_response_id" not in passing.body and b"item_reference" not in passing.body:
        return False
    try:
        check_parts(passing.body)
        body = json.loads(passing.body)
        parts = body.get("input") if isinstance(body.get("input"), list) else []
        return bool(body.get("previous_response_id")) or any(part.get("type") == "item_reference" for part in parts)
    except (ServerError, ValueError, AttributeError, RecursionError):  # the replica that answers reports the error
        return False


async def _read_new(reply: Incoming, separator: bytes, progress: Continuation) -> AsyncIterator[bytes]:
    """Yield the frames of a reply that the client has not got yet, joined as they came together; may yield none."""
    reader = FrameReader(separator)
    async for data in reply.read():
        yield b"".join([frame for frame in reader.push(data) if progress.take(frame)])
    if rest := reader.take_rest():
        yield rest


def _render(request: Request, failure: ServerError) -> Response:
    """An error of the front itself, in the form of the API that the path belongs to."""
    body = encode_json(_spell(request, failure))
    return Response(body, failure.status, failure.headers, "application/json")


def _render_frame(request: Request, separator: bytes, failure: ServerError) -> bytes:
    spelt = _spell(request, failure)
    if separator == b"\n":
        return ndjson(spelt)
    return sse(spelt, "error" if request.url.path == "/v1/messages" else None)


def _spell(request: Request, failure: ServerError) -> Any:
    dialect = find_dialect(DIALECTS, request.url.path)
    return dialect.render_error(failure, request.headers.get("x-request-id", "cluster"))


def _read_refusal(reply: Response) -> RequestFailed:
    """The reason why a request that was accepted once is refused now."""
    return RequestFailed("error", f"the answer broke off and is refused now: {bytes(reply.body[:300])!r}")
