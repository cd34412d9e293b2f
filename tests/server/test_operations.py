"""Events around answers: clients that go, deadlines, full queues, draining, failures, admin, logs."""

from __future__ import annotations

import io
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
from gated_model import Gate
from running_server import MakeServer, RunningServer, post_and_leave, used_pages, wait_until

from mlxr.core.settings import Settings, resolve
from mlxr.core.types import PromptProgress
from mlxr.registry import Changes, ModelRecord
from mlxr.server import activity
from mlxr.server.activity import start_logging
from mlxr.service.model_pool import open_session
from mlxr.service.session import Session

LONG = {"model": "demo", "prompt": "import os\n", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
WAIT_S = 60.0


def ask_in_thread(running: RunningServer, body: dict[str, object]) -> tuple[threading.Thread, list[httpx.Response]]:
    """Send a request from another thread; its response appears in the list."""
    responses: list[httpx.Response] = []

    def ask() -> None:
        with running.client() as client:
            responses.append(client.post("/v1/completions", json=body))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    return thread, responses


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()


@pytest.fixture
def gated(gate: Gate, make_server: MakeServer) -> Iterator[RunningServer]:
    yield make_server(open_session=gate.open_session, drain_s=30)
    gate.open()


def test_a_stream_whose_client_goes_gives_its_pages_back_within_one_step(gate: Gate, gated: RunningServer) -> None:
    with gated.client() as client, gated.client() as other:
        with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
            gate.let(5)
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            wait_until(lambda: gate.steps == 5)
            assert response.status_code == 200
        wait_until(lambda: not any(row.path == "/v1/completions" for row in gated.app.state.parts.activity))
        gate.let(1)  # the step that was under way
        assert used_pages(other) == 0
        assert gate.steps <= 6


def test_a_whole_answer_whose_client_goes_is_cancelled(gate: Gate, gated: RunningServer) -> None:
    with gated.client() as client:
        post_and_leave(gated, "/v1/completions", LONG, lambda row: row.prompt_tokens > 0)
        gate.let(2)
        assert used_pages(client) == 0
        assert gate.steps <= 2


def test_a_client_that_goes_while_the_model_is_loaded(make_server: MakeServer) -> None:
    may_load = threading.Event()

    def load_slowly(record: ModelRecord, settings: Settings, memory_bytes: int) -> Session:
        assert may_load.wait(WAIT_S)
        return open_session(record, settings, memory_bytes)

    running = make_server(open_session=load_slowly, ready=False)
    with running.client() as client:
        post_and_leave(running, "/v1/completions", LONG, lambda row: True)
        assert client.get("/health/ready").status_code == 503
        may_load.set()
        running.wait_ready()
        assert used_pages(client) == 0
        assert client.post("/v1/completions", json={**LONG, "max_tokens": 2}).status_code == 200
        assert client.delete("/v1/admin/models/demo:latest").status_code == 200  # nobody holds it any more


def test_an_answer_can_be_ended_by_its_id(gate: Gate, gated: RunningServer) -> None:
    with gated.client() as client, gated.client() as admin:
        headers = {"x-request-id": "long-one"}
        body = {**LONG, "stream": True}
        with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            gate.let(3)
            lines = response.iter_lines()
            next(lines)
            wait_until(lambda: gate.steps == 3)
            (row,) = [row for row in admin.get("/v1/admin/requests").json()["requests"] if row["id"] == "long-one"]
            assert row["model"] == "demo:latest"
            assert row["prompt_tokens"] > 0
            assert admin.delete("/v1/admin/requests/long-one").json() == {"status": "ok"}
            gate.let(1)
            assert "cancelled" in "".join(lines)
        assert used_pages(admin) == 0


def test_a_full_queue_is_told_with_the_time_to_come_back(gate: Gate, make_server: MakeServer) -> None:
    running = make_server(open_session=gate.open_session, max_sequences=1, max_waiting=1)
    gate.on_step = lambda number: time.sleep(0.05)  # so 20 seconds for what follows; then it goes on at full speed
    gate.open()
    first, first_responses = ask_in_thread(running, LONG)
    with running.client() as client:
        wait_until(lambda: used_pages(client) > 0)
        second, second_responses = ask_in_thread(running, {**LONG, "max_tokens": 2})
        wait_until(lambda: sum(row.prompt_tokens > 0 for row in running.app.state.parts.activity) == 2)
        response = client.post("/v1/completions", json=LONG)
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        assert first.is_alive()
        gate.on_step = lambda number: None
        for thread, responses in ((first, first_responses), (second, second_responses)):
            thread.join(WAIT_S)
            assert responses[0].status_code == 200


def test_a_deadline_ends_an_answer(gate: Gate, make_server: MakeServer) -> None:
    running = make_server(open_session=gate.open_session, request_deadline_s=0.2)
    gate.on_step = lambda number: time.sleep(0.05)
    gate.open()
    with running.client() as client:
        response = client.post("/v1/completions", json=LONG)
        assert response.status_code == 504
        assert used_pages(client) == 0


def test_a_step_that_fails_ends_its_answers_and_no_others(gate: Gate, gated: RunningServer) -> None:
    def fail(number: int) -> None:
        if number == 3:
            raise RuntimeError("broken on purpose")

    gate.on_step = fail
    gate.open()
    with gated.client() as client:
        with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
            text = "".join(response.iter_lines())
        assert response.status_code == 200
        assert "error" in text
        assert "[DONE]" not in text.split("error")[-1]
        assert used_pages(client) == 0
        assert client.post("/v1/completions", json={**LONG, "max_tokens": 3}).status_code == 200


def test_what_is_under_way_is_finished_when_the_server_ends(gate: Gate, gated: RunningServer) -> None:
    thread, responses = ask_in_thread(gated, {**LONG, "max_tokens": 8})
    gate.let(2)
    wait_until(lambda: gate.steps == 2)
    gated.server.should_exit = True
    wait_until(lambda: gated.app.state.parts.lifecycle.is_draining)
    gate.open()
    thread.join(WAIT_S)
    assert responses[0].status_code == 200
    assert responses[0].json()["usage"]["completion_tokens"] == 8
    gated.stop()
    with gated.client() as client, pytest.raises(httpx.ConnectError):
        client.get("/health")


def test_what_takes_longer_than_the_drain_is_ended_with_what_it_has(gate: Gate, make_server: MakeServer) -> None:
    running = make_server(open_session=gate.open_session, drain_s=0.2)
    gate.on_step = lambda number: time.sleep(0.05)
    gate.open()
    with running.client() as client:
        with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            running.server.should_exit = True
            rest = "".join(lines)
        assert "cancelled" in rest  # all of it would have taken 20 seconds
    running.stop()


def test_who_waits_for_a_model_is_told_when_the_drain_is_over(make_server: MakeServer) -> None:
    may_load, loads = threading.Event(), []

    def load_slowly(record: ModelRecord, settings: Settings, memory_bytes: int) -> Session:
        loads.append(record.name)
        if record.name != "demo:latest":
            assert may_load.wait(WAIT_S)
        return open_session(record, settings, memory_bytes)

    running = make_server(open_session=load_slowly, drain_s=0.2)
    first, responses = ask_in_thread(running, {**LONG, "model": "demo-draft"})
    wait_until(lambda: "demo-draft:latest" in loads)
    running.server.should_exit = True
    first.join(WAIT_S)
    assert responses[0].status_code == 503
    assert responses[0].json()["error"]["code"] == "stopping"
    may_load.set()
    running.stop()


def test_a_request_that_never_comes_whole_does_not_hold_up_the_end(
    make_server: MakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    running = make_server(drain_s=0)
    running.server.config.timeout_graceful_shutdown = 1
    host, _, port = running.url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), WAIT_S) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        wait_until(lambda: len(running.app.state.parts.activity) == 1)
        running.stop()
    assert len(running.app.state.parts.activity) == 0
    assert "Traceback" not in caplog.text


