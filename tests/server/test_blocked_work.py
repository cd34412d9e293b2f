"""Work that hangs holds up nothing else: hubs that never answer, a locked catalogue, disks that take nothing."""

from __future__ import annotations

import sqlite3
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from running_server import MakeServer, RunningServer, start_server, wait_until

from mlxr.cli import top
from mlxr.engine.engine import Engine
from mlxr.engine.sequence import TokenEvent
from mlxr.registry.registry import CATALOGUE_NAME
from mlxr.server.work import MAX_PULLS

sys.path.append(str(Path(__file__).parents[1] / "registry"))
from fake_hub import SlowHub

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
QUICK = ("/v1/models", "/api/tags", "/metrics", "/props", "/v1/admin/info", "/models", "/lora-adapters")


@pytest.fixture(scope="module")
def slow_hub() -> Iterator[SlowHub]:
    hub = SlowHub()
    yield hub
    hub.close()


@pytest.fixture
def here(slow_hub: SlowHub, tmp_path: Path) -> Iterator[RunningServer]:
    running = start_server(tmp_path, hub_url=slow_hub.url, drain_s=0.0, catalogue_wait_s=0.05)
    yield running
    if running.thread.is_alive():
        running.stop()


def assert_answers(client: httpx.Client) -> None:
    for path in QUICK:
        assert client.get(path).status_code == 200, path
    for wanted in ({}, {"model": "demo"}, {"model": "demo:latest"}, {"model": "gpt-4o-mini"}):
        assert client.post("/v1/chat/completions", json={**CHAT, **wanted}).status_code == 200, wanted
    long = {"prompt": "import os\n" * 9000, "max_tokens": 1}
    assert client.post("/v1/completions", json=long).json()["error"]["code"] == "context_length_exceeded"


def test_pulls_from_a_hub_that_never_answers(here: RunningServer, slow_hub: SlowHub) -> None:
    """Other requests are answered meanwhile, pulls beyond the bound are refused, and the server ends."""
    statuses: list[int] = []

    def pull(number: int) -> None:
        with here.client() as client:
            try:
                body = {"model": f"hf.co/a/b{number}", "stream": bool(number % 2)}
                statuses.append(client.post("/api/pull", json=body).status_code)
            except httpx.HTTPError:
                statuses.append(0)  # cut off by the end of the server

    threads = [threading.Thread(target=pull, args=(number,), daemon=True) for number in range(2 * MAX_PULLS)]
    for thread in threads:
        thread.start()
    for _ in range(MAX_PULLS):
        assert slow_hub.asked.acquire(timeout=20)
    wait_until(lambda: len(statuses) == MAX_PULLS)
    assert statuses == [429] * MAX_PULLS
    with here.client() as client:
        refused = client.post("/api/pull", json={"model": "hf.co/a/more"})
        assert refused.json() == {
            "error": f"{MAX_PULLS} pulls are under way, no more may be; wait until one of them has ended, or close the "
            "connection of one, which stops it"
        }
        assert refused.headers["retry-after"] == "5"
        assert_answers(client)
    here.stop()
    for _ in range(MAX_PULLS):
        assert slow_hub.left.acquire(timeout=20), "the sockets to the hub are closed"
    for thread in threads:
        thread.join(20)


def test_a_client_that_leaves_ends_its_pull(here: RunningServer, slow_hub: SlowHub) -> None:
    with here.client() as client, client.stream("POST", "/api/pull", json={"model": "hf.co/a/b"}) as reply:
        assert next(reply.iter_lines()) == '{"status":"pulling manifest"}'
        assert slow_hub.asked.acquire(timeout=20)
    assert slow_hub.left.acquire(timeout=20)
    wait_until(lambda: not here.app.state.parts.work.pulls.busy)


