"""Sockets, signals and the end: what runs the application on a machine.

A first SIGTERM or SIGINT closes the sockets and lets answers go on for `drain_s`; then those that are left end with
what they have. A second SIGINT ends at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from mlxr.core.errors import SettingError
from mlxr.core.settings import Settings
from mlxr.core.work_threads import QuickExecutor, WorkThreads
from mlxr.server.activity import Activity
from mlxr.server.app import create_app
from mlxr.server.connections import (
    ACCEPTS_AT_ONCE,
    Connections,
    SeldomComplaints,
    count_connections,
    make_protocol,
    raise_descriptor_limit,
)
from mlxr.server.lifecycle import Lifecycle
from mlxr.server.served import ServedModels
from mlxr.service.catalogue import open_registry
from mlxr.service.model_pool import ModelPool

BACKLOG = 2048
CATALOGUE_WAIT_S = 2.0  # for which a request waits while another process holds the catalogue
QUICK_THREADS = 8  # for `asyncio.to_thread`; what may take long has others, see `work`
KEEP_ALIVE_S = 75  # longer than clients keep idle connections, so that they close them and no request is lost
LAST_EVENTS_S = 5  # for what is left to be sent once the answers have been ended


def build_app(settings: Settings) -> Starlette:
    """The application over the registry and the pool of the settings."""
    served = ServedModels(open_registry(settings, CATALOGUE_WAIT_S), settings)
    return create_app(ModelPool(settings, served), served, settings)


def open_socket(settings: Settings) -> socket.socket:
    """The socket to listen on; raises SettingError when it cannot be had."""
    if settings.unix_socket is not None:
        return _open_unix_socket(Path(settings.unix_socket))
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        listener = socket.create_server((settings.host, settings.port), family=family, backlog=BACKLOG)
    except OSError as error:
        reason = error.strerror or str(error)
        raise SettingError(f"port: {settings.host}:{settings.port} cannot be listened on: {reason}") from error
    # Connections inherit this. Without it the system holds back each small piece of an answer, such as a token, until
    # the client has confirmed the one before, for 40 ms. asyncio sets it only for sockets that it makes itself.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _open_unix_socket(path: Path) -> socket.socket:
    """Only this user may connect. A socket that a server left behind makes room; one that is served does not."""
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
    """How a client spells the address."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """uvicorn with our end: it is told to the application, and answers are ended rather than their tasks killed.

    `on_ready` is called once, when the first models are loaded or could not be.
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
        self._lifecycle: Lifecycle = app.state.lifecycle
        self._activity: Activity = app.state.activity

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and tell when the models are there."""
        quick = WorkThreads("mlxr-quick", QUICK_THREADS)
        asyncio.get_running_loop().set_default_executor(QuickExecutor(quick))
        asyncio.get_running_loop().set_exception_handler(SeldomComplaints())
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)  # uvicorn knows one number for this and for what is taken at once
        self._telling = asyncio.create_task(self._tell())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, let answers under way go on for `drain_s`, and then end those that are left."""
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
        except ValueError:  # not the main thread: whoever runs us there ends us by `should_exit`
            previous = {}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal begins to drain; a second Ctrl-C ends at once."""
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
