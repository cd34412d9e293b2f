"""One replica of a cluster, that is a server which also reports its state, and the front's connections to it.

The front passes requests on unchanged. A request may set the identity of its reply, ask for the pages that its prompt
fills instead of an answer, and name a replica that has pages of its prompt. Other replicas may ask for pages. Several
times a second a `Report` goes to the front.

Each connection of the front is a client of httpx of its own: httpx's pool looks at all of its connections for every
request, which takes most of a processor when there are hundreds. Free ones wait on a stack, so the one used last is
used next, and the replica closes those that stay idle. A reply is passed on whole, or as it grows; when a client
leaves, the replica's answer is closed. A stream that broke off is begun anew elsewhere: `Continuation` keeps a short
mark of each frame that was passed on, drops as many frames of the repeated stream and compares them. It knows
server-sent events and lines of JSON, and of each API only the names of the fields that may differ.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import socket
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from time import monotonic, sleep
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from mlxr.cluster.page_exchange import PageExchange
from mlxr.cluster.page_transfer import PAGES_PATH, PEER, TOKEN, Fetcher, Lender, Peers
from mlxr.cluster.prefix_table import KEY_BYTES, PageDelta
from mlxr.cluster.router import Load
from mlxr.core.errors import MlxrError, RequestFailed, SettingError
from mlxr.core.frozen import frozen
from mlxr.core.settings import Settings
from mlxr.engine.stats import EngineReport
from mlxr.server.listen import Server, build_app, name_address, open_socket
from mlxr.server.parts import ServerParts
from mlxr.service.identity import STATE_KEY, Identity, Planned, RequestHooks, use_identity

MARK_BYTES = 8
# Times, speeds, and tokens found in the cache: these may differ when an answer is repeated.
VOLATILE = frozenset(
    {
        "created",
        "created_at",
        "completed_at",
        "timings",
        "usage",
        "total_duration",
        "load_duration",
        "prompt_eval_count",
        "prompt_eval_duration",
        "eval_duration",
        "tokens_cached",
    }
)
PROGRESS = "prompt_progress"  # frames with it report the progress of the prompt, and are no part of the answer
# Types of frames that are sent as soon as a request is accepted, before its prompt is computed.
OPENINGS = frozenset({"message_start", "ping", "response.created", "response.queued", "response.in_progress"})


class FrameReader:
    """Cuts the bytes of a stream into whole frames, each with the end mark that it came with."""

    def __init__(self, separator: bytes) -> None:
        self._separator, self._rest = separator, b""

    def push(self, data: bytes) -> list[bytes]:
        """The frames that `data` completes."""
        *frames, self._rest = (self._rest + data).split(self._separator)
        return [frame + self._separator for frame in frames]

    def take_rest(self) -> bytes:
        """Return the rest of the stream after its last whole frame."""
        rest, self._rest = self._rest, b""
        return rest


class Continuation:
    """Remembers how much of a stream a client has got. `begin` is called for each try, and `take` for each frame of it.

    `is_computed` is True once the current try has brought a token, so that its prompt is computed.
    """

    def __init__(self) -> None:
        self.is_computed = False
        self._passed: dict[int, list[bytes]] = {}  # marks by answer
        self._due: dict[int, deque[bytes]] = {}  # marks of the frames that the current try must repeat first
        self._is_repeat = False

    @property
    def has_begun(self) -> bool:
        """True if the client has got any part of the answer."""
        return bool(self._passed)

    def begin(self) -> None:
        """Note that the stream is made once more, from its start."""
        self._is_repeat, self.is_computed = self.has_begun, False
        self._due = {answer: deque(marks) for answer, marks in self._passed.items()}

    def take(self, frame: bytes) -> bool:
        """Return True if the client gets the frame; raises RequestFailed if a repeated one differs."""
        if frame.startswith(b":"):
            return True
        values = _read_values(frame)
        self.is_computed = self.is_computed or not values or not all(map(_is_opening, values))
        if any(PROGRESS in value for value in values):
            return not self._is_repeat
        answer, mark = _find_answer(values), _make_mark(frame, values)
        due = self._due.get(answer)
        if not due:
            self._passed.setdefault(answer, []).append(mark)
            return True
        if due.popleft() != mark:
            raise RequestFailed("error", "the answer broke off, and what was to go on from there is another answer")
        return False


def _read_values(frame: bytes) -> list[dict[str, Any]]:
    """The JSON objects in a frame: in its `data` lines, or the frame itself if it is a line of JSON."""
    values = []
    for line in frame.splitlines():
        text = line[5:] if line.startswith(b"data:") else line
        if text.lstrip().startswith(b"{"):
            values.append(json.loads(text))
    return values


def _is_opening(value: dict[str, Any]) -> bool:
    """Return True if the object may come before the first token."""
    choices = value.get("choices") or [{}]
    says_turn = "role" in choices[0].get("delta", {})
    return says_turn or PROGRESS in value or value.get("type") in OPENINGS


def _find_answer(values: list[dict[str, Any]]) -> int:
    """The number of the answer that a frame belongs to: several in one stream may come in another order next time."""
    for value in values:
        choices = value.get("choices")
        if choices:
            return int(choices[0].get("index", 0))
        if isinstance(value.get("index"), int) and "content" in value:  # llama.cpp's
            return int(value["index"])
    return 0


def _make_mark(frame: bytes, values: list[dict[str, Any]]) -> bytes:
    text = json.dumps(list(map(_drop_volatile, values)), sort_keys=True).encode() if values else frame
    return hashlib.blake2b(text, digest_size=MARK_BYTES).digest()


def _drop_volatile(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _drop_volatile(part) for name, part in value.items() if name not in VOLATILE}
    return list(map(_drop_volatile, value)) if isinstance(value, list) else value


def separator_of(media_type: str) -> bytes | None:
    """The bytes that end a frame of a stream of that type; None if it is no stream."""
    kind = media_type.partition(";")[0].strip()
    return {"text/event-stream": b"\n\n", "application/x-ndjson": b"\n"}.get(kind)


logger = logging.getLogger(__name__)
CONNECT_S = 5.0
MAX_FREE = 256  # connections that are kept for later
FREE_S = 30.0  # a connection that was free for longer is not used again
LIMITS = httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=FREE_S)
Headers = Sequence[tuple[bytes, bytes]]


class Gone(Exception):  # not an error of ours
    """The replica counts as dead, cannot be reached, or broke off in the middle of an answer."""


Connect = Callable[[], httpx.AsyncClient]


def connect() -> httpx.AsyncClient:
    """A client for one connection. Replicas speak plain HTTP; proxies of the environment are not used."""
    timeout = httpx.Timeout(None, connect=CONNECT_S)
    return httpx.AsyncClient(limits=LIMITS, timeout=timeout, trust_env=False, verify=False)


class Lines:
    """Connections to the replica at `url`, each made by `connect`."""

    def __init__(self, url: str, connect: Connect) -> None:
        self._url, self._connect = url, connect
        self._free: list[httpx.AsyncClient] = []
        self._waits: set[asyncio.Timeout] = set()  # of the tasks that wait for the replica
        self._is_closed = False

    async def send(self, method: str, path: str, headers: Headers, body: bytes) -> Incoming:
        """Send a request; returns the reply as soon as its head is there, which the caller closes. Raises Gone."""
        client = self._free.pop() if self._free else self._connect()
        request = client.build_request(method, self._url + path, headers=list(headers), content=body)
        try:
            async with self.wait():
                return Incoming(self, client, await client.send(request, stream=True))
        except BaseException:
            await self.give_back(client)
            raise

    async def give_back(self, client: httpx.AsyncClient) -> None:
        """Take back a connection that is free."""
        if self._is_closed or len(self._free) >= MAX_FREE:
            await _end(client)
        else:
            self._free.append(client)

    async def close(self) -> None:
        """Note that the replica has died: end all waiting for it, and close all connections."""
        self._is_closed = True
        for wait in self._waits:
            wait.reschedule(0.0)
        free, self._free = self._free, []
        for client in free:
            await _end(client)

    @asynccontextmanager
    async def wait(self) -> AsyncIterator[None]:
        """Wrap code that waits for the replica; raises Gone for every error in it, and once the replica has died.

        The errors depend on the library, the system and the event loop; none of them may end an answer that another
        replica can continue.
        """
        if self._is_closed:
            raise Gone("it has died")
        try:
            async with asyncio.timeout(None) as wait:
                self._waits.add(wait)
                try:
                    yield
                finally:
                    self._waits.discard(wait)
        except Exception as error:
            raise Gone(f"{type(error).__name__}: {error}") from error


class Incoming:
    """A reply whose head has come."""

    def __init__(self, lines: Lines, client: httpx.AsyncClient, reply: httpx.Response) -> None:
        self._lines, self._client, self._reply = lines, client, reply
        self._is_closed = False
        self.status: int = reply.status_code
        self.headers = reply.headers

    @property
    def separator(self) -> bytes | None:
        """The bytes that end a frame if the reply is an answer in frames; else None."""
        return separator_of(self.headers.get("content-type", "")) if self.status == 200 else None

    async def read(self) -> AsyncIterator[bytes]:
        """Yield the bytes as they come; raises Gone."""
        chunks = self._reply.aiter_raw()
        while True:
            async with self._lines.wait():
                chunk = await anext(chunks, None)
            if chunk is None:
                return
            yield chunk

    async def read_all(self) -> bytes:
        """Return the whole body, and close; raises Gone."""
        try:
            async with self._lines.wait():
                return await self._reply.aread()
        finally:
            await self.close()

    async def close(self) -> None:
        """Close the reply, so that a replica that still answers stops."""
        if not self._is_closed:
            self._is_closed = True
            try:
                await _end(self._reply)
            finally:
                await self._lines.give_back(self._client)


async def _end(ending: httpx.AsyncClient | httpx.Response) -> None:
    """Close it; errors no longer matter."""
    try:
        await ending.aclose()
    except Exception as error:
        logger.info("a connection ended badly: %r", error)


HOP_HEADERS = frozenset({"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "content-length"})
TOLD_BY_RAY = frozenset({"x-request-id"})


class PassedStream(StreamingResponse):
    """An answer as it grows. When the client leaves, the frames are closed, and with them the replica's answer.

    `leave` is always called at the end: a generator of frames that was never started cannot close its source.
    """

    def __init__(self, frames: AsyncIterator[bytes], reply: Incoming, leave: Callable[[], Awaitable[None]]) -> None:
        super().__init__(frames, reply.status)
        self.raw_headers = read_headers(reply)
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all frames, or those until the client leaves."""
        del scope
        try:
            await self._send_while_there(receive, send)
        finally:
            await self._leave()

    async def _send_while_there(self, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self.stream_response(send))
        watching = asyncio.ensure_future(self.listen_for_disconnect(receive))
        try:
            await asyncio.wait([sending, watching], return_when=asyncio.FIRST_COMPLETED)
            if not sending.done() and (error := watching.exception()) is not None:
                logger.warning("whether a client leaves cannot be seen: %r", error)
                await asyncio.wait([sending])
            if sending.done():
                sending.result()
        finally:
            sending.cancel()
            watching.cancel()
            await asyncio.gather(sending, watching, return_exceptions=True)
            if isinstance(self.body_iterator, AsyncGenerator):
                await self.body_iterator.aclose()


