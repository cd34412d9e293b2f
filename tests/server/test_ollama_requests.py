"""Requests that cannot be served below /api: always a status and `{"error": text}` that names the field."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from running_server import MakeServer

from mlxr.core.errors import InvalidRequest
from mlxr.core.types import Event, Finish, FinishReason, ReasoningDelta, TextDelta, Timings, ToolCallDelta, Usage
from mlxr.server.ollama.answers import ChatMessage, list_messages, read_keep_alive
from mlxr.server.ollama.reply import Part, Parts

HELLO = [{"role": "user", "content": "Hello"}]
CHAT: dict[str, Any] = {"model": "demo", "messages": HELLO, "stream": False, "options": {"num_predict": 1}}
GENERATE: dict[str, Any] = {"model": "demo", "prompt": "Hello", "stream": False, "options": {"num_predict": 1}}


def refuse(client: httpx.Client, path: str, body: object, status: int = 400) -> str:
    reply = client.post(path, json=body)
    assert (reply.status_code, list(reply.json())) == (status, ["error"]), reply.text
    text = reply.json()["error"]
    assert isinstance(text, str)
    assert "\n" not in text
    return text


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("change", "start"),
    [
        ({"model": 1}, "model"),
        ({"model": ""}, "model"),
        ({"model": None}, "model"),
        ({"model": "../../etc/passwd"}, "model: '../../etc/passwd' is not the name of a model"),
        ({"model": "/etc/passwd"}, "model: '/etc/passwd' is not the name"),
        ({"messages": "Hello"}, "messages"),
        ({"messages": [{"role": "user"}, 1]}, "messages[1]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role: must be one of"),
        ({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "messages[0].images[0]: is a picture"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": ""}}]}]},
            "messages[0].tool_calls[0]",
        ),
        ({"stream": "yes"}, "stream"),
        ({"options": []}, "options"),
        ({"options": {"temperature": "hot"}}, "options.temperature: must be a number"),
        ({"options": {"temperature": -1}}, "options.temperature: must be at least 0"),
        ({"options": {"top_k": 1.5}}, "options.top_k: must be a whole number"),
        ({"options": {"top_p": 2}}, "options.top_p"),
        ({"options": {"repeat_penalty": 0}}, "options.repeat_penalty"),
        ({"options": {"num_predict": 2**70}}, "options.num_predict"),
        ({"options": {"seed": 1e300}}, "options.seed"),
        ({"options": {"num_ctx": 0}}, "options.num_ctx: must be at least 1"),
        ({"options": {"num_gpu": "all"}}, "options.num_gpu: must be a number"),
        ({"options": {"use_mmap": 1}}, "options.use_mmap: must be true or false"),
        ({"options": {"stop": [""] * 99}}, "options.stop"),
        ({"options": {"typical_p": 1.5}}, "options.typical_p: must be at least 0"),
        ({"keep_alive": "soon"}, "keep_alive: must be seconds or a duration"),
        ({"keep_alive": [1]}, "keep_alive"),
        ({"format": "yaml"}, 'format: must be "json" or a JSON schema'),
        ({"format": {"type": "elephant"}}, "format"),
        ({"format": 3}, "format"),
        ({"think": "a lot"}, "think: must be true, false or one of"),
        ({"logprobs": True, "top_logprobs": 99}, "top_logprobs: must be from 0 to 20"),
        ({"tools": [{"type": "magic", "function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ],
)
def test_chat_refuses(client: httpx.Client, change: dict[str, object], start: str) -> None:
    assert refuse(client, "/api/chat", {**CHAT, **change}).startswith(start)


@pytest.mark.parametrize(
    ("change", "start"),
    [
        ({"prompt": 1}, "prompt"),
        ({"images": ["aGk="]}, "images[0]: is a picture, and this model reads text only"),
        ({"template": "{{ .Prompt }"}, "template: "),
        ({"template": "{% if %}"}, "template: chat template that was given, line 1"),
        ({"template": "{{ .Prompt }}", "raw": True}, "template: cannot be used with raw"),
        ({"template": "{{ .Prompt }}", "suffix": "x"}, "suffix: goes with prompt alone"),
        ({"raw": True, "system": "x"}, "system: cannot be used with raw"),
        ({"raw": True, "context": [1]}, "context: cannot be used with raw"),
        ({"context": [10**9]}, "prompt: token id 1000000000 is outside the vocabulary"),
        ({"context": ["a"]}, "context[0]"),
        ({"suffix": "x"}, "suffix: is not supported by this model"),
        ({"suffix": "x", "raw": True}, "suffix: goes with prompt alone"),
        ({"think": True}, "think: 'demo' does not support thinking"),
    ],
)
def test_generate_refuses(client: httpx.Client, change: dict[str, object], start: str) -> None:
    assert refuse(client, "/api/generate", {**GENERATE, **change}).startswith(start)


@pytest.mark.parametrize(
    ("path", "body", "status", "start"),
    [
        ("/api/embed", {"model": "demo"}, 400, "input"),
        ("/api/embed", {"model": "demo", "input": [1]}, 400, "input[0]"),
        ("/api/embed", {"model": "demo", "input": "x", "dimensions": 4096}, 400, "dimensions: must be at most 512"),
        ("/api/embed", {"model": "demo", "input": "x", "dimensions": -1}, 400, "dimensions"),
        ("/api/embed", {"model": "none", "input": "x"}, 404, "model 'none' not found"),
        ("/api/embeddings", {"model": "demo", "prompt": ["x"]}, 400, "prompt"),
        ("/api/show", {}, 400, "model: is missing"),
        ("/api/show", {"model": "none"}, 404, "model 'none' not found"),
        ("/api/show", {"model": "a/../b"}, 400, "model: "),
        ("/api/chat", [], 400, "body"),
    ],
)
def test_other_routes_refuse(client: httpx.Client, path: str, body: object, status: int, start: str) -> None:
    assert refuse(client, path, body, status).startswith(start)


@pytest.mark.one_server("a cluster refuses to change models")
@pytest.mark.parametrize(
    ("path", "body", "status", "start"),
    [
        ("/api/copy", {"source": "demo"}, 400, "destination"),
        ("/api/copy", {"source": "demo", "destination": "../x"}, 400, "destination: '../x' is not the name"),
        (
            "/api/copy",
            {"source": "demo", "destination": "demo-draft"},
            400,
            "NAME: demo-draft comes with mlxr",
        ),
        ("/api/create", {"model": "x"}, 400, "from: give either"),
        ("/api/create", {"model": "x", "from": "demo", "adapters": {"a": "b"}}, 400, "adapters.a: 'b' is not sha256"),
        (
            "/api/create",
            {"model": "x", "from": "demo", "quantize": "q4_0", "stream": False},
            400,
            "quantize: these weights are quantised already",
        ),
        ("/api/create", {"model": "x", "from": "none", "stream": False}, 404, "model 'none' not found"),
        ("/api/create", {"model": "../x", "from": "demo", "stream": False}, 400, "NAME: '../x'"),
        (
            "/api/create",
            {"model": "x", "from": "demo", "template": "{{ .Nonsense }}", "stream": False},
            400,
            "template: line 1 of the Go template: .Nonsense is not supported",
        ),
        (
            "/api/create",
            {"model": "x", "from": "demo", "messages": [{"role": "x", "content": ""}]},
            400,
            "messages[0].role",
        ),
        ("/api/create", {"model": "x", "files": {"../a.gguf": "0" * 64}, "stream": False}, 400, "files: '../a.gguf'"),
        ("/api/create", {"model": "x", "files": {"a.gguf": "zz"}, "stream": False}, 400, "files.a.gguf: 'zz'"),
        ("/api/create", {"model": "x", "files": {"a.gguf": "0" * 64}, "stream": False}, 404, "blob sha256:000"),
        ("/api/pull", {}, 400, "model: is missing"),
    ],
)
def test_routes_that_change_models_refuse(
    client: httpx.Client, path: str, body: object, status: int, start: str
) -> None:
    assert refuse(client, path, body, status).startswith(start)


@pytest.mark.one_server("a cluster refuses to change models, whatever the body")
@pytest.mark.parametrize("content", [b"", b"{", b'{"model": "\xff"}', b"[" * 100_000, b'{"model": NaN}', b"null"])
def test_bodies_that_are_no_json(client: httpx.Client, content: bytes) -> None:
    for path in ("/api/chat", "/api/generate", "/api/pull", "/api/create"):
        reply = client.post(path, content=content)
        assert (reply.status_code, list(reply.json())) == (400, ["error"])


def test_unknown_paths_and_methods(client: httpx.Client) -> None:
    assert list(client.get("/api/nothing").json()) == ["error"]
    assert client.get("/api/nothing").status_code == 404
    assert client.get("/api/chat").status_code == 405
    assert list(client.get("/api/chat").json()) == ["error"]


@pytest.mark.one_server("a cluster refuses to change models")
def test_an_error_after_the_start_is_the_last_line(client: httpx.Client) -> None:
    body = {"model": "x", "from": "none"}
    lines = client.post("/api/create", json=body).text.splitlines()
    assert lines[0] == '{"status":"parsing model"}'
    assert lines[-1].startswith('{"error":"model \'none\' not found')


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = (
    "model",
    "messages",
    "format",
    "options",
    "keep_alive",
    "think",
    "tools",
    "logprobs",
    "top_logprobs",
    "truncate",
)


def test_junk_is_answered_or_refused(make_server: MakeServer) -> None:
    client = make_server().client()  # of its own: some junk says to unload the model

    @settings(max_examples=60, deadline=None, derandomize=True, database=None)
    @given(field=st.sampled_from(FIELDS), value=junk)
    def check(field: str, value: object) -> None:
        reply = client.post("/api/chat", content=json.dumps({**CHAT, field: value}))
        assert reply.status_code in (200, 400, 404), reply.text
        if reply.status_code != 200:
            assert list(reply.json()) == ["error"]

    with client:
        check()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5m", 300),
        ("1h30m", 5400),
        ("-1s", -1),
        ("0", 0),
        ("300", 300),
        ("1.5h", 5400),
        ("100ms", 0.1),
        (7, 7),
        (None, None),
    ],
)
def test_durations(text: str | float | None, seconds: float | None) -> None:
    assert read_keep_alive(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "5 m", "5x", "1m5", "1.2.3s", "--5s", "nan", "5m!"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(InvalidRequest, match="keep_alive"):
        read_keep_alive(text)


def read(events: Sequence[Event]) -> tuple[list[Part], Part]:
    """The parts of a stream, and the whole answer."""
    made = Parts([1, 2], None, arrived_s=0.0, load_s=0.25)
    parts = [part for event in events for part in made.push(event)]
    return parts, made.make_whole()


def finish(reason: FinishReason) -> Finish:
    return Finish(reason, Usage(2, 7), timings=Timings(0.0, 0.5, 2.0))


def test_calls_of_tools_come_whole() -> None:
    events: list[Event] = [
        ReasoningDelta("Let me see.", (1,)),
        TextDelta("", (2,)),
        TextDelta("I will ", (3,)),
        ToolCallDelta(0, "", "call_a", "get_weather"),
        ToolCallDelta(0, '{"city": ', token_ids=(6,)),
        ToolCallDelta(0, '"Rome"}'),
        ToolCallDelta(1, "{}", "call_b", "get_time", token_ids=(7,)),
        finish(FinishReason.TOOL_CALLS),
    ]
    parts, whole = read(events)
    rome = {"id": "call_a", "function": {"index": 0, "name": "get_weather", "arguments": {"city": "Rome"}}}
    time = {"id": "call_b", "function": {"index": 1, "name": "get_time", "arguments": {}}}
    assert [(part.thinking, part.text, part.calls) for part in parts] == [
        ("Let me see.", "", []),
        ("", "I will ", []),
        ("", "", [rome]),
        ("", "", [time]),
    ]
    assert (whole.thinking, whole.text, whole.calls) == ("Let me see.", "I will ", [rome, time])
    assert whole.end is not None
    assert (whole.end["done_reason"], whole.end["load_duration"]) == ("stop", 250_000_000)
    assert (whole.end["prompt_eval_duration"], whole.end["eval_duration"]) == (500_000_000, 2_000_000_000)


def test_a_call_that_the_end_cuts_is_left_out() -> None:
    events: list[Event] = [ToolCallDelta(0, '{"a": ', "call_a", "f"), finish(FinishReason.LENGTH)]
    (part,), whole = read(events)
    assert whole.calls == []
    assert part.calls == []
    assert part.end is not None
    assert part.end["done_reason"] == "length"


def test_results_find_their_calls() -> None:
    def call(name: str, call_id: str | None = None) -> dict[str, object]:
        return {"id": call_id, "function": {"name": name, "arguments": {}}}

    messages = [
        {"role": "assistant", "content": "", "tool_calls": [call("f"), call("g", "own"), call("f")]},
        {"role": "tool", "content": "1", "tool_name": "g"},
        {"role": "tool", "content": "2"},
        {"role": "tool", "content": "3", "tool_call_id": "call_0_2"},
        {"role": "tool", "content": "4", "tool_name": "h"},
    ]
    listed = list_messages([ChatMessage.model_validate(message) for message in messages])
    found = [(message.get("tool_call_id"), message.get("name")) for message in listed[1:]]
    assert found == [("own", "g"), ("call_0_0", "f"), ("call_0_2", "f"), (None, "h")]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/chat", CHAT),
        ("/api/generate", GENERATE),
        ("/api/embed", {"model": "demo", "input": "x"}),
        ("/api/embeddings", {"model": "demo", "prompt": "x"}),
        ("/api/show", {"model": "demo"}),
    ],
)
def test_unknown_options_and_fields_pass_and_are_named(client: httpx.Client, path: str, body: dict[str, Any]) -> None:
    options = {**body.get("options", {}), "warmth": 1, "num_gpu": 99, "top_k": None, "nested": {"a": []}}
    reply = client.post(path, json={**body, "options": options, "flavour": "sweet", "keep_alive": None})
    assert reply.status_code == 200, reply.text
    named = set(reply.headers["x-mlxr-ignored"].split(", "))
    assert named == {"flavour", "options.warmth", "options.num_gpu", "options.nested"}
    plain = client.post(path, json=body)
    assert "x-mlxr-ignored" not in plain.headers
    assert set(plain.json()) == set(reply.json())


@pytest.mark.one_server("a cluster refuses to change models")
def test_unknown_parameters_of_a_new_model_pass(client: httpx.Client) -> None:
    body = {"model": "warm", "from": "demo", "parameters": {"warmth": 1, "top_k": 3}, "stream": False}
    reply = client.post("/api/create", json=body)
    assert (reply.json(), reply.headers["x-mlxr-ignored"]) == ({"status": "success"}, "parameters.warmth")
    assert client.post("/api/show", json={"model": "warm"}).json()["parameters"] == "top_k 3"
    client.request("DELETE", "/api/delete", json={"model": "warm"})
