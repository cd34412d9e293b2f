"""A wrong request gets an error in its dialect's own form, which names the field."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from typing import Any

import httpx
import openai
import pytest
from running_server import RunningServer, wait_until

CHAT, COMPLETION, EMBEDDING, RESPONSE, MESSAGE = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/messages",
)
GOOD: dict[str, dict[str, object]] = {
    CHAT: {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    COMPLETION: {"model": "demo", "prompt": "Hi", "max_tokens": 2},
    EMBEDDING: {"model": "demo", "input": "Hi"},
    RESPONSE: {"model": "demo", "input": "Hi", "max_output_tokens": 2},
    MESSAGE: {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
}
HUGE = 10**30


def message_of(path: str, reply: httpx.Response) -> str:
    """Check the form of an error and return its message."""
    body = reply.json()
    if path == MESSAGE:
        assert set(body) == {"type", "error", "request_id"}
        assert set(body["error"]) == {"type", "message"}
    else:
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-request-id"]
    return str(body["error"]["message"])


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        *((path, "model", value) for path in GOOD for value in (7, ["demo"], {"name": "demo"})),
        *((path, "stream", "yes") for path in (CHAT, COMPLETION, RESPONSE, MESSAGE)),
        *((path, "temperature", value) for path in (CHAT, RESPONSE, MESSAGE) for value in (-1, "hot", HUGE, True)),
        *((path, "top_p", value) for path in (CHAT, COMPLETION, RESPONSE, MESSAGE) for value in (-0.1, 1.5, -HUGE)),
        *((path, "max_tokens", value) for path in (CHAT, COMPLETION, MESSAGE) for value in (-3, 2.5, "9", HUGE)),
        *((path, "top_k", value) for path in (CHAT, MESSAGE) for value in (-2, HUGE, 0.5)),
        *((path, "seed", value) for path in (CHAT, COMPLETION) for value in (2**64, -HUGE, 1.5, "1")),
        *((path, "n", value) for path in (CHAT, COMPLETION) for value in (0, -1, 129, HUGE)),
        *((path, "stop", value) for path in (CHAT, COMPLETION) for value in ("", 5, ["x"] * 65)),
        *((path, "logit_bias", value) for path in (CHAT,) for value in ([1], "x")),
        *((CHAT, field, HUGE) for field in ("presence_penalty", "frequency_penalty", "repetition_penalty", "priority")),
        (CHAT, "messages", "Hi"),
        (CHAT, "messages", []),
        (CHAT, "messages", None),
        (CHAT, "logit_bias", {"1": 101}),
        (CHAT, "logit_bias", {"-1": 1}),
        (CHAT, "logit_bias", {"999999": 1}),
        (CHAT, "top_logprobs", 2),
        (CHAT, "top_logprobs", 21),
        (CHAT, "logprobs", 1),
        (CHAT, "tools", [{"type": "custom"}]),
        (CHAT, "tools", [{"type": "function"}]),
        (CHAT, "tool_choice", "maybe"),
        (CHAT, "tool_choice", "required"),
        (CHAT, "tool_choice", {"type": "function"}),
        (CHAT, "response_format", {"type": "xml"}),
        (CHAT, "response_format", {"type": "json_schema"}),
        (CHAT, "response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "wat"}}}),
        (CHAT, "response_format", {"type": "regex", "regex": "(["}),
        (CHAT, "response_format", {"type": "grammar", "grammar": "start: nothing"}),
        (CHAT, "modalities", ["audio"]),
        (CHAT, "functions", [{"name": "look"}]),
        (CHAT, "messages", [{"role": "assistant", "content": "x", "function_call": {"name": "f", "arguments": ""}}]),
        (CHAT, "function_call", "auto"),
        (CHAT, "web_search_options", {}),
        (RESPONSE, "background", True),
        (RESPONSE, "conversation", "conv_1"),
        (MESSAGE, "mcp_servers", [{"type": "url"}]),
        (CHAT, "deadline_s", 0),
        (COMPLETION, "prompt", 7),
        (COMPLETION, "prompt", []),
        (COMPLETION, "prompt", [[]]),
        (COMPLETION, "prompt", ["a", 1]),
        (COMPLETION, "prompt", [-1]),
        (COMPLETION, "prompt", [999_999]),
        (COMPLETION, "best_of", 0),
        (COMPLETION, "logprobs", -1),
        (COMPLETION, "suffix", "x"),
        (EMBEDDING, "input", []),
        (EMBEDDING, "input", {"a": 1}),
        (EMBEDDING, "input", [999_999]),
        (EMBEDDING, "encoding_format", "hex"),
        (EMBEDDING, "dimensions", 0),
        (EMBEDDING, "pooling", "max"),
    ],
)
def test_a_wrong_field_is_named(client: httpx.Client, path: str, field: str, value: object) -> None:
    reply = client.post(path, json={**GOOD[path], field: value})
    assert reply.status_code == 400, reply.text
    message = message_of(path, reply)
    if path != MESSAGE:
        param = reply.json()["error"]["param"]
        assert param.split(".")[0].split("[")[0] == field
        assert field in message
    else:
        assert message.startswith(field)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b'{"model": "demo",}',
        b'{"model": NaN}',
        b'{"model": "\xff\xfe"}',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"messages": ' + b"[" * 3000 + b"]" * 3000 + b"}",
        b'{"model": "\\ud800"}',
    ],
    ids=["empty", "open", "list", "null", "text", "comma", "nan", "utf-8", "bytes", "deep", "nested", "surrogate"],
)
def test_a_body_that_is_no_request(client: httpx.Client, path: str, body: bytes) -> None:
    reply = client.post(path, content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400, reply.text
    assert message_of(path, reply)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize("name", ["no-such-model", "/etc/passwd", "../../demo", "demo:other", "a/b/c/d/e", "\x00", "ü"])
def test_an_unknown_model(client: httpx.Client, path: str, name: str) -> None:
    reply = client.post(path, json={**GOOD[path], "model": name})
    assert reply.status_code in (400, 404), reply.text
    message_of(path, reply)
    if path != MESSAGE:
        assert reply.json()["error"]["param"] == "model"


@pytest.mark.parametrize("path", GOOD)
def test_half_a_character_is_no_text(client: httpx.Client, path: str) -> None:
    body = json.dumps(GOOD[path]).replace("Hi", "\\ud800").encode()
    reply = client.post(path, content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400, reply.text
    (field,) = [name for name in ("messages", "prompt", "input") if name in GOOD[path]]
    assert message_of(path, reply).startswith(field)


@pytest.mark.parametrize(
    ("path", "given", "field"),
    [
        *((path, {"model": "demo\ud83d"}, "model") for path in (CHAT, COMPLETION, RESPONSE, EMBEDDING, "/completion")),
        (RESPONSE, {"metadata": {"a": "\ude00"}}, "metadata.a"),
        (RESPONSE, {"metadata": {"\ude00": "a"}}, "metadata"),
        (RESPONSE, {"user": "\ud83d"}, "user"),
        (RESPONSE, {"safety_identifier": "\ud83dx"}, "safety_identifier"),
        (RESPONSE, {"prompt_cache_key": "\ud83d\ud83d\ude00"}, "prompt_cache_key"),
        (
            RESPONSE,
            {"text": {"format": {"type": "json_schema", "name": "\ud83d", "schema": {}}}},
            "text.format.name",
        ),
        (RESPONSE, {"tools": [{"type": "function", "name": "f", "description": "\ud83d"}]}, "tools[0].description"),
        (CHAT, {"stop": ["a", "\ud83d"]}, "stop[1]"),
        (CHAT, {"messages": [{"role": "user", "content": "\ud83d"}], "stream": True}, "messages[0].content"),
    ],
)
def test_half_a_character_is_refused_in_every_field(
    client: httpx.Client, path: str, given: dict[str, object], field: str
) -> None:
    good = GOOD.get(path, {"prompt": "Hi"})
    reply = client.post(path, content=json.dumps(good | given))
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["message"].startswith(f"{field}: ")
    assert error.get("param", error.get("field")) == field


def test_half_a_character_that_no_escape_spells_is_refused(client: httpx.Client) -> None:
    body = json.dumps(GOOD[CHAT]).replace("demo", "@").encode().replace(b"@", b"\xed\xa0\xbd")
    reply = client.post(CHAT, content=body)
    assert (reply.status_code, reply.json()["error"]["message"]) == (400, "the body is not UTF-8")


def test_whole_characters_pass_however_they_are_spelt(client: httpx.Client) -> None:
    given = {"user": "\U0001f600", "metadata": {"\U0001f600": "\\ud83d"}, "label\ud83d": "\ud83d"}
    reply = client.post(RESPONSE, content=json.dumps(GOOD[RESPONSE] | given))
    assert (reply.status_code, reply.json()["user"]) == (200, "\U0001f600")
    assert reply.json()["metadata"] == given["metadata"]


ASKED = {"role": "user", "content": "Hi"}
HALF = {"path": "a\ud800"}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": json.dumps(HALF)}}


@pytest.mark.parametrize(
    ("path", "field", "given"),
    [
        (
            CHAT,
            "messages[1].tool_calls[0].function.arguments",
            {"messages": [ASKED, {"role": "assistant", "tool_calls": [CALL]}]},
        ),
        (
            RESPONSE,
            "input[1].arguments",
            {
                "input": [
                    ASKED,
                    {"type": "function_call", "call_id": "c1", "name": "look", "arguments": json.dumps(HALF)},
                ]
            },
        ),
        (
            MESSAGE,
            "messages[1].content[0].input",
            {
                "messages": [
                    ASKED,
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": HALF}]},
                ]
            },
        ),
    ],
)
def test_half_a_character_in_the_arguments_of_a_call(
    client: httpx.Client, path: str, field: str, given: dict[str, object]
) -> None:
    reply = client.post(path, content=json.dumps({**GOOD[path], **given}), headers={"content-type": "application/json"})
    assert reply.status_code == 400, reply.text
    message = message_of(path, reply)
    assert message.startswith(field)
    assert "surrogate" in message
    if path != MESSAGE:
        assert reply.json()["error"]["param"] == field


@pytest.mark.parametrize("path", [CHAT, COMPLETION, RESPONSE, MESSAGE])
def test_top_p_0_takes_the_likeliest_token(client: httpx.Client, path: str) -> None:
    texts = set()
    for sampling in ({"temperature": 0}, {"top_p": 0}, {"temperature": 1, "top_p": 0}):
        reply = client.post(path, json={**GOOD[path], **sampling})
        assert reply.status_code == 200, reply.text
        texts.add(json.dumps([reply.json().get(part) for part in ("content", "choices")] + _texts(reply.json())))
    assert len(texts) == 1


def _texts(reply: dict[str, Any]) -> list[str]:
    """Return the texts of an answer of /v1/responses, without its items' ids, which differ."""
    return [part["text"] for item in reply.get("output", ()) for part in item.get("content", ())]