def copy_reply(reply: Incoming, content: bytes) -> Response:
    """A reply that was read whole."""
    copy = Response(content, reply.status)
    copy.raw_headers = [*read_headers(reply), (b"content-length", str(len(content)).encode())]
    return copy


def read_headers(reply: Incoming) -> list[tuple[bytes, bytes]]:
    """Pick the headers for the client, without those of one connection and the id, which Ray Serve sends itself."""
    return [
        (name.lower(), value)
        for name, value in reply.headers.raw
        if name.decode("latin-1").lower() not in HOP_HEADERS | TOLD_BY_RAY
    ]


WEIGHT = 0.3  # of the newest measurement


class Pace:
    """Prompt tokens per second and seconds per step, each averaged over the reports that had such work."""

    def __init__(self) -> None:
        self._before: EngineReport | None = None
        self._at_s = 0.0
        self._prefill_per_s = self._step_s = 0.0

    def note(self, report: EngineReport, now_s: float) -> Load:
        """Take in the next report, read at `now_s`; returns the load with the speeds so far."""
        before, seconds = self._before, now_s - self._at_s
        if before is not None and seconds > 0:
            steps = report.steps - before.steps
            if steps > 0 and before.running and report.running:
                self._step_s = _blend(self._step_s, seconds / steps)
            tokens = report.prefill_tokens - before.prefill_tokens
            if tokens > 0 and before.waiting_tokens and report.waiting_tokens:  # it had prompts to compute all the time
                self._prefill_per_s = _blend(self._prefill_per_s, tokens / seconds)
        self._before, self._at_s = report, now_s
        return Load(report.waiting_tokens, report.running, self._prefill_per_s, self._step_s)


