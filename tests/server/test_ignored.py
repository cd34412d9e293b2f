"""Fields that have no effect: they pass in every dialect, and a header and the debug log name them."""

from __future__ import annotations

import json
import logging

import httpx
import pytest
from running_server import MakeServer

from mlxr.server.openai.chat import ChatCompletionRequest
from mlxr.server.routes import MAX_LOOKS, MAX_NAME_CHARACTERS, MAX_NAMES, find_ignored, join_names

HEADER = "x-mlxr-ignored"
ASKED = [{"role": "user", "content": "Hi", "id": "msg_1", "name": None}]
CHAT = {"model": "demo", "messages": ASKED, "max_tokens": 1, "foo": {"bar": 1}}
HINTS = {"user": "ann", "metadata": {"a": "b"}, "service_tier": "flex", "store": True}
OPTIONS = {"stream_options": {"include_obfuscation": True, "include_usage": True}}
LABELS = "user, metadata, service_tier, store"
TOOL = {"type": "function", "strict": True, "function": {"name": "f", "strict": True, "parameters": {"x-a": None}}}
HINT = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
BLOCKS = [{"role": "user", "content": [{"type": "text", "text": "Hi", **HINT}]}]
REQUESTS = [
    ("/v1/chat/completions", {**CHAT, **HINTS, **OPTIONS}, f"messages[].id, foo, {LABELS}, "
     "stream_options.include_obfuscation"),
    ("/v1/chat/completions", {**CHAT, "stream": True, "tools": [TOOL]}, "messages[].id, foo, tools[].strict, "
     "tools[].function.strict"),
    ("/v1/completions", {"model": "demo", "prompt": "Hi", "max_tokens": 1, "verbosity": "low"}, "verbosity"),
    ("/v1/embeddings", {"model": "demo", "input": "Hi", "user": "ann", "input_type": "query"}, "user, input_type"),
    ("/v1/responses", {"model": "demo", "input": "Hi", "max_output_tokens": 1, "service_tier": "flex",
     "include": ["reasoning.encrypted_content"], "reasoning": {"summary": "auto"}}, "service_tier, reasoning.summary"),
    ("/v1/messages", {"model": "demo", "messages": BLOCKS, "max_tokens": 1, "metadata": {"user_id": "a"},
     "context_management": {"edits": []}}, "messages[].content[].cache_control, metadata, context_management"),
    ("/v1/messages/count_tokens", {"model": "demo", "messages": BLOCKS, "speed": "fast"},
     "messages[].content[].cache_control, speed"),
    ("/api/chat", {"model": "demo", "messages": ASKED, "options": {"num_predict": 1}, "shift": True, "stream": True},
     "messages[].id, shift"),
    ("/api/generate", {"model": "demo", "prompt": "Hi", "options": {"num_predict": 1}, "width": 9}, "width"),
    ("/api/embed", {"model": "demo", "input": "Hi", "width": 9}, "width"),
    ("/api/show", {"model": "demo", "width": 9}, "width"),
    ("/tokenize", {"content": "Hi", "contents": "x"}, "contents"),
    ("/apply-template", {"messages": [{"role": "user", "content": "Hi"}], "foo": 1}, "foo"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "names"), REQUESTS)
def test_fields_without_effect_pass_and_are_named(
    client: httpx.Client, path: str, body: dict[str, object], names: str
) -> None:
    nulls = dict.fromkeys(("temperature", "tools", "no_such_field", "stream_options", "format"))
    for sent in (body, {**nulls, **body}):
        reply = client.post(path, json=sent)
        assert reply.status_code == 200, reply.text
        assert set(reply.headers[HEADER].split(", ")) == set(names.split(", "))


def test_a_request_that_has_effect_throughout_gets_no_header(client: httpx.Client) -> None:
    reply = client.post(
        "/v1/chat/completions", json={**CHAT, "messages": [{"role": "user", "content": "Hi"}], "foo": None}
    )
    assert HEADER not in reply.headers


def test_refused_requests_name_them_too(client: httpx.Client) -> None:
    reply = client.post("/v1/chat/completions", json={**CHAT, "model": "no/such/model:x"})
    assert (reply.status_code >= 400, reply.headers[HEADER]) == (True, "messages[].id, foo")


@pytest.mark.one_server("replicas log in processes of their own")
def test_the_debug_log_names_them(client: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "mlxr")
    request_id = client.post("/tokenize", json={"content": "Hi", "b\nd": 1, "a": 1}).headers["x-request-id"]
    (record,) = [record for record in caplog.records if record.name == "mlxr.bodies"]
    assert (record.levelno, vars(record)["fields"]) == (logging.DEBUG, {"request_id": request_id, "fields": "b%0Ad, a"})


@pytest.mark.parametrize("name", ["a\r\nset-cookie: x=1", "ü" * 500, "\ud800", "", "a, b", "\x00", "%", "x" * 10**6])
def test_hostile_names_make_a_safe_header(client: httpx.Client, name: str) -> None:
    reply = client.post("/tokenize", content=json.dumps({"content": "Hi", "foo": 1, name: 1}))
    assert reply.status_code == 200
    assert "set-cookie" not in reply.headers
    foo, value = reply.headers[HEADER].split(", ")
    assert foo == "foo"
    assert value
    assert value.isascii()
    assert value.isprintable()
    assert len(value) <= MAX_NAME_CHARACTERS
    assert not set(value) & set(' ,;"')


def test_many_names_are_cut(client: httpx.Client) -> None:
    reply = client.post("/tokenize", json={"content": "Hi", **{f"x{number}": 1 for number in range(5000)}})
    names = reply.headers[HEADER].split(", ")
    assert names == [*(f"x{number}" for number in range(MAX_NAMES)), "..."]
    assert join_names(names[:3]) == "x0, x1, x2"


@pytest.mark.slow
def test_only_the_beginning_of_a_long_body_is_looked_at() -> None:
    body = {"messages": [{"role": "user", "content": "x", "id": "a"}] * MAX_LOOKS}
    model = ChatCompletionRequest.model_validate(body)
    assert 1000 < len(list(find_ignored(body, model))) < MAX_LOOKS


def test_hints_for_drafts_that_do_not_exist_here_pass(client: httpx.Client) -> None:
    hints = {"speculative.n_min": 1, "speculative.p_min": 0.5, "draft_model": "demo-draft"}
    plain = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "temperature": 0}
    reply = client.post("/v1/chat/completions", json={**plain, **hints, "speculative.n_max": 2})
    assert set(reply.headers[HEADER].split(", ")) == set(hints)
    same = client.post("/v1/chat/completions", json=plain).json()
    assert reply.json()["choices"][0]["message"] == same["choices"][0]["message"]


def test_a_prediction_has_no_effect_where_there_are_no_drafts(make_server: MakeServer) -> None:
    """It is compared with the answer nevertheless."""
    asked = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "temperature": 0}
    with make_server(draft="off").client() as client:
        said = client.post("/v1/chat/completions", json=asked).json()["choices"][0]["message"]["content"]
        reply = client.post("/v1/chat/completions", json={**asked, "prediction": {"type": "content", "content": said}})
    assert reply.headers[HEADER] == "prediction"
    assert reply.json()["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 3
