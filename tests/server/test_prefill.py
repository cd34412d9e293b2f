"""A last message of the assistant is continued in every dialect."""

from __future__ import annotations

import httpx
import pytest

USER = {"role": "user", "content": "Write a function that adds two numbers."}
BEGUN = "def add(a, b):\n    return"
MESSAGES = [USER, {"role": "assistant", "content": BEGUN}]
GREEDY = {"max_tokens": 6, "temperature": 0}


def go_on(client: httpx.Client, **fields: object) -> dict:
    reply = client.post("/v1/chat/completions", json={"messages": MESSAGES, **GREEDY, "verbose": True, **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.fixture(scope="module")
def expected(server: str) -> str:
    """The model's continuation of the begun answer, asked for as plain text."""
    with httpx.Client(base_url=server, timeout=60) as client:
        prompt = client.post("/apply-template", json={"messages": MESSAGES}).json()["prompt"]
        assert prompt.endswith(BEGUN)
        body = {"prompt": prompt.removeprefix("<|begin_of_text|>"), "n_predict": 6, "temperature": 0}
        return client.post("/completion", json=body).json()["content"]


def test_openai(client: httpx.Client, expected: str) -> None:
    reply = go_on(client)
    assert reply["choices"][0]["message"]["content"] == expected
    assert reply["__verbose"]["prompt"].endswith(BEGUN)
    explicit = go_on(client, continue_final_message=True, add_generation_prompt=False)
    assert explicit["choices"] == reply["choices"]


def test_openai_can_be_asked_for_a_new_message(client: httpx.Client) -> None:
    for fields in ({"add_generation_prompt": True}, {"continue_final_message": False}):
        assert go_on(client, **fields)["__verbose"]["prompt"].endswith("<|im_start|>assistant\n")
    closed = go_on(client, messages=[USER], add_generation_prompt=False)
    assert closed["__verbose"]["prompt"].endswith("<|im_end|>\n")
    assert "__verbose" not in go_on(client, verbose=False)


@pytest.mark.parametrize(
    "fields",
    [
        {"continue_final_message": True, "add_generation_prompt": True},
        {"continue_final_message": True, "messages": [USER]},
        {"response_format": {"type": "json_object"}},
    ],
)
def test_openai_refuses_what_cannot_be(fields: dict, client: httpx.Client) -> None:
    assert client.post("/v1/chat/completions", json={"messages": MESSAGES, **fields}).status_code == 400


def test_ollama(client: httpx.Client, expected: str) -> None:
    body = {"model": "demo", "messages": MESSAGES, "stream": False, "options": {"num_predict": 6, "temperature": 0}}
    assert client.post("/api/chat", json=body).json()["message"]["content"] == expected


def test_anthropic(client: httpx.Client, expected: str) -> None:
    reply = client.post("/v1/messages", json={"model": "demo", "messages": MESSAGES, **GREEDY}).json()
    assert reply["content"][0]["text"] == expected