def _blend(known: float, new: float) -> float:
    return new if known == 0 else (1 - WEIGHT) * known + WEIGHT * new


IDENTITY, PLAN = b"x-mlxr-identity", b"x-mlxr-plan"
OWN_HEADERS = frozenset({IDENTITY, PLAN, PEER, TOKEN})  # that only the front sends
REPORT_S = 0.2  # between reports
DRAIN_STEP_S = 0.05


@frozen
class Report:
    """A replica's report to the front: its address, its load, and the pages that it can find."""

    replica: str
    url: str
    page_size: int
    is_draining: bool
    load: Load
    pages: PageDelta


@frozen
class Reply:
    """The front's reply to a report: whether the next one should name all pages, and the token of the cluster."""

    wants_whole: bool
    token: str


SendReport = Callable[[Report], Awaitable[Reply]]


class Inner:
    """A wrapper of the whole server: removes and obeys the front's headers of a request, and lends pages."""

    def __init__(self, app: ASGIApp, peers: Peers) -> None:
        self._app, self._peers = app, peers
        self._fetcher, self._lender = Fetcher(peers), Lender(peers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on to the server."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"] == PAGES_PATH:
            await self._lender.answer(scope, receive, send)
            return
        given = {name: value.decode("latin-1") for name, value in scope["headers"] if name in OWN_HEADERS}
        scope["headers"] = [header for header in scope["headers"] if header[0] not in given]
        peer = given.get(PEER) if self._peers.admits(given.get(TOKEN, "")) else None
        may_come = peer is not None or self._fetcher.is_fetching
        source = self._fetcher.from_peer(peer) if may_come else None
        scope.setdefault("state", {})[STATE_KEY] = RequestHooks(PLAN in given, source)
        with use_identity(Identity.parse(given[IDENTITY]) if IDENTITY in given else None):
            await self._app(scope, receive, send)


