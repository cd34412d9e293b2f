"""Formats for answers in all dialects: schemas with rules that no mask holds, tools beside a format."""

from __future__ import annotations

import json
import re

import httpx
import pytest

from mlxr.service import grammar as grammar_module

ASK = [{"role": "user", "content": "Name a color."}]
COLORS = {"type": "array", "items": {"enum": ["red", "blue"]}, "minItems": 1, "maxItems": 2, "uniqueItems": True}
SCHEMA = {"type": "object", "properties": {"colors": COLORS}, "required": ["colors"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "colors", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "pick", "parameters": {"type": "object", "properties": {}}}}


def post(client: httpx.Client, path: str, **body: object) -> httpx.Response:
    response = client.post(path, json={"model": "demo", "messages": ASK, "stream": False, **body})
    assert response.status_code == 200, response.text
    return response


def is_of_schema(text: str) -> bool:
    value = json.loads(text)
    return list(value) == ["colors"] and 1 <= len(value["colors"]) <= 2 and set(value["colors"]) <= {"red", "blue"}


def test_rules_that_are_not_held_are_named_in_a_header(client: httpx.Client) -> None:
    for stream in (False, True):
        response = post(client, "/v1/chat/completions", response_format=FORMAT, stream=stream)
        assert response.headers["x-mlxr-ignored"] == "schema.uniqueItems"
    for path, more in (
        ("/api/chat", {"format": SCHEMA}),
        (
            "/v1/responses",
            {"input": "Name a color.", "text": {"format": {"type": "json_schema", **FORMAT["json_schema"]}}},
        ),
        ("/v1/messages", {"max_tokens": 60, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
    ):
        body = {"model": "demo", "stream": False, **({} if "input" in more else {"messages": ASK}), **more}
        response = client.post(path, json=body)
        assert response.headers["x-mlxr-ignored"] == "schema.uniqueItems", response.text


def test_tools_and_a_format_go_together(client: httpx.Client) -> None:
    for stream in (False, True):
        body = {"response_format": FORMAT, "tools": [TOOL], "max_tokens": 100, "stream": stream}
        body["parallel_tool_calls"] = False  # a second call could be cut at max_tokens, and be text
        response = post(client, "/v1/chat/completions", **body)
        chunks = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
        choices = [choice for chunk in chunks for choice in chunk["choices"]] if stream else response.json()["choices"]
        parts = [choice.get("delta") or choice.get("message") or {} for choice in choices]
        text = "".join(part.get("content") or "" for part in parts)
        called = any(part.get("tool_calls") for part in parts)
        assert called != bool(text)
        assert called or is_of_schema(text)
    called_only = post(client, "/v1/chat/completions", response_format=FORMAT, tools=[TOOL], tool_choice="required")
    assert called_only.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "pick"
    message = post(client, "/api/chat", format=SCHEMA, tools=[TOOL]).json()["message"]
    assert message.get("tool_calls") or is_of_schema(message["content"])


DIGITS = 'root ::= "<" [0-9]{3} ">"'
TEXT_OF = {
    "/v1/chat/completions": lambda reply: reply["choices"][0]["message"]["content"],
    "/v1/completions": lambda reply: reply["choices"][0]["text"],
    "/completion": lambda reply: reply["content"],
}


def test_a_call_that_must_come_may_repeat_the_last_ones(client: httpx.Client) -> None:
    """The call was made twice with the same result; every dialect may demand it once more."""
    call = {"id": "c1", "type": "function", "function": {"name": "pick", "arguments": "{}"}}
    round_ = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c1", "content": "busy"}]
    options = {"tools": [TOOL], "max_tokens": 60}
    chat = {"messages": [*ASK, *round_, *round_], **options}
    for choice in ("required", {"type": "function", "function": {"name": "pick"}}):
        (answer,) = post(client, "/v1/chat/completions", tool_choice=choice, **chat).json()["choices"]
        assert answer["finish_reason"] == "tool_calls"
        assert [called["function"] for called in answer["message"]["tool_calls"]] == [call["function"]]
    stream = post(client, "/v1/chat/completions", tool_choice="required", stream=True, **chat).text
    assert '"content":"{' not in stream
    assert '"finish_reason":"tool_calls"' in stream
    blocks = [
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "pick", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "busy"}]},
    ]
    tool = {"name": "pick", "input_schema": {"type": "object", "properties": {}}}
    body = {"messages": [*ASK, *blocks, *blocks], "tools": [tool], "tool_choice": {"type": "any"}, "max_tokens": 60}
    message = post(client, "/v1/messages", **body).json()
    assert ([block["type"] for block in message["content"]], message["stop_reason"]) == (["tool_use"], "tool_use")
    items = [
        {"type": "function_call", "call_id": "c1", "name": "pick", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "busy"},
    ]
    flat = [{"type": "function", **TOOL["function"]}]
    body = {"input": [*ASK, *items, *items], "tools": flat, "tool_choice": "required", "max_output_tokens": 60}
    assert [item["type"] for item in post(client, "/v1/responses", **body).json()["output"]] == ["function_call"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"grammar": DIGITS}, "<[0-9]{3}>"),
        ({"grammar": 'start: "<" /[0-9]{3}/ ">"'}, "<[0-9]{3}>"),
        ({"json_schema": SCHEMA}, r"(?s)\{.*colors.*\}"),
        ({"guided_json": SCHEMA}, r"(?s)\{.*colors.*\}"),
        ({"guided_json": json.dumps(SCHEMA)}, r"(?s)\{.*colors.*\}"),
        ({"guided_regex": "(a|b){4}/"}, "(a|b){4}/"),
        ({"guided_choice": ["a/b [x]", "c \\d+*", "na\u00efve \u2603"]}, r"a/b \[x\]|c \\d\+\*|na\u00efve \u2603"),
        ({"guided_grammar": DIGITS}, "<[0-9]{3}>"),
        ({"structured_outputs": {"regex": "x{3}"}}, "xxx"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"json": SCHEMA}}, r"(?s)\{.*colors.*\}"),
        ({"structured_outputs": {"grammar": DIGITS, "disable_any_whitespace": True}}, "<[0-9]{3}>"),
        ({"grammar": ""}, "(?s).*"),
        ({"response_format": {"type": "grammar", "grammar": DIGITS}}, "<[0-9]{3}>"),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, r"(?s)\{.*colors.*\}"),
        ({"json_schema": SCHEMA, "response_format": {"type": "text"}}, r"(?s)\{.*colors.*\}"),
    ],
    ids=str,
)
def test_fields_of_other_servers(client: httpx.Client, fields: dict[str, object], pattern: str) -> None:
    for path, read in TEXT_OF.items():
        if path == "/completion" and "response_format" in fields:
            continue
        body = {
            "model": "demo",
            "max_tokens": 400,
            **({"messages": ASK} if "chat" in path else {"prompt": "x = "}),
            **fields,
        }
        response = client.post(path, json=body)
        assert response.status_code == 200, response.text
        assert re.fullmatch(pattern, read(response.json())), response.text


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"grammar": "root ::= x"}, "grammar: line 1: there is no rule 'x'"),
        ({"guided_grammar": "root ::= ("}, "guided_grammar: line 1: '\\)' is missing"),
        ({"guided_regex": "(a"}, "guided_regex: .*unclosed group"),
        ({"guided_choice": []}, "guided_choice"),
        ({"json_schema": {"type": "colour"}}, "json_schema: Invalid type: colour"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json: the schema is not JSON"),
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex: cannot hold together with guided_json"),
        ({"response_format": FORMAT, "grammar": DIGITS}, "grammar: cannot hold together with response_format"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named_as_the_client_calls_it(
    client: httpx.Client, fields: dict[str, object], reason: str
) -> None:
    response = client.post("/v1/chat/completions", json={"model": "demo", "messages": ASK, **fields})
    assert response.status_code == 400
    assert re.match(reason, response.json()["error"]["message"]), response.text


def test_a_grammar_that_outgrows_its_bounds_is_the_requests_fault(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_module, "MAX_LEXER_STATES", 120)
    pattern = {"type": "string", "pattern": "^([a-z]{1,300}[0-9]){1,100}$"}
    wanted = {"type": "json_schema", "json_schema": {"name": "codes", "schema": pattern}}
    body = {"model": "demo", "messages": ASK, "response_format": wanted, "temperature": 1, "seed": 1}
    for stream in (False, True):
        reply = client.post("/v1/chat/completions", json={**body, "stream": stream})
        assert reply.status_code == (200 if stream else 400), reply.text
        error = json.loads(reply.text.strip().split("\n\n")[-1].removeprefix("data: "))["error"]
        assert error["type"] == "invalid_request_error"
        assert re.match("the grammar became too complex while the answer grew: .*too many states", error["message"])
