"""Servers for the tests: real sockets and real event loops in a thread of this process, and one over a fake engine."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import httpx
from starlette.applications import Starlette

from mlxr.core.settings import Settings, resolve
from mlxr.server.activity import InFlight
from mlxr.server.app import create_app
from mlxr.server.listen import CATALOGUE_WAIT_S, Server, name_address, open_socket
from mlxr.server.model_names import ServedModels
from mlxr.service.catalogue import open_registry
from mlxr.service.model_pool import ModelPool, OpenSession, open_session

READY_S = 60.0
SMALL = {"arena_bytes": "64M", "threads": 1, "port": 0}


@dataclass
class RunningServer:
    """A server in a thread. `url` is its address, `app.state` its inside (of another thread: look, do not touch)."""

    url: str
    app: Starlette
    server: Server
    thread: threading.Thread
    settings: Settings

    def client(self, key: str | None = None, **options: object) -> httpx.Client:
        """An HTTP client of this server."""
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        transport = httpx.HTTPTransport(uds=self.settings.unix_socket) if self.settings.unix_socket else None
        return httpx.Client(base_url=self.url, headers=headers, timeout=60, transport=transport, **options)  # type: ignore[arg-type]

    def wait_ready(self) -> None:
        """Return when the first models are loaded."""
        end_s = time.monotonic() + READY_S
        while self.app.state.parts.lifecycle.problem is not None:
            assert time.monotonic() < end_s, self.app.state.parts.lifecycle.problem
            time.sleep(0.01)

    def stop(self) -> None:
        """End it as a signal would, and wait for that."""
        self.server.should_exit = True
        self.thread.join(READY_S)
        assert not self.thread.is_alive(), "the server does not end"


def start_server(
    folder: Path,
    *,
    open_session: OpenSession = open_session,
    ready: bool = True,
    catalogue_wait_s: float = CATALOGUE_WAIT_S,
    **overrides: object,
) -> RunningServer:
    """A server with the demo model (or what `open_session` loads) whose registry is below `folder`."""
    settings = resolve({**SMALL, "models_folder": folder / "models", **overrides}, {})
    served = ServedModels(open_registry(settings, catalogue_wait_s), settings)
    app = create_app(ModelPool(settings, served, open_session=open_session), served, settings)
    listener = open_socket(settings)
    server = Server(app, settings)
    thread = threading.Thread(target=server.run, args=([listener],), name="test-server", daemon=True)
    url = name_address(listener) if listener.family != socket.AF_UNIX else "http://localhost"
    thread.start()
    running = RunningServer(url, app, server, thread, dataclasses.replace(settings))
    if ready:
        running.wait_ready()
    return running


MakeServer = Callable[..., RunningServer]


@contextmanager
def spawn_server(**settings: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a process `mlxr serve` with `settings`; yields it once it answers, with its address; killed at the end."""
    given = {"arena_bytes": "64M", "threads": 1, **settings}
    own = {f"MLXR_{name.upper()}": str(value) for name, value in given.items()}
    command = [sys.executable, "-m", "mlxr", "serve", "--port", "0", "--log-level", "warning"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **own}) as process:
        assert process.stderr is not None
        started = list(takewhile(lambda line: not line.startswith("ready"), process.stderr))
        address = re.search(r"http://127\.0\.0\.1:\d+", "".join(started))
        try:
            assert address is not None, f"the server does not start: {started}"
            yield process, address[0]
        finally:
            process.kill()


def wait_until(happened: Callable[[], bool]) -> None:
    """Wait until it has happened, which must be sure to come, however slow the machine is."""
    end_s = time.monotonic() + READY_S
    while not happened():
        assert time.monotonic() < end_s, "it never happened"
        time.sleep(0.005)


def read_engine(client: httpx.Client) -> dict[str, Any]:
    """Read the figures of the one loaded model's engine, from between two of its steps."""
    end_s = time.monotonic() + READY_S
    while True:
        (cache,) = client.get("/v1/admin/cache").json()["caches"]
        if not cache["age_s"]:
            return dict(cache["engine"])
        assert time.monotonic() < end_s, "the step does not end"


def used_pages(client: httpx.Client) -> int:
    """Pages that answers of the one loaded model hold."""
    return int(read_engine(client)["used_pages"])


def post_and_leave(running: RunningServer, path: str, body: object, when: Callable[[InFlight], bool]) -> None:
    """Send a request, close the connection once its row is as `when` says, and return when the server has noticed."""
    address = running.url.removeprefix("http://")
    host, _, port = address.rpartition(":")
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {address}\r\nContent-Length: {len(content)}\r\n\r\n"
    with socket.create_connection((host, int(port)), READY_S) as connection:
        connection.sendall(head.encode() + content)
        wait_until(lambda: any(when(row) for row in running.app.state.parts.activity if row.path == path))
    wait_until(lambda: not any(row.path == path for row in running.app.state.parts.activity))
