"""Runs the application on a machine: sockets, signals and the end.

A first SIGTERM or SIGINT closes the sockets and lets answers go on for `drain_s`; then unfinished answers end as they
are. A second SIGINT ends at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import signal
import socket
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from mlxr.core.errors import SettingError
from mlxr.core.settings import Settings
from mlxr.core.work_threads import QuickExecutor, WorkThreads
from mlxr.server.app import create_app
from mlxr.server.model_names import ServedModels
from mlxr.server.parts import Lifecycle, ServerParts
from mlxr.server.streaming import CONNECTION
from mlxr.service.catalogue import open_registry
from mlxr.service.model_pool import ModelPool

logger = logging.getLogger(__name__)
MAX_CONNECTIONS = 8192
MAX_DESCRIPTORS = 1 << 16  # asked for if the system sets no bound
RESERVED_DESCRIPTORS = 128  # for models, the catalogue, pulls and template workers
ACCEPTS_AT_ONCE = 8  # connections accepted before these are handled
COMPLAINT_S = 60.0  # between two lines of the log about one shortage
FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain\r\nContent-Length: 35\r\nRetry-After: 1\r\n"
    b"Connection: close\r\n\r\ntoo many connections are being used"
)


def raise_descriptor_limit() -> int:
    """Let the process have as many descriptors as the system allows; returns their number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # a bound that the system does not tell
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return wanted
    return wanted if soft == resource.RLIM_INFINITY else soft


