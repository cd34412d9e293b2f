"""Tokens and templates as llama.cpp's server has them, and refusals."""

from __future__ import annotations

import httpx
import pytest

TEXT = "What does os.path.join do? <|im_end|> ünï"


def test_tokens_and_back(client: httpx.Client) -> None:
    tokens = client.post("/tokenize", json={"content": TEXT, "parse_special": False}).json()["tokens"]
    assert len(tokens) > 5
    assert client.post("/detokenize", json={"tokens": tokens}).json() == {"content": TEXT, "prompt": TEXT}


def test_long_texts_are_the_same(client: httpx.Client) -> None:
    text = TEXT * 200
    tokens = client.post("/tokenize", json={"content": text, "parse_special": False}).json()["tokens"]
    assert len(tokens) > 4096 // 2
    assert client.post("/detokenize", json={"tokens": tokens}).json() == {"content": text, "prompt": text}


def test_pieces_make_the_text(client: httpx.Client) -> None:
    body = {"content": "na\u00efve \U0001f600", "with_pieces": True}
    pieces = client.post("/tokenize", json=body).json()["tokens"]
    raw = b"".join(
        bytes(piece["piece"]) if isinstance(piece["piece"], list) else piece["piece"].encode() for piece in pieces
    )
    assert raw.decode() == body["content"]
    plain = client.post("/tokenize", json={"content": body["content"]}).json()["tokens"]
    assert [piece["id"] for piece in pieces] == plain


def test_special_spellings_count_only_when_asked_for(client: httpx.Client) -> None:
    prompt = client.post("/apply-template", json={"messages": [{"role": "user", "content": "hi"}]}).json()["prompt"]
    assert "hi" in prompt
    assert len(prompt) > len("hi")
    counts = [
        len(client.post("/tokenize", json={"content": prompt, "parse_special": parse}).json()["tokens"])
        for parse in (True, False)
    ]
    assert counts[0] < counts[1]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/tokenize", {}, "content"),
        ("/tokenize", {"content": 3}, "content"),
        ("/tokenize", {"content": "x", "model": "no-such-model"}, "model"),
        ("/tokenize", {"content": "x", "model": "../../etc/passwd"}, "model"),
        ("/tokenize", {"content": "x", "model": "/etc/passwd"}, "model"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens[0]"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
        ("/apply-template", {"messages": "hello"}, "messages"),
        ("/apply-template", {"messages": [{"role": "user"}]}, "messages"),
    ],
)
def test_errors_name_the_field(path: str, body: object, field: str, client: httpx.Client) -> None:
    response = client.post(path, json=body)
    assert 400 <= response.status_code < 500
    error = response.json()["error"]
    assert error["field"].startswith(field)
    assert error["request_id"] == response.headers["x-request-id"]


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_tokens_of_a_conversation_are_counted(client: httpx.Client, prefix: str) -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    body = {"messages": [{"role": "user", "content": "hello"}], "tools": tools, "max_tokens": 1}
    counted = client.post(f"{prefix}/chat/completions/input_tokens", json=body).json()
    assert counted == {"input_tokens": client.post("/v1/chat/completions", json=body).json()["usage"]["prompt_tokens"]}


def test_a_template_writes_tools(client: httpx.Client) -> None:
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
    body = {"messages": [{"role": "user", "content": "hi"}]}
    plain, with_tools = (
        client.post("/apply-template", json=one).json()["prompt"] for one in (body, body | {"tools": [tool]})
    )
    assert "get_weather" in with_tools
    assert "get_weather" not in plain


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"content": "\xff\xfe"}',
        b'{"content": "\\ud800"}',
        b'{"content": 1' + b"0" * 10000 + b"}",
        b'{"content": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b"\x00" * 10,
    ],
    ids=["empty", "cut", "list", "null", "not UTF-8", "half a character", "huge number", "deep", "zeros"],
)
def test_broken_bodies_are_refused(content: bytes, client: httpx.Client) -> None:
    response = client.post("/tokenize", content=content)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert response.json()["error"]["field"] in ("body", "content")


def test_a_body_is_json_whatever_it_is_called(client: httpx.Client) -> None:
    headers = {"content-type": "application/x-www-form-urlencoded"}  # what `curl -d` says
    assert client.post("/tokenize", content=b'{"content": "hi"}', headers=headers).status_code == 200
