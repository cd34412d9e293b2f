"""One engine of a cluster: the server of one machine on a port of its own, which also tells how it is.

The front passes requests on to it as they came. Some things are added to the server: a request may bring the identity
that its reply shall have, it may ask which pages its prompt fills instead of being answered, and it may name a replica
that has pages of its prompt. Other replicas may ask for pages. And several times a second a `Report` goes to the front.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from time import monotonic, sleep

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from mlxr.cluster.page_exchange import PageExchange
from mlxr.cluster.page_transfer import PAGES_PATH, PEER, TOKEN, Fetcher, Lender, Peers
from mlxr.cluster.prefix_table import KEY_BYTES, PageDelta
from mlxr.cluster.router import Load
from mlxr.core.errors import MlxrError, SettingError
from mlxr.core.settings import Settings
from mlxr.engine.stats import EngineReport
from mlxr.server.listen import Server, build_app, name_address, open_socket
from mlxr.server.parts import ServerParts
from mlxr.service.cluster_hooks import STATE_KEY, Planned, RequestHooks
from mlxr.service.identity import Identity, use_identity

WEIGHT = 0.3  # of the newest measurement


class Pace:
    """Tokens of prompts per second and seconds per step, each an average over the reports in which there was such."""

    def __init__(self) -> None:
        self._before: EngineReport | None = None
        self._at_s = 0.0
        self._prefill_per_s = self._step_s = 0.0

    def note(self, report: EngineReport, now_s: float) -> Load:
        """Take in the next report, read at `now_s`, and tell the load with the speeds so far."""
        before, seconds = self._before, now_s - self._at_s
        if before is not None and seconds > 0:
            steps = report.steps - before.steps
            if steps > 0 and before.running and report.running:
                self._step_s = _blend(self._step_s, seconds / steps)
            tokens = report.prefill_tokens - before.prefill_tokens
            if tokens > 0 and before.waiting_tokens and report.waiting_tokens:  # it had prompts all the while
                self._prefill_per_s = _blend(self._prefill_per_s, tokens / seconds)
        self._before, self._at_s = report, now_s
        return Load(report.waiting_tokens, report.running, self._prefill_per_s, self._step_s)


def _blend(known: float, new: float) -> float:
    return new if known == 0 else (1 - WEIGHT) * known + WEIGHT * new


logger = logging.getLogger(__name__)
IDENTITY, PLAN = b"x-mlxr-identity", b"x-mlxr-plan"
OWN_HEADERS = frozenset({IDENTITY, PLAN, PEER, TOKEN})  # that only the front sends
REPORT_S = 0.2  # between reports
DRAIN_STEP_S = 0.05


@dataclass(frozen=True, slots=True)
class Report:
    """What a replica tells the front: how to reach it, what it has to do, and which pages it can find."""

    replica: str
    url: str
    page_size: int
    is_draining: bool
    load: Load
    pages: PageDelta


@dataclass(frozen=True, slots=True)
class Reply:
    """What the front tells a replica: whether all pages should be told next time, and the token of the cluster."""

    wants_whole: bool
    token: str


SendReport = Callable[[Report], Awaitable[Reply]]


class Inner:
    """Around the whole server: takes the front's headers off a request and does what they say, and lends pages."""

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
    """The answer to who asks for a plan: the names of the prompt's pages, cut as the router knows them."""
    assert isinstance(planned, Planned)
    names = planned.names
    keys = b"".join(key[:KEY_BYTES] for key in names.keys)
    return JSONResponse({"keys": keys.hex(), "tokens": names.tokens}, headers={PLAN.decode(): "1"})


def build_replica_app(settings: Settings) -> Starlette:
    """The server's application with what the front asks for."""
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
        self.report: Report | None = None  # the last one

    @property
    def has_failed(self) -> bool:
        """Whether it reports no more, as its engine has stopped, say."""
        return self._reporting is not None and self._reporting.done() and not self._reporting.cancelled()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and begin to report."""
        await super().startup(sockets)
        self._reporting = asyncio.create_task(self._report_on())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End as a server does; at a forced end the front sees that answers break off, rather than their last words."""
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
            peers.exchange = None if engine.exchange is None else PageExchange(engine, engine.exchange)
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
        """Whether the server runs and its engine too."""
        return self._thread.is_alive() and not self._server.has_failed

    @property
    def load(self) -> Load:
        """What there is to do, as it was reported last."""
        report = self._server.report
        return Load(0, 0, 0.0, 0.0) if report is None else report.load

    async def stop(self) -> None:
        """Take no more requests and let answers go on for `drain_s`; those that are left go on in other replicas."""
        self._app.state.parts.lifecycle.begin_drain()
        end_s = monotonic() + self._drain_s
        while len(self._app.state.parts.activity) and self._thread.is_alive() and monotonic() < end_s:
            await asyncio.sleep(DRAIN_STEP_S)
        self._server.force_exit = len(self._app.state.parts.activity) > 0  # connections are cut, which the front mends
        self._server.should_exit = True
        await asyncio.to_thread(self._thread.join, 10.0)
