"""A server with the demo model for all tests of the session, and others with settings of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from running_server import MakeServer, RunningServer, start_server


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The server that all tests share; its model is `demo`, and names that no model has are refused."""
    server = start_server(tmp_path_factory.mktemp("registry"), strict_model_names=True)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def server(running: RunningServer) -> str:
    """Base address of the shared server."""
    return running.url


@pytest.fixture
def client(running: RunningServer) -> Iterator[httpx.Client]:
    """An HTTP client of the shared server."""
    with running.client() as client:
        yield client


@pytest.fixture
def make_server(tmp_path: Path) -> Iterator[MakeServer]:
    """Servers with special settings, for one test."""
    made: list[RunningServer] = []

    def make(**options: object) -> RunningServer:
        made.append(start_server(tmp_path / f"server-{len(made)}", **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for server in made:
        if server.thread.is_alive():
            server.stop()
