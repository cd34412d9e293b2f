"""The answers of a client that leaves end, whatever it asked for; one that stays gets errors in its dialect."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from gated_model import Gate
from running_server import MakeServer, RunningServer, post_and_leave, used_pages, wait_until

MESSAGES = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, tuple[str, dict[str, object]]] = {
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 400, "n": 3, "ignore_eos": True}),
    "texts": ("/v1/completions", {"prompt": ["a", "b", "c"], "max_tokens": 400, "n": 2, "ignore_eos": True}),
    "response": ("/v1/responses", {"input": "Hi", "max_output_tokens": 400, "ignore_eos": True}),
    "message": ("/v1/messages", {"model": "demo", "messages": MESSAGES, "max_tokens": 400, "temperature": 0}),
}


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()


@pytest.fixture
def gated(gate: Gate, make_server: MakeServer) -> Iterator[RunningServer]:
    yield make_server(open_session=gate.open_session, drain_s=30)
    gate.open()


@pytest.mark.parametrize("kind", BODIES)
def test_a_stream_that_is_left(gate: Gate, gated: RunningServer, kind: str) -> None:
    path, body = BODIES[kind]
    with gated.client() as client, gated.client() as other:
        gate.let(4)  # before the request, as later texts of several start between two steps
        with client.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200
            wait_until(lambda: gate.steps == 4)
        wait_until(lambda: not any(row.path == path for row in gated.app.state.parts.activity))
        gate.let(1)
        assert used_pages(other) == 0


@pytest.mark.parametrize("kind", BODIES)
def test_an_answer_that_nobody_waits_for(gate: Gate, gated: RunningServer, kind: str) -> None:
    path, body = BODIES[kind]
    gate.let(1)  # the first of several texts is computed before the others are there
    with gated.client() as client:
        post_and_leave(gated, path, body, lambda row: row.prompt_tokens > 0)
        gate.let(2)
        assert used_pages(client) == 0
        assert gate.steps <= 4


def test_vectors_that_nobody_waits_for(gate: Gate, gated: RunningServer) -> None:
    with gated.client() as client:
        body = {"input": ["a", "b", "c"] * 50}
        post_and_leave(gated, "/v1/embeddings", body, lambda row: row.prompt_tokens > 0)
        gate.let(2)
        assert used_pages(client) == 0


@pytest.mark.parametrize(
    ("kind", "mark"),
    [
        ("chat", '"code":"server_error"'),
        ("texts", '"code":"server_error"'),
        ("response", "event: response.failed\n"),
        ("message", 'event: error\ndata: {"type":"error","error":{"type":"api_error"'),
    ],
)
def test_a_stream_that_fails_says_so_at_its_end(gate: Gate, gated: RunningServer, kind: str, mark: str) -> None:
    def fail(number: int) -> None:
        if number == 4:
            raise RuntimeError("broken on purpose")

    gate.on_step = fail
    gate.open()
    path, body = BODIES[kind]
    with gated.client() as client:
        reply = client.post(path, json={**body, "stream": True})
        assert reply.status_code == 200
        last = reply.text.strip().split("\n\n")[-1]
        assert mark in last
        assert "broken on purpose" in last


@pytest.mark.parametrize("kind", BODIES)
def test_an_answer_that_fails_is_an_error(gate: Gate, gated: RunningServer, kind: str) -> None:
    def fail(number: int) -> None:
        raise RuntimeError("broken on purpose")

    gate.on_step = fail
    gate.open()
    path, body = BODIES[kind]
    with gated.client() as client:
        reply = client.post(path, json=body)
        assert reply.status_code == 500
        error = reply.json()["error"]
        assert error["type"] == ("api_error" if kind == "message" else "server_error")