def test_a_catalogue_that_another_process_holds(here: RunningServer) -> None:
    folder = Path(str(here.settings.models_folder))
    with here.client() as client:
        client.post("/api/create", json={"model": "mine", "from": "demo", "stream": False}).raise_for_status()
        with closing(sqlite3.connect(folder / CATALOGUE_NAME, isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")

            def copy(number: int) -> httpx.Response:
                return client.post("/api/copy", json={"source": "mine", "destination": f"copy{number}"})

            with ThreadPoolExecutor(12) as clients:
                waiting = [clients.submit(copy, number) for number in range(24)]
                assert_answers(client)
                replies = [future.result() for future in waiting]
        assert {reply.status_code for reply in replies} == {503}
        assert all("catalogue of models is held" in reply.json()["error"] for reply in replies)
        assert client.post("/api/copy", json={"source": "mine", "destination": "after"}).status_code == 200


def test_loaded_models_answer_where_the_catalogue_cannot_be_read(here: RunningServer) -> None:
    """Also by names that no request has used before."""
    path = Path(str(here.settings.models_folder)) / CATALOGUE_NAME
    with here.client() as client:
        client.post("/api/create", json={"model": "mine", "from": "demo", "stream": False}).raise_for_status()
        assert client.post("/v1/chat/completions", json={**CHAT, "model": "mine"}).status_code == 200
        path.write_bytes(b"no database at all" * 100)
        here.app.state.parts.pool.refresh()
        for name in ("mine", "mine:latest", "MINE", "demo"):
            assert client.post("/v1/chat/completions", json={**CHAT, "model": name}).status_code == 200, name
        assert client.get("/api/tags").status_code == 503
        assert client.post("/api/chat", json={"model": "other", **CHAT}).status_code == 503


def test_a_folder_that_takes_nothing(make_server: MakeServer, tmp_path: Path) -> None:
    """The server starts, lists and answers; only writes are refused, with a remedy."""
    first = make_server()
    with first.client() as client:
        client.post("/api/create", json={"model": "mine", "from": "demo", "stream": False}).raise_for_status()
    first.stop()
    folder = Path(str(first.settings.models_folder))
    (folder / f"{CATALOGUE_NAME}-shm").mkdir()  # so that SQLite cannot write, whoever runs this
    second = start_server(folder.parent, default_model="mine")
    with second.client() as client:
        assert_answers(client)
        assert {model["name"] for model in client.get("/api/tags").json()["models"]} >= {"mine:latest"}
        assert client.post("/api/show", json={"model": "mine"}).status_code == 200
        refused = client.post("/api/copy", json={"source": "mine", "destination": "other"})
        assert refused.status_code == 507
        assert "models_folder" in refused.json()["error"]
    second.stop()


def test_a_long_step_holds_up_no_figures(here: RunningServer) -> None:
    """Figures for `top`, the page and /metrics come while the engine computes, and say how old they are."""
    (model,) = here.app.state.parts.pool.running()
    entered, opened = threading.Event(), threading.Event()

    def hold(engine: Engine) -> None:
        step = engine.step

        def wait() -> list[TokenEvent]:
            entered.set()
            assert opened.wait(60)
            return step()

        monkeypatch.setattr(engine, "step", wait)

    with pytest.MonkeyPatch.context() as monkeypatch, here.client() as client, ThreadPoolExecutor(1) as threads:
        model.session.engine.call(hold)
        answer = threads.submit(client.post, "/v1/chat/completions", json=CHAT)
        try:
            assert entered.wait(60)
            before = top.look(here.settings, here.url)
            now = top.look(here.settings, here.url)
            (row,) = now.caches.values()
            assert (row["engine"]["prefill_tokens"], row["age_s"] > 0) == (0, True)
            assert [row["model"] for row in now.requests] == ["demo:latest"]
            assert client.get("/metrics").status_code == 200
            old = replace(now, caches={"demo:latest": {**row, "age_s": 4.2}})
            lines = top.render(old, before, here.url, 100)
            assert "the engine of demo computes a long step; its figures are 4 s old" in lines
            assert top.describe(now, now)["models"][0]["tokens_per_s"] is None, "nothing new is no speed"
        finally:
            opened.set()
        assert answer.result().status_code == 200
        (row,) = top.look(here.settings, here.url).caches.values()
        assert (row["age_s"], row["engine"]["prefill_tokens"] > 0) == (0, True)