def count_connections(descriptors: int) -> int:
    """Return the number of connections that a process with this many descriptors may have."""
    return max(4, min(MAX_CONNECTIONS, descriptors - min(RESERVED_DESCRIPTORS, descriptors // 2)))


class Connections:
    """The open connections of a server, at most `most`, in the order of their last data."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._open: dict[TimedProtocol, None] = {}

    def __len__(self) -> int:
        return len(self._open)

    def enter(self, connection: TimedProtocol) -> bool:
        """Add a connection; if there are too many, the one that was silent longest and is not being answered closes.

        Those that have not sent a whole request yet go first. Returns False if all are being answered, so that there
        is no place for this one.
        """
        if len(self._open) >= self.most:
            idle = [other for other in self._open if not other.is_answered]
            if not idle:
                return False
            leaving = next((other for other in idle if not other.has_asked), idle[0])
            self.leave(leaving)
            leaving.transport.close()
        self._open[connection] = None
        return True

    def note(self, connection: TimedProtocol) -> None:
        """Note that data came from a connection."""
        if connection in self._open:
            del self._open[connection]
            self._open[connection] = None

    def leave(self, connection: TimedProtocol) -> None:
        """Remove a connection that ended."""
        self._open.pop(connection, None)


class TimedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's HTTP protocol, which closes the connection if a request's head is not complete `timeout_s` after the
    connection was made or the head began, and at once if there are too many connections.
    """

    app_state: dict[str, Any]  # each request's scope has a copy

    def __init__(self, timeout_s: float, connections: Connections, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._timeout_s, self._counted = timeout_s, connections
        self._timer: asyncio.TimerHandle | None = None
        self.has_asked = False  # sent a whole request, now or before

    @property
    def is_answered(self) -> bool:
        """True if a complete request of the connection is being answered."""
        return self._has_head and not self.cycle.more_body

    @property
    def _has_head(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for the head of a request."""
        super().connection_made(transport)
        self.app_state = {**self.app_state, CONNECTION: weakref.ref(self)}
        if self._counted.enter(self):
            self._watch()
        else:
            transport.write(FULL)
            transport.close()

    def data_received(self, data: bytes) -> None:
        """Handle data, and note that some came."""
        self._counted.note(self)
        super().data_received(data)
        self.has_asked = self.has_asked or (self.cycle is not None and not self.cycle.more_body)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting for a head or a body."""
        self._counted.leave(self)
        self._rest()
        super().connection_lost(exc)

    def open_writer(self) -> ChunkWriter | None:
        """Return a writer for parts of the response that has begun; None if it is not sent in chunks."""
        cycle = self.cycle
        if cycle is None or not cycle.response_started or cycle.scope["http_version"] != "1.1":
            return None
        if not getattr(cycle, "chunked_encoding", True):  # of httptools; h11 sends chunks if no length is stated
            return None
        return ChunkWriter(self, cycle)

    def _watch(self) -> None:
        if self._has_head:
            self._rest()
        elif self._timer is None:
            self._timer = self.loop.call_later(self._timeout_s, self.transport.close)

    def _rest(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class ChunkWriter:
    """Writes parts of one response as HTTP's chunks, past uvicorn and its parser.

    uvicorn's work for a part takes several times as long as the system's own.
    """

    __slots__ = ("_cycle", "_protocol")

    def __init__(self, protocol: TimedProtocol, cycle: Any) -> None:
        self._protocol, self._cycle = protocol, cycle

    @property
    def is_ready(self) -> bool:
        """True if the client still listens and has taken everything written before."""
        cycle, protocol = self._cycle, self._protocol
        ended = cycle.disconnected or cycle.response_complete or protocol.transport.is_closing()
        return not (ended or protocol.flow.write_paused)

    def write(self, frame: bytes) -> None:
        """Write a part, which is not empty: that would end the response."""
        self._protocol.transport.write(b"%x\r\n%b\r\n" % (len(frame), frame))


def make_protocol(timeout_s: float, connections: Connections) -> type[asyncio.Protocol]:
    """Return the class of `TimedProtocol` with these arguments, as uvicorn wants a class."""

    class BoundProtocol(TimedProtocol):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(timeout_s, connections, *arguments, **options)

    return BoundProtocol


class SeldomComplaints:
    """A loop's handler of exceptions that logs a lack of descriptors once in COMPLAINT_S, and the rest as usual.

    asyncio reports it for each connection that it cannot take, thousands of times a second.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._told_s = -COMPLAINT_S

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log the exception, unless it was logged just before."""
        if "out of system resource" not in str(context.get("message", "")):
            loop.default_exception_handler(context)
        elif self._clock() - self._told_s >= COMPLAINT_S:
            self._told_s = self._clock()
            reason = context.get("exception")
            logger.warning("no connection can be taken: %s; raise the limit of open files (ulimit -n)", reason)


BACKLOG = 2048
CATALOGUE_WAIT_S = 2.0  # a request waits this long while another process holds the catalogue
QUICK_THREADS = 8  # for `asyncio.to_thread`; long work has other threads, see `work`
KEEP_ALIVE_S = 75  # longer than clients keep idle connections, so that they close them and no request is lost
LAST_EVENTS_S = 5  # for sending the rest once the answers have been ended


def build_app(settings: Settings) -> Starlette:
    """Make the application with the registry and the pool of the settings."""
    served = ServedModels(open_registry(settings, CATALOGUE_WAIT_S), settings)
    return create_app(ModelPool(settings, served), served, settings)


def open_socket(settings: Settings) -> socket.socket:
    """Open the socket to listen on; raises SettingError if that fails."""
    if settings.unix_socket is not None:
        return _open_unix_socket(Path(settings.unix_socket))
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        listener = socket.create_server((settings.host, settings.port), family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise SettingError(
                f"port: another program listens on {settings.host}:{settings.port}; stop it (`mlxr doctor` says "
                f"whether it is an mlxr server), or choose another: --port {settings.port % 65535 + 1}"
            ) from error
        reason = error.strerror or str(error)
        raise SettingError(f"port: {settings.host}:{settings.port} cannot be listened on: {reason}") from error
    # Connections inherit this. Without it the system holds back each small piece of an answer, such as a token, until
    # the client has confirmed the one before, for 40 ms. asyncio sets it only for sockets that it makes itself.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _open_unix_socket(path: Path) -> socket.socket:
    """Open a socket to which only this user may connect. A socket that an ended server left is replaced."""
    _remove_dead_socket(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise SettingError(f"unix_socket: {path} cannot be listened on: {error.strerror or error}") from error
    finally:
        os.umask(mask)
    return listener


def _remove_dead_socket(path: Path) -> None:
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            path.unlink(missing_ok=True)
            return
    raise SettingError(f"unix_socket: a server listens on {path} already")


def name_address(listener: socket.socket) -> str:
    """Return the address in a client's spelling."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """uvicorn with our own end: the application is told of it, and answers are ended instead of killing their tasks.

    `on_ready` is called once, when the first models are loaded or failed to load.
    """

    def __init__(self, app: Starlette, settings: Settings, on_ready: Callable[[Lifecycle], None] | None = None) -> None:
        self.connections = Connections(count_connections(raise_descriptor_limit()))
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                ws="none",
                http=make_protocol(settings.request_timeout_s, self.connections),
                backlog=ACCEPTS_AT_ONCE,
                lifespan="on",
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=int(settings.drain_s) + LAST_EVENTS_S,
            )
        )
        self._drain_s, self._on_ready = settings.drain_s, on_ready
        parts: ServerParts = app.state.parts
        self._lifecycle, self._activity = parts.lifecycle, parts.activity

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and call `on_ready` once the models are loaded."""
        quick = WorkThreads("mlxr-quick", QUICK_THREADS)
        asyncio.get_running_loop().set_default_executor(QuickExecutor(quick))
        asyncio.get_running_loop().set_exception_handler(SeldomComplaints())
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)  # uvicorn has one number for this and for connections accepted at once
        self._telling = asyncio.create_task(self._tell())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, let running answers go on for `drain_s`, and then end the rest."""
        self._lifecycle.begin_drain()
        self._telling.cancel()
        ending = asyncio.get_running_loop().call_later(self._drain_s, self._activity.cut_off_all)
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()
        if self.force_exit:  # the base class would leave the models to the interpreter
            await self.lifespan.shutdown()

    async def _tell(self) -> None:
        await self._lifecycle.loaded.wait()
        if self._on_ready is not None:
            self._on_ready(self._lifecycle)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle the signals while serving; unlike the base class, do not raise them again after a clean end."""
        try:
            previous = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not the main thread: the caller there ends us by `should_exit`
            previous = {}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain at the first signal; end at once at a second Ctrl-C."""
        self._lifecycle.begin_drain()
        super().handle_exit(sig, frame)


def serve(
    app: Starlette,
    settings: Settings,
    listeners: Sequence[socket.socket],
    on_ready: Callable[[Lifecycle], None] | None = None,
) -> None:
    """Run the application until a signal ends it."""
    try:
        Server(app, settings, on_ready).run(list(listeners))
    finally:
        if settings.unix_socket is not None:
            Path(settings.unix_socket).unlink(missing_ok=True)
