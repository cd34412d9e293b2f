"""Connections of a server: their bound, which ones it closes for others, and its log when descriptors run short."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from running_server import RunningServer, start_server, wait_until

from mlxr.server.listen import (
    COMPLAINT_S,
    FULL,
    MAX_CONNECTIONS,
    SeldomComplaints,
    TimedProtocol,
    count_connections,
    raise_descriptor_limit,
)

HEALTH = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
SLOW_BODY = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    running = start_server(tmp_path_factory.mktemp("narrow"), drain_s=0.0)
    running.server.connections.most = 4
    yield running
    running.stop()


@pytest.fixture
def narrow(started: RunningServer) -> RunningServer:
    """A server that has four connections, all of them free."""
    wait_until(lambda: not len(started.server.connections))
    return started


def connect(server: RunningServer) -> socket.socket:
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    return socket.create_connection((host, int(port)), 20)


def ask(connection: socket.socket, request: bytes = HEALTH) -> bytes:
    connection.sendall(request)
    received = b""
    while not received.endswith(b"}"):
        received += connection.recv(1 << 16)
    return received


def test_who_says_nothing_makes_room_for_who_asks(narrow: RunningServer) -> None:
    counted = narrow.server.connections
    with ExitStack() as stack:
        silent = [stack.enter_context(connect(narrow)) for _ in range(3)]
        wait_until(lambda: len(counted) == 3)
        used = stack.enter_context(connect(narrow))
        assert ask(used).startswith(b"HTTP/1.1 200")
        for round_number in range(3):
            late = stack.enter_context(connect(narrow))
            assert ask(late).startswith(b"HTTP/1.1 200")
            assert silent[round_number].recv(1) == b"", "the one that waited longest was closed"
            assert len(counted) == 4
        assert ask(used).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("begun", [b"", b"POST /v1", SLOW_BODY])
def test_a_flood_of_half_requests_takes_no_place_of_who_has_asked(narrow: RunningServer, begun: bytes) -> None:
    with ExitStack() as stack:
        used = stack.enter_context(connect(narrow))
        assert ask(used).startswith(b"HTTP/1.1 200")
        for _ in range(9):
            flood = stack.enter_context(connect(narrow))
            flood.sendall(begun)
            assert ask(stack.enter_context(connect(narrow))).startswith(b"HTTP/1.1 200"), "a new one finds a place"
            assert ask(used).startswith(b"HTTP/1.1 200")


def test_where_all_are_answered_one_more_is_told_so(narrow: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, ExitStack() as stack:
        patch.setattr(TimedProtocol, "is_answered", True)
        for number in range(4):
            stack.enter_context(connect(narrow))
            wait_until(lambda number=number: len(narrow.server.connections) == number + 1)
        refused = stack.enter_context(connect(narrow))
        assert refused.recv(1 << 16) == FULL
        assert refused.recv(1) == b""
    wait_until(lambda: not len(narrow.server.connections))
    with connect(narrow) as connection:
        assert ask(connection).startswith(b"HTTP/1.1 200")


def test_a_request_with_two_lengths_ends_its_connection(narrow: RunningServer) -> None:
    request = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"0\r\n\r\n"
    )
    with connect(narrow) as connection:
        connection.sendall(request + HEALTH)
        received = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert received.count(b"HTTP/1.1 ") == 1
    assert b"connection: close" in received.lower()


def test_a_lack_of_descriptors_is_told_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    tell = SeldomComplaints(lambda: now[0])
    lack = {"message": "socket.accept() out of system resource", "exception": OSError(24, "Too many open files")}
    loop = asyncio.new_event_loop()
    with caplog.at_level(logging.WARNING, logger="mlxr.server.listen"):
        for second in range(int(COMPLAINT_S) + 1):
            now[0] = float(second)
            for _ in range(100):
                tell(loop, lack)
    loop.close()
    assert [record.getMessage() for record in caplog.records] == [
        "no connection can be taken: [Errno 24] Too many open files; raise the limit of open files (ulimit -n)"
    ] * 2


def test_connections_leave_descriptors_for_everything_else() -> None:
    assert [count_connections(limit) for limit in (64, 256, 1024, 1 << 20)] == [32, 128, 896, MAX_CONNECTIONS]
    program = (
        "import resource\n"
        "from mlxr.server.listen import raise_descriptor_limit\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 200))\n"
        "assert raise_descriptor_limit() == 200 == resource.getrlimit(resource.RLIMIT_NOFILE)[0]\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)
    assert raise_descriptor_limit() == raise_descriptor_limit()


def test_a_server_that_is_told_to_end_while_it_starts_ends_well() -> None:
    program = (
        "import os, signal\n"
        "from mlxr.core.processes import end_on_terminate\n"
        "end_on_terminate()\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "raise SystemExit(5)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)
