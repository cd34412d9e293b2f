"""The two layers around all routes.

`RequestScope`, the outer one, gives a request its id and its row, closes everything that it opened, names the fields
without effect in the response, and reports its end to log and metrics. `Guard`, the inner one, refuses requests that
may not pass and turns every failure into an error of the path's dialect. Between them is CORS, so that allowed web
pages can read errors too.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from http import HTTPStatus
from time import monotonic

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlxr.server.access import OPEN_PATHS, Head, Hosts, Keys, Origins
from mlxr.server.activity import InFlight, log_request
from mlxr.server.errors import ClientGone, ServerError, to_error
from mlxr.server.parts import ServerParts
from mlxr.server.routes import IGNORED, Dialect, find_dialect, join_names
from mlxr.server.streaming import encode_json

MAX_CALLERS = 10_000


class RateLimit:
    """A token bucket for each caller, which holds `per_minute` requests and refills evenly; 0 is no limit."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = monotonic) -> None:
        self._per_minute, self._clock = per_minute, clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # caller → (left, when)

    def take(self, caller: str) -> None:
        """Count one request; raises ServerError 429 with the time until there is room for it."""
        if not self._per_minute:
            return
        now_s, per_s = self._clock(), self._per_minute / 60
        left, then_s = self._buckets.pop(caller, (float(self._per_minute), now_s))
        left = min(float(self._per_minute), left + (now_s - then_s) * per_s)
        self._buckets[caller] = (left - 1 if left >= 1 else left, now_s)
        if len(self._buckets) > MAX_CALLERS:
            self._buckets.popitem(last=False)
        if left < 1:
            message = f"more than {self._per_minute} requests per minute; see the setting requests_per_minute"
            raise ServerError(429, "rate_limited", message, retry_after_s=(1 - left) / per_s)


def check_length(content_length: str | None, limit_bytes: int) -> None:
    """Raise ServerError 413 for a body whose header says that it is too large."""
    if content_length is not None and content_length.isdigit() and int(content_length[:20]) > limit_bytes:
        raise ServerError(413, "too_large", _explain(limit_bytes), "body")


def bound_body(receive: Receive, limit_bytes: int, timeout_s: float) -> Receive:
    """Return `receive` with an error once the body has more than `limit_bytes` or takes longer than `timeout_s`."""
    seen_bytes, end_s, is_whole = 0, monotonic() + timeout_s, False

    async def receive_bounded() -> Message:
        nonlocal seen_bytes, is_whole
        if is_whole:  # the next message is the end of the connection
            return await receive()
        message = await _receive_within(receive, end_s - monotonic(), timeout_s)
        if message["type"] == "http.request":
            seen_bytes += len(message.get("body", b""))
            if seen_bytes > limit_bytes:
                raise ServerError(413, "too_large", _explain(limit_bytes), "body")
            is_whole = not message.get("more_body", False)
        return message

    return receive_bounded


def bound_silence(receive: Receive, timeout_s: float) -> Receive:
    """Return `receive` with an error if nothing of the body comes for `timeout_s`; for files, of any size."""
    is_whole = False

    async def receive_bounded() -> Message:
        nonlocal is_whole
        message = await (receive() if is_whole else _receive_within(receive, timeout_s, timeout_s))
        is_whole = is_whole or not message.get("more_body", False)
        return message

    return receive_bounded


async def _receive_within(receive: Receive, seconds: float, timeout_s: float) -> Message:
    try:
        async with asyncio.timeout(seconds):
            return await receive()
    except TimeoutError:
        message = f"the request did not arrive within {timeout_s:g} s; see the setting request_timeout_s"
        raise ServerError(408, "timeout", message) from None


def _explain(limit_bytes: int) -> str:
    return f"the body is larger than {limit_bytes} bytes; see the setting max_body_bytes"


logger = logging.getLogger(__name__)
BLOBS = "/api/blobs/"  # bodies here are files, of any size
GONE_STATUS = 499  # the status in the log if the client was gone
# Codes of errors that the log need not explain: the server did what the request, its setting or its owner wanted, or
# the reason tells the fault.
NO_FAULTS = {"not_supported", "stopping", "deadline", "cancelled", "unavailable", "no_space"}
PREFLIGHT_REFUSED = ServerError(
    400, "forbidden", "a browser asked for a page of an origin that is not allowed; add it to the setting cors_origins"
)


class RequestScope:
    """See the module; `app` is the rest of the server."""

    def __init__(self, app: ASGIApp, parts: ServerParts) -> None:
        self._app, self._parts = app, parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on, then count and log it, in whatever way it ended."""
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
            row = self._parts.activity.open(scope, _wanted_id(scope), stack)
            stack.callback(self._parts.activity.close, row)  # last: an unlisted request holds nothing
            try:
                await self._app(scope, receive, send_with_id)
            except (ClientGone, asyncio.CancelledError):  # cancelled: the server ends and waits no longer
                status, row.is_gone = GONE_STATUS, True
            finally:
                row.route = _route_of(scope)
                seconds = monotonic() - row.arrived_s
                self._parts.metrics.count_request(row, status, seconds)
                log_request(row, status, seconds)
                self._parts.live.note_end(row)


class Guard:
    """See the module. Checks in this order: host name, origin, draining, key, rate, size of the body."""

    def __init__(self, app: ASGIApp, parts: ServerParts, keys: Keys, dialects: Sequence[Dialect]) -> None:
        self._app, self._parts, self._keys, self._dialects = app, parts, keys, dialects
        settings = parts.settings
        self._rate = RateLimit(settings.requests_per_minute)
        self._hosts, self._origins = Hosts.read(settings), Origins.read(settings)
        self._max_body_bytes, self._request_timeout_s = settings.max_body_bytes, settings.request_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on if it may be answered, otherwise answer with the error."""
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
        """Raise ServerError for a request that may not pass; returns the bounded `receive` for its body."""
        head = _read_head(scope, row)
        self._hosts.check(head)
        self._origins.check(head, self._hosts)
        if head.path in OPEN_PATHS or (self._parts.page is not None and self._parts.page.has(head)):
            return receive
        row.key_id = self._keys.check(head)
        if self._parts.lifecycle.is_draining:
            raise ServerError(503, "stopping", "the server is being stopped", retry_after_s=1.0)
        self._rate.take(row.key_id or row.client)
        if head.path.startswith(BLOBS):
            return bound_silence(receive, self._request_timeout_s)
        check_length(head.headers.get("content-length"), self._max_body_bytes)
        return bound_body(receive, self._max_body_bytes, self._request_timeout_s)


def render_error(dialects: Sequence[Dialect], request: Request, failure: ServerError) -> Response:
    """Return the error response in the dialect that the request's path belongs to."""
    dialect = find_dialect(dialects, request.url.path)
    row: InFlight = request.scope["state"]["in_flight"]
    row.failure = failure
    body = encode_json(dialect.render_error(failure, row.id))
    return Response(body, failure.status, failure.headers, "application/json")


def _forget_frames(error: BaseException | None) -> None:
    """Drop the tracebacks of an error and of its causes.

    They hold the functions' variables, perhaps a body of megabytes, and with them the error itself: a reference cycle,
    which would stay until the garbage collector runs.
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
    """Return the template of the path, such as /v1/models/{id}: metrics need few different ones."""
    route = scope.get("route")
    return getattr(route, "path", "unknown")
