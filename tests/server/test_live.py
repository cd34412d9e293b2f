"""The live stream: a snapshot, then changes that add up; one model or another; bounds; no work without watchers."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator

import httpx
import pytest
from live_client import follow, watch
from live_view import LiveView
from running_server import MakeServer, RunningServer, read_engine, start_server, wait_until

QUESTION = {
    "messages": [{"role": "user", "content": "What does os.path.join do? " * 8}],
    "max_tokens": 300,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server whose cache also writes to disk."""
    folder = tmp_path_factory.mktemp("watched")
    server = start_server(folder, store_bytes="8M", store_folder=folder / "pages", live_watchers=2)
    yield server
    server.stop()


def ask(server: RunningServer, **options: object) -> threading.Thread:
    """A question on a thread of its own."""

    def post() -> None:
        with server.client() as client:
            client.post("/v1/chat/completions", json={**QUESTION, **options})

    thread = threading.Thread(target=post)
    thread.start()
    return thread


def has_ended(view: LiveView) -> bool:
    return any(entry["kind"] == "ended" for entry in view.log) and not view.rows


def test_who_asks_for_the_head_alone_watches_nothing(watched: RunningServer) -> None:
    with watched.client() as client:
        for _ in range(4):  # more than may watch; all on one connection, which is free again at once
            reply = client.head("/v1/admin/live")
            assert (reply.status_code, reply.content) == (200, b"")
            assert reply.headers["content-type"].startswith("text/event-stream")
        assert client.get("/health").status_code == 200


