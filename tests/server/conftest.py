"""A server with the demo model for all tests of the session, and others with settings of their own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from running_server import MakeServer, RunningServer, start_server


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The server that all tests share; its model is `demo`, and names that no model has are refused."""
    folder = tmp_path_factory.mktemp("registry")
    server = start_server(folder, strict_model_names=True, default_model="demo")  # whatever tests add
    yield server
    server.stop()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--cluster"):
        for item in items:
            for mark in item.iter_markers("one_server"):
                item.add_marker(pytest.mark.skip(reason=f"one server: {mark.args[0]}"))


@pytest.fixture(scope="session")
def server(running: RunningServer, request: pytest.FixtureRequest) -> Iterator[str]:
    """Base address of the shared server; with `--cluster`, of a cluster over the same registry."""
    replicas = request.config.getoption("--cluster")
    if not replicas:
        yield running.url
        return
    sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
    from cluster_process import ClusterProcess

    folder = Path(running.settings.models_folder).parent
    flags = ("--threads", "1", "--arena-bytes", "64M", "--strict-model-names", "true")
    with ClusterProcess(folder, "demo", replicas, flags) as cluster:
        yield cluster.url


@pytest.fixture
def client(server: str) -> Iterator[httpx.Client]:
    """An HTTP client of the shared server."""
    with httpx.Client(base_url=server, timeout=60) as client:
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