@pytest.mark.parametrize("path", GOOD)
def test_a_prompt_beyond_the_context(client: httpx.Client, path: str) -> None:
    body = json.dumps(GOOD[path]).replace("Hi", "word " * 20_000).encode()
    reply = client.post(path, content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    if path == MESSAGE:
        assert re.fullmatch(r"messages: prompt is too long: \d{5} tokens > 2048 maximum", error["message"])
        return
    assert "this model's maximum context length is 2048 tokens" in error["message"]
    assert (error["type"], error["code"]) == ("exceed_context_size_error", "context_length_exceeded")
    assert (error["n_prompt_tokens"] > 20_000, error["n_ctx"]) == (True, 2048)
    assert error["param"] in GOOD[path]


@pytest.mark.parametrize("path", [COMPLETION, CHAT, MESSAGE])
def test_what_cannot_fit_is_refused_before_it_is_read(client: httpx.Client, path: str) -> None:
    text = " " * 8_000_000
    asked = {"prompt": text} if path == COMPLETION else {"messages": [{"role": "user", "content": text}]}
    start_s = time.monotonic()
    reply = client.post(path, json=GOOD[path] | asked)
    assert reply.status_code == 400
    expected = "tokens > 2048 maximum" if path == MESSAGE else "maximum context length is 2048 tokens"
    assert expected in reply.json()["error"]["message"]
    assert time.monotonic() - start_s < 2.0, "8,000,000 spaces take longer to tokenise"


@pytest.mark.parametrize("path", [CHAT, RESPONSE, MESSAGE])
def test_conversations_of_very_many_messages_are_refused(client: httpx.Client, path: str) -> None:
    field = "input" if path == RESPONSE else "messages"
    reply = client.post(path, json=GOOD[path] | {field: [{"role": "user", "content": "Hi"}] * 50_000})
    assert reply.status_code == 400
    assert "has 50000 entries, at most 16384 are read" in message_of(path, reply)


@pytest.mark.parametrize("path", GOOD)
def test_the_wrong_method(client: httpx.Client, path: str) -> None:
    reply = client.put(path, json=GOOD[path])
    assert reply.status_code == 405
    message_of(path, reply)


@pytest.mark.parametrize(
    "path", ["/v1/audio/speech", "/v1/responses/cancel", "/v1/responses/x", "/v1/models/load", "/models/load"]
)
def test_a_path_that_is_not_there(client: httpx.Client, path: str) -> None:
    reply = client.post(path, json={})
    assert reply.status_code == 404
    if path.startswith("/v1"):
        message_of(CHAT, reply)


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_a_deadline_ends_an_answer(client: httpx.Client, path: str) -> None:
    body = {**GOOD[path], "max_tokens": 2000, "ignore_eos": True, "deadline_s": 0.05}
    reply = client.post(path, json=body)
    assert reply.status_code == 504
    assert "time" in message_of(path, reply)
    streamed = client.post(path, json={**body, "stream": True})
    assert streamed.status_code == 200
    last = json.loads(streamed.text.strip().split("\n\n")[-1].removeprefix("data: "))
    assert last["error"]["code"] == "deadline"


@pytest.mark.one_server("replicas log in processes of their own")
def test_an_answer_that_was_ended_is_no_fault_to_the_log(
    client: httpx.Client, running: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    def cancel() -> None:
        wait_until(lambda: any(row.generated_tokens for row in running.app.state.parts.activity))
        with running.client() as other:
            assert other.delete("/v1/admin/requests/ended").status_code == 200

    body = {**GOOD[CHAT], "max_tokens": 2000, "ignore_eos": True}
    assert client.post(CHAT, json=body | {"deadline_s": 1e-320}).status_code == 504
    owner = threading.Thread(target=cancel)
    owner.start()
    assert client.post(CHAT, json=body, headers={"x-request-id": "ended"}).status_code == 503
    owner.join()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_the_client_raises_its_own_errors(server: str) -> None:
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as ai:
        with pytest.raises(openai.NotFoundError) as missing:
            ai.chat.completions.create(model="none", messages=[{"role": "user", "content": "Hi"}])
        with pytest.raises(openai.BadRequestError) as wrong:
            ai.chat.completions.create(model="demo", messages=[{"role": "user", "content": "Hi"}], temperature=-1)
        with pytest.raises(openai.APIError) as late:
            list(
                ai.completions.create(
                    model="demo",
                    prompt="Hi",
                    max_tokens=2000,
                    stream=True,
                    extra_body={"deadline_s": 0.05, "ignore_eos": True},
                )
            )
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    assert (wrong.value.type, wrong.value.param) == ("invalid_request_error", "temperature")
    assert late.value.code == "deadline"


def test_schemas_without_end_are_refused(client: httpx.Client) -> None:
    schema: dict[str, object] = {"type": "string"}
    for _ in range(400):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "deep", "schema": schema}}
    reply = client.post(CHAT, json={**GOOD[CHAT], "response_format": wanted})
    assert reply.status_code in (200, 400), reply.text
    if reply.status_code == 400:
        assert reply.json()["error"]["param"].startswith("response_format")