async def tell_plan(_: Request, planned: Exception) -> Response:
    """The answer to a request for a plan: the names of the prompt's pages, cut as the router knows them."""
    assert isinstance(planned, Planned)
    names = planned.names
    keys = b"".join(key[:KEY_BYTES] for key in names.keys)
    return JSONResponse({"keys": keys.hex(), "tokens": names.tokens}, headers={PLAN.decode(): "1"})


def build_replica_app(settings: Settings) -> Starlette:
    """The server's application with the parts for the front and other replicas."""
    app = build_app(settings)
    app.state.peers = Peers(app.state.parts.metrics.registry, settings.fetch_bytes, settings.fetch_timeout_s)
    app.add_exception_handler(Planned, tell_plan)
    app.add_middleware(Inner, peers=app.state.peers)
    return app


class ReplicaServer(Server):
    """A server that sends reports while it runs."""

    def __init__(self, app: Starlette, settings: Settings, name: str, url: str, send: SendReport) -> None:
        super().__init__(app, settings)
        self._app, self._name, self._url, self._send_report = app, name, url, send
        self._reporting: asyncio.Task[None] | None = None
        self.report: Report | None = None  # the last report

    @property
    def has_failed(self) -> bool:
        """True if it has ceased to report, for example because its engine has stopped."""
        return self._reporting is not None and self._reporting.done() and not self._reporting.cancelled()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and begin to report."""
        await super().startup(sockets)
        self._reporting = asyncio.create_task(self._report_on())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End like a server; a forced end cuts answers off, so that the front never takes them for finished."""
        if self._reporting is not None:
            self._reporting.cancel()
        if self.force_exit:
            for connection in list(self.server_state.connections):
                connection.transport.abort()
        await super().shutdown(sockets)

    async def _report_on(self) -> None:
        parts: ServerParts = self._app.state.parts
        peers: Peers = self._app.state.peers
        await parts.lifecycle.loaded.wait()
        if parts.lifecycle.problem is not None:
            logger.error("the replica has no model: %s", parts.lifecycle.problem)
            return
        pace, sequence, wants_whole = Pace(), 0, True
        async with await parts.pool.acquire(None) as lease:  # held, so that the model stays
            engine = lease.session.engine
            peers.exchange = PageExchange(engine, peers.max_bytes) if engine.cache.is_shared else None
            while True:
                read = await engine.read_report(whole=wants_whole)
                names = read.names
                delta = PageDelta(sequence, names.added, names.dropped, names.whole)
                load = replace(pace.note(read, monotonic()), link=peers.describe_link())
                report = Report(
                    self._name, self._url, lease.session.page_size, parts.lifecycle.is_draining, load, delta
                )
                self.report, sequence = report, sequence + 1
                try:
                    reply = await self._send_report(report)
                    wants_whole, peers.token = reply.wants_whole, reply.token
                except Exception as error:  # the front is being started again
                    logger.warning("the front takes no report: %s", error)
                    wants_whole = True
                await asyncio.sleep(REPORT_S)