def test_a_client_that_goes_before_its_body_is_whole_is_no_failure(
    running: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    host, _, port = running.url.removeprefix("http://").rpartition(":")
    caplog.set_level(logging.INFO, "mlxr")
    with socket.create_connection((host, int(port)), WAIT_S) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        wait_until(lambda: any(row.path == "/v1/completions" for row in running.app.state.parts.activity))
    wait_until(lambda: any(getattr(record, "fields", {}).get("status") == 499 for record in caplog.records))
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


def test_a_draining_server_takes_nothing_new(make_server: MakeServer) -> None:
    running = make_server()
    with running.client() as client:
        running.app.state.parts.lifecycle.begin_drain()
        response = client.post("/tokenize", json={"content": "x"})
        assert response.status_code == 503
        assert "being stopped" in response.json()["error"]["message"]
        assert client.get("/health/ready").status_code == 503
        assert client.get("/health/live").status_code == 200


def test_a_request_is_logged_without_what_it_asks(client: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mlxr")
    body = {"model": "demo", "prompt": "a secret thing", "max_tokens": 2, "ignore_eos": True}
    request_id = client.post("/v1/completions", json=body).headers["x-request-id"]
    wait_until(lambda: any(getattr(record, "fields", {}).get("request_id") == request_id for record in caplog.records))
    lines = [record.fields for record in caplog.records if record.name == "mlxr.access"]  # type: ignore[attr-defined]
    (fields,) = [fields for fields in lines if fields["request_id"] == request_id]
    assert (fields["method"], fields["path"], fields["status"]) == ("POST", "/v1/completions", 200)
    assert fields["model"] == "demo:latest"
    assert fields["tokens"] == 2
    assert fields["first_token_ms"] <= fields["ms"]
    assert "secret" not in caplog.text + str([record.__dict__ for record in caplog.records])


def test_the_reading_of_a_long_prompt_is_logged(
    make_server: MakeServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is logged only for long ones, only once within the interval, and the client sees it only if it asked."""
    caplog.set_level(logging.INFO, "mlxr")
    server = make_server(prefill_chunk_tokens=32)
    body = {"model": "demo", "prompt": [5] * 200, "max_tokens": 2, "cache_prompt": False}

    def list_rows() -> list[dict[str, Any]]:
        return [vars(record)["fields"] for record in caplog.records if record.name == "mlxr.prompts"]

    with server.client() as client:

        def ask() -> list[dict[str, Any]]:
            caplog.clear()
            reply = client.post("/v1/completions", json={**body, "stream": True})
            assert "prompt_progress" not in reply.text
            rows = list_rows()
            assert {row["request_id"] for row in rows} <= {reply.headers["x-request-id"]}
            return rows

        assert ask() == []
        monkeypatch.setattr(activity, "READING_S", 0.0)
        rows = ask()
        assert [row["read_tokens"] for row in rows if row["read_tokens"]] == [32, 64, 96, 128, 160, 192]
        for row in rows[1:]:
            rest, rate = 200 - int(str(row["read_tokens"])), float(str(row["tokens_per_s"]))
            assert (row["model"], row["prompt_tokens"], row["rest_s"]) == ("demo:latest", 200, round(rest / rate))
    row = activity.InFlight("id", "POST", "/", "local", AsyncExitStack(), model="m")
    monkeypatch.setattr(activity, "READING_S", 10.0)
    clock = iter([100.0, 105.0, 111.0, 130.0])
    monkeypatch.setattr(activity, "monotonic", lambda: next(clock))
    caplog.clear()
    for read_tokens, seconds in ((300, 20.0), (600, 25.0), (700, 31.0), (1000, 50.0)):
        activity.log_reading(row, PromptProgress(1000, 100, read_tokens, seconds))
    first, second = list_rows()  # beside the line of the request before, which may come as late
    assert (first["read_tokens"], first["tokens_per_s"], first["rest_s"]) == (300, 10.0, 70)
    assert (second["read_tokens"], second["tokens_per_s"], second["rest_s"]) == (700, 19.4, 16)


def test_reasons_quote_no_conversation(make_server: MakeServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mlxr")
    running = make_server()
    registry = running.app.state.parts.registry
    changes = Changes(template="{{ raise_exception('no ' + messages[0].content) }}")
    registry.derive("strict", registry.get("demo"), changes)
    with running.client() as client:
        chat = {"model": "strict", "messages": [{"role": "user", "content": "a secret thing"}]}
        refused = client.post("/v1/chat/completions", json=chat)
        assert (refused.status_code, "no a secret thing" in refused.text) == (400, True)
        refused = client.post("/v1/completions", json={"model": "demo", "prompt": [1, "a secret thing"]})
        assert refused.status_code == 400
        wait_until(lambda: len([record for record in caplog.records if record.name == "mlxr.access"]) == 2)
    assert "secret" not in caplog.text + str([record.__dict__ for record in caplog.records])


@pytest.mark.parametrize(
    ("method", "path", "options", "error", "reason"),
    [
        ("GET", "/", {"headers": {"host": "a.example"}}, "forbidden", "the host name 'a.example' is not allowed"),
        ("GET", "/", {"headers": {"origin": "http://b"}}, "forbidden", "the origin 'http://b' is not allowed"),
        (
            "OPTIONS",
            "/v1/models",
            {"headers": {"origin": "http://b", "access-control-request-method": "GET"}},
            "forbidden",
            "add it to the setting cors_origins",
        ),
        ("GET", "/nowhere", {}, "not_found", "there is no route /nowhere"),
        ("POST", "/v1/completions", {"json": {"prompt": 3}}, "invalid_request", "prompt: "),
        ("POST", "/api/chat", {"json": {"model": "none", "messages": []}}, "not_found", "'none'"),
    ],
)
def test_a_refused_request_is_logged_with_its_reason(
    method: str,
    path: str,
    options: dict[str, object],
    error: str,
    reason: str,
    client: httpx.Client,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "mlxr")
    tag = client.request(method, path, **options).headers["x-request-id"]  # type: ignore[arg-type]

    def find_line() -> list[dict[str, str]]:
        lines = [getattr(record, "fields", {}) for record in caplog.records]
        return [line for line in lines if line.get("request_id") == tag]

    wait_until(lambda: bool(find_line()))
    (line,) = find_line()
    assert line["error"] == error
    assert reason in line["reason"]


def test_who_only_watches_is_not_logged(client: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mlxr")
    paths = ("/health", "/health/live", "/health/ready", "/metrics", "/v1/admin/models")
    ids = [
        client.get(path, headers={"x-request-id": f"watch-{number}"}).headers["x-request-id"]
        for number, path in enumerate(paths)
    ]

    def logged() -> list[str]:
        found = [getattr(record, "fields", {}).get("request_id") for record in caplog.records]
        return [request_id for request_id in found if request_id in ids]

    wait_until(lambda: ids[-1] in logged())
    assert logged() == ids[-1:]


def test_prompts_are_logged_when_asked_for(make_server: MakeServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mlxr")
    with make_server(log_prompts=True).client() as client:
        client.post("/v1/completions", json={"model": "demo", "prompt": "a secret thing", "max_tokens": 1})
    (record,) = [record for record in caplog.records if record.name == "mlxr.prompts"]
    assert record.fields["prompt"] == "a secret thing"  # type: ignore[attr-defined]


@pytest.fixture
def own_logging() -> Iterator[None]:
    """Loggers as they were, whatever the test does to them."""
    loggers = [logging.getLogger(name) for name in ("mlxr", "uvicorn.error")]
    before = [(logger.handlers, logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.mark.usefixtures("own_logging")
@pytest.mark.parametrize("form", ["text", "json"])
def test_lines_cannot_be_forged(form: str) -> None:
    stream = io.StringIO()
    start_logging(resolve({"log_format": form}, {}), stream)
    fields = {"path": "/x\n12:00 info forged\x1b[31m"}
    logging.getLogger("mlxr.access").info("request", extra={"fields": fields})
    logging.getLogger("mlxr.access").debug("not shown")
    (line,) = stream.getvalue().splitlines()
    assert "\x1b" not in line
    if form == "json":
        assert json.loads(line)["path"] == fields["path"]
        assert json.loads(line)["level"] == "info"
