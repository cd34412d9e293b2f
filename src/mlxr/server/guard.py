"""The two layers around all routes.

`RequestScope`, the outer one, gives a request its id and its row, closes what it opened, names in the response which
fields had no effect, and tells log and metrics how it ended. `Guard`, the inner one, refuses what may not pass and
turns every failure into an error of the dialect that the path belongs to. Between them lies CORS, so that web pages
that are allowed can read errors too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack
from http import HTTPStatus
from time import monotonic

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlxr.core.settings import Settings
from mlxr.server.activity import Activity, InFlight
from mlxr.server.dialect import Dialect, find_dialect
from mlxr.server.errors import ClientGone, ServerError, to_error
from mlxr.server.ignored import HEADER as IGNORED
from mlxr.server.ignored import join_names
from mlxr.server.lifecycle import Lifecycle
from mlxr.server.limits import RateLimit, bound_body, bound_silence, check_length
from mlxr.server.live import Hub
from mlxr.server.logs import log_request
from mlxr.server.metrics import Metrics
from mlxr.server.origins import Hosts, Origins
from mlxr.server.page_files import Page
from mlxr.server.security import OPEN_PATHS, Head, Keys
from mlxr.server.streaming import dump_json

logger = logging.getLogger(__name__)
BLOBS = "/api/blobs/"  # bodies here are files, of any size
GONE_STATUS = 499  # what the log says where nobody was left to be answered
# Codes of errors that the log need not explain: the server did what the request, its setting or its owner wanted, or
# what is wrong stands in the reason.
NO_FAULTS = {"not_supported", "stopping", "deadline", "cancelled", "unavailable", "no_space"}
PREFLIGHT_REFUSED = ServerError(
    400, "forbidden", "a browser asked for a page of an origin that is not allowed; add it to the setting cors_origins"
)


class RequestScope:
    """See the module; `app` is the rest of the server."""

    def __init__(self, app: ASGIApp, activity: Activity, metrics: Metrics, live: Hub) -> None:
        self._app, self._activity, self._metrics, self._live = app, activity, metrics, live

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on, and afterwards count and log it, however it ended."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = GONE_STATUS
        # A proxy in front may have believed the other one (RFC 9112, 6.1), so nothing may follow on this connection.
        is_ambiguous = {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope["headers"]}

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if status == HTTPStatus.BAD_REQUEST and row.failure is None and scope["method"] == "OPTIONS":
                    row.failure = PREFLIGHT_REFUSED
                tag = row.id.encode()
                message["headers"] = [*message["headers"], (b"x-request-id", tag), (b"request-id", tag)]
                if is_ambiguous:
                    message["headers"].append((b"connection", b"close"))
                if row.ignored:
                    message["headers"].append((IGNORED.encode(), join_names(row.ignored).encode()))
            await send(message)

        async with AsyncExitStack() as stack:
            row = self._activity.open(scope, _wanted_id(scope), stack)
            stack.callback(self._activity.close, row)  # the last to go: what is not listed any more holds nothing
            try:
                await self._app(scope, receive, send_with_id)
            except (ClientGone, asyncio.CancelledError):  # the latter: the server ends and waits no longer
                status, row.is_gone = GONE_STATUS, True
            finally:
                row.route = _route_of(scope)
                seconds = monotonic() - row.arrived_s
                self._metrics.count_request(row, status, seconds)
                log_request(row, status, seconds)
                self._live.note_end(row)


class Guard:
    """See the module. Checks in this order: host name, origin, draining, key, rate, size of the body."""

    def __init__(
        self,
        app: ASGIApp,
        settings: Settings,
        keys: Keys,
        dialects: Sequence[Dialect],
        lifecycle: Lifecycle,
        page: Page | None,
    ) -> None:
        self._app, self._keys, self._dialects, self._lifecycle, self._page = app, keys, dialects, lifecycle, page
        self._rate = RateLimit(settings.requests_per_minute)
        self._hosts, self._origins = Hosts.read(settings), Origins.read(settings)
        self._max_body_bytes, self._request_timeout_s = settings.max_body_bytes, settings.request_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on if it may be answered, otherwise answer it with the error."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def note_start(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        row: InFlight = scope["state"]["in_flight"]
        try:
            receive = self._check(scope, row, receive)
            await self._app(scope, receive, note_start)
        except ClientGone:
            raise
        except Exception as error:
            failure = to_error(error)
            if failure.status >= 500 and failure.code not in NO_FAULTS:
                logger.exception("request %s failed", row.id)
            if started:
                raise
            await render_error(self._dialects, Request(scope), failure)(scope, receive, send)
            _forget_frames(error)
            _forget_frames(failure)

    def _check(self, scope: Scope, row: InFlight, receive: Receive) -> Receive:
        """Raise ServerError for what may not pass; what takes the place of `receive` for the rest."""
        head = _read_head(scope, row)
        self._hosts.check(head)
        self._origins.check(head, self._hosts)
        if head.path in OPEN_PATHS or (self._page is not None and self._page.has(head)):
            return receive
        row.key_id = self._keys.check(head)
        if self._lifecycle.is_draining:
            raise ServerError(503, "stopping", "the server is being stopped", retry_after_s=1.0)
        self._rate.take(row.key_id or row.client)
        if head.path.startswith(BLOBS):
            return bound_silence(receive, self._request_timeout_s)
        check_length(head.headers.get("content-length"), self._max_body_bytes)
        return bound_body(receive, self._max_body_bytes, self._request_timeout_s)


def render_error(dialects: Sequence[Dialect], request: Request, failure: ServerError) -> Response:
    """The answer of the dialect that the request's path belongs to."""
    dialect = find_dialect(dialects, request.url.path)
    row: InFlight = request.scope["state"]["in_flight"]
    row.failure = failure
    body = dump_json(dialect.render_error(failure, row.id))
    return Response(body, failure.status, failure.headers, "application/json")


def _forget_frames(error: BaseException | None) -> None:
    """Drop the traces of an error and of its causes.

    They hold what the functions held, perhaps a body of megabytes, and among it the error itself: a circle, which
    would stay until Python looks for such.
    """
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _wanted_id(scope: Scope) -> str | None:
    return next((value.decode("latin-1") for name, value in scope["headers"] if name == b"x-request-id"), None)


def _read_head(scope: Scope, row: InFlight) -> Head:
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    address, port = scope.get("server") or (None, None)
    return Head(scope["method"], scope["path"], headers, row.client, None if port is None else address)


def _route_of(scope: Scope) -> str:
    """The template of the path, such as /v1/models/{id}: few different ones, so fit for metrics."""
    route = scope.get("route")
    return getattr(route, "path", "unknown")