def test_an_answer_as_it_is_watched(watched: RunningServer) -> None:
    with watched.client() as client, watch(client) as events:
        event, data = next(events)
        assert event == "snapshot"
        assert data["model"]["name"] == "demo:latest"
        assert data["models"] == ["demo:latest"]
        view = LiveView()
        view.apply(event, data)
        before = view.counters.copy()
        asking = ask(watched)
        seen_rows = False
        for event, data in events:
            view.apply(event, data)
            seen_rows = seen_rows or bool(view.rows)
            if has_ended(view) and view.store is not None and not view.store["queued_pages"]:
                break
        asking.join()
        assert seen_rows
        assert next((entry["kind"], entry["reason"]) for entry in view.log) == ("started", "new")
        added = view.counters - before
        assert sum(step["steps"] for step in view.steps) == added["steps"] > 0
        assert sum(step["decode_tokens"] for step in view.steps) == added["decode_tokens"] > 0
        assert sum(step["prefill_tokens"] for step in view.steps) == added["prefill_tokens"]
        assert all(step["read_bytes"] > 10**7 * step["steps"] for step in view.steps)
        engine = read_engine(client)
        assert view.codes[0].count(0) == engine["free_pages"]
        assert sum(code % 4 == 3 for code in view.codes[0]) == engine["cached_pages"] > 0
        assert sum(code // 4 == 2 for code in view.codes[0]) == engine["cached_pages"], "all of them are on disk"
        assert view.store is not None
        assert view.store["entries"] == engine["cache"]["store"]["entries"]


def test_the_metrics_tell_the_same(watched: RunningServer) -> None:
    with watched.client() as client, watch(client) as events:
        ask(watched).join()
        view = follow(events, has_ended)
        text = client.get("/metrics").text
        told = dict(re.findall(r'mlxr_engine_total{model="demo:latest",what="(\w+)"} (\S+)', text))
        assert len(told) == 11
        assert {name: float(number) for name, number in told.items()} == {name: view.counters[name] for name in told}
        found = dict(re.findall(r'mlxr_prefix_tokens_total{model="demo:latest",where="(\w+)"} (\S+)', text))
        names = {"memory": "memory_hit", "disk": "disk_hit", "peer": "peer_hit", "missed": "missed"}
        assert {names[where]: float(number) for where, number in found.items()} == {
            name: view.counters[f"{name}_tokens"] for name in names.values()
        }
        for (operator, implementation, variant), calls in view.calls.items():
            labels = f'implementation="{implementation}",model="demo:latest",operator="{operator}",variant="{variant}"'
            assert f"mlxr_dispatches_total{{{labels}}} {float(calls)}" in text


def test_refusals_are_in_the_log(watched: RunningServer) -> None:
    with watched.client() as client, watch(client) as events:
        next(events)
        with watched.client() as other:
            other.post("/v1/chat/completions", json={**QUESTION, "temperature": -1})
        view = LiveView()
        for _, data in events:
            view.log += data.get("log", [])
            if view.log:
                break
        (entry,) = view.log
        assert (entry["kind"], entry["reason"]) == ("refused", "invalid_request")
        assert "temperature" in entry["text"]


def test_a_page_in_full(watched: RunningServer) -> None:
    with watched.client() as client:
        ask(watched).join()
        pages = [client.get(f"/v1/admin/pages/{page}").json() for page in range(4)]
        (first,) = [page for page in pages if page["place"] == 0]
        assert first["holder"] == "cached"
        assert first["references"] == 0
        for wrong in ("682", "-1", "x", "9" * 30):
            assert client.get(f"/v1/admin/pages/{wrong}").status_code == 404
        assert client.get("/v1/admin/pages/0", params={"group": "1"}).status_code == 404
        assert client.get("/v1/admin/pages/0", params={"model": "nothing"}).status_code == 404


def test_watchers_are_counted(watched: RunningServer) -> None:
    with watched.client() as one, watched.client() as two, watch(one) as first:
        next(first)
        with watch(two) as second:
            next(second)
            with watched.client() as third:
                refused = third.get("/v1/admin/live")
                assert refused.status_code == 429
                assert "live_watchers" in refused.json()["error"]["message"]
        wait_until(lambda: watched.app.state.parts.live.watchers == 1)
        with watched.client() as third, watch(third) as again:
            assert next(again)[0] == "snapshot"


def test_nothing_is_recorded_when_nobody_watches(watched: RunningServer) -> None:
    live = watched.app.state.parts.live
    (model,) = watched.app.state.parts.pool.running()
    engine = model.session._engine._worker._engine
    with watched.client() as client, watch(client) as events:
        next(events)
        assert engine.live.record is not None
        assert engine.cache.groups[0].pager.notes is not None
    wait_until(lambda: engine.live.record is None)
    wait_until(lambda: live._task is None and not live._channels)
    assert engine.cache.groups[0].pager.notes is None
    assert engine._scheduler.preempted is None
    assert engine.cache.store.touched is None


def test_watching_loads_no_model_and_sees_it_come_and_go(make_server: MakeServer) -> None:
    server = make_server()
    with server.client() as client, watch(client, model="demo") as events:
        assert next(events)[1]["model"]["name"] == "demo:latest"
        with server.client() as other:
            other.delete("/v1/admin/models/demo")
            event, data = next(events)
            assert (event, data["model"], data["models"], data["groups"]) == ("snapshot", None, [], [])
            other.post("/tokenize", json={"content": "x"})
            event, data = next(events)
            assert (event, data["model"]["name"]) == ("snapshot", "demo:latest")
    with server.client() as client:
        assert client.get("/v1/admin/live", params={"model": "nothing"}).status_code == 404


def test_a_key_is_needed(make_server: MakeServer) -> None:
    server = make_server(api_keys=("secret",))
    with server.client() as client:
        assert client.get("/v1/admin/live").status_code == 401
        assert client.get("/v1/admin/pages/0").status_code == 401
    with server.client("secret") as client, watch(client) as events:
        assert next(events)[0] == "snapshot"


def test_nobody_may_watch(make_server: MakeServer) -> None:
    with make_server(live_watchers=0).client() as client:
        assert client.get("/v1/admin/live").status_code == 429


def test_streams_end_with_the_server(make_server: MakeServer) -> None:
    server = make_server(drain_s=30)
    with server.client() as client, watch(client) as events:
        next(events)
        server.stop()
        assert not list(events)


def test_a_stream_can_be_ended_from_outside(watched: RunningServer) -> None:
    with watched.client() as client, client.stream("GET", "/v1/admin/live", headers={"x-request-id": "mine"}) as reply:
        lines = reply.iter_lines()
        next(lines)
        httpx.delete(f"{watched.url}/v1/admin/requests/mine")
        assert list(lines)[-1] == ""


@pytest.mark.slow
def test_what_the_machine_can_do_is_measured_when_somebody_asks(watched: RunningServer) -> None:
    with watched.client() as client, watch(client) as events:
        _, data = next(events)
        assert data["limits"] is None
        assert "POST /v1/admin/probe" in data["limits_hint"]
        with watched.client() as other:
            measured = other.post("/v1/admin/probe", params={"model": "demo"}).json()
        assert measured["read_bytes_per_s"] > 10**8
        assert next(data["limits"] for _, data in events if data.get("limits")) == measured
        with watched.client() as other, watch(other) as again:
            _, data = next(again)
            assert (data["limits"], data["limits_hint"]) == (measured, None)