class Replica:
    """A server in a thread of this process, from the start until `stop`.

    Raises SettingError when it cannot listen, and MlxrError when the model cannot be loaded.
    """

    def __init__(self, settings: Settings, name: str, send: SendReport) -> None:
        self._app = build_replica_app(settings)
        listener = open_socket(settings)
        self.url = name_address(listener)
        self._drain_s = settings.drain_s
        self._server = ReplicaServer(self._app, settings, name, self.url, send)
        self._thread = threading.Thread(target=self._server.run, args=([listener],), name="server", daemon=True)
        self._thread.start()

    def wait_ready(self) -> None:
        """Return when the model is loaded; raises MlxrError saying why it cannot be."""
        lifecycle = self._app.state.parts.lifecycle
        while not lifecycle.loaded.is_set():
            if not self._thread.is_alive():
                raise SettingError("host: the replica's server has ended")
            sleep(DRAIN_STEP_S)
        if lifecycle.problem is not None:
            raise MlxrError(lifecycle.problem)

    @property
    def is_alive(self) -> bool:
        """True if the server and its engine run."""
        return self._thread.is_alive() and not self._server.has_failed

    @property
    def load(self) -> Load:
        """The load in the last report."""
        report = self._server.report
        return Load(0, 0, 0.0, 0.0) if report is None else report.load

    async def stop(self) -> None:
        """Take no more requests and let answers grow for up to `drain_s`; other replicas continue the rest."""
        self._app.state.parts.lifecycle.begin_drain()
        end_s = monotonic() + self._drain_s
        while len(self._app.state.parts.activity) and self._thread.is_alive() and monotonic() < end_s:
            await asyncio.sleep(DRAIN_STEP_S)
        self._server.force_exit = len(self._app.state.parts.activity) > 0  # the front mends cut connections
        self._server.should_exit = True
        await asyncio.to_thread(self._thread.join, 10.0)
