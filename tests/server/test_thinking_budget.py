"""Budgets of thoughts in every dialect, and thoughts that a request ends while they grow."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from running_server import RunningServer, start_server, wait_until
from test_thinking_models import QUESTION, TEMPLATE

from mlxr.core.model_settings import THINKING_MESSAGE
from mlxr.registry import Changes

CHAT, RESPONSE, MESSAGE, OLLAMA = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"
SPENT = 6


@pytest.fixture(scope="module")
def thinker(running: RunningServer) -> str:
    registry = running.app.state.parts.registry
    registry.derive("budgeted", registry.get("demo"), Changes(template=TEMPLATE), replaces=True)
    return "budgeted"


def ask(client: httpx.Client, path: str, model: str, **options: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": 90, "messages": QUESTION, "stream": False}
    if path == RESPONSE:
        body |= {"input": QUESTION, "max_output_tokens": body.pop("max_tokens")}
        del body["messages"]
    if path == OLLAMA:
        body = {"model": model, "messages": QUESTION, "stream": False}
        options = {"options": {"temperature": 0, "num_predict": 90, **options.pop("options", {})}, **options}
    reply = client.post(path, json=body | options)
    assert reply.status_code == 200, reply.text
    assert "x-mlxr-ignored" not in reply.headers, reply.headers["x-mlxr-ignored"]
    return reply.json()  # type: ignore[no-any-return]


def tell_apart(path: str, reply: dict[str, Any]) -> tuple[str, str, int]:
    """Return thought, text, and the number of thought tokens in the usage."""
    if path == CHAT:
        message, details = reply["choices"][0]["message"], reply["usage"]["completion_tokens_details"]
        return message.get("reasoning_content", ""), message["content"], details["reasoning_tokens"]
    if path == RESPONSE:
        texts = {item["type"]: "".join(part["text"] for part in item["content"]) for item in reply["output"]}
        tokens = reply["usage"]["output_tokens_details"]["reasoning_tokens"]
        return texts.get("reasoning", ""), texts.get("message", ""), tokens
    if path == MESSAGE:
        blocks = {block["type"]: block.get("thinking", block.get("text")) for block in reply["content"]}
        tokens = reply["usage"]["output_tokens_details"]["thinking_tokens"]
        return blocks.get("thinking", ""), blocks.get("text", ""), tokens
    return reply["message"].get("thinking", ""), reply["message"]["content"], reply.get("thinking_count", 0)


def on(tokens: int) -> dict[str, object]:
    return {"type": "enabled", "budget_tokens": tokens}


@pytest.mark.parametrize(
    ("path", "options"),
    [
        *((CHAT, {name: SPENT}) for name in ("thinking_budget", "thinking_budget_tokens", "thinking_token_budget")),
        *((CHAT, {name: SPENT}) for name in ("reasoning_budget", "reasoning_budget_tokens")),
        (CHAT, {"reasoning": {"max_tokens": SPENT}}),
        (CHAT, {"reasoning": {"effort": "high", "max_tokens": SPENT}}),
        (RESPONSE, {"thinking_budget": SPENT}),
        (RESPONSE, {"reasoning": {"max_tokens": SPENT}}),
        (MESSAGE, {"thinking": on(SPENT)}),
        (MESSAGE, {"thinking": {"type": "enabled"}, "thinking_budget": SPENT}),
        (OLLAMA, {"options": {"thinking_budget": SPENT}}),
        (OLLAMA, {"think": True, "options": {"reasoning_budget": SPENT}}),
    ],
)
def test_a_budget_in_every_dialect(client: httpx.Client, thinker: str, path: str, options: dict[str, Any]) -> None:
    thought, text, tokens = tell_apart(path, ask(client, path, thinker, **options))
    free, _, _ = tell_apart(CHAT, ask(client, CHAT, thinker))
    begun, _, message = thought.partition("\n\n")
    assert message == THINKING_MESSAGE
    assert free.startswith(begun)
    assert text
    assert tokens > SPENT
    unbounded = {"thinking_budget": -1} if path != OLLAMA else {"options": {"thinking_budget": -1}}
    if path != MESSAGE:
        assert tell_apart(path, ask(client, path, thinker, **unbounded))[0] == free


@pytest.mark.parametrize(
    ("path", "options"),
    [
        (CHAT, {"thinking_budget": 0}),
        (CHAT, {"reasoning": {"max_tokens": 0}}),
        (CHAT, {"reasoning": {"enabled": False}}),
        (RESPONSE, {"reasoning": {"max_tokens": 0}}),
        (MESSAGE, {"thinking": on(0)}),
        (OLLAMA, {"options": {"thinking_budget": 0}}),
    ],
)
def test_no_budget_is_no_thought(client: httpx.Client, thinker: str, path: str, options: dict[str, Any]) -> None:
    silent = ask(client, CHAT, thinker, reasoning_effort="none")["choices"][0]["message"]["content"]
    assert tell_apart(path, ask(client, path, thinker, **options)) == ("", silent, 0)


def test_a_stream_is_the_whole(client: httpx.Client, thinker: str) -> None:
    options = {"thinking_budget": SPENT, "n": 2, "temperature": 1.0, "seed": 5}
    whole = [choice["message"] for choice in ask(client, CHAT, thinker, **options)["choices"]]
    body = {"model": thinker, "messages": QUESTION, "max_tokens": 90, **options, "stream": True}
    lines = client.post(CHAT, json=body).text.split("\n")
    pieces = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    for index, message in enumerate(whole):
        deltas = [one["delta"] for piece in pieces for one in piece["choices"] if one["index"] == index]
        for name in ("reasoning_content", "content"):
            assert "".join(delta.get(name) or "" for delta in deltas) == message[name]
        assert message["reasoning_content"].endswith(THINKING_MESSAGE)


def test_a_schema_holds_behind_a_thought_that_was_closed(client: httpx.Client, thinker: str) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    reply = ask(client, CHAT, thinker, thinking_budget=SPENT, response_format=wanted)
    thought, text, _ = tell_apart(CHAT, reply)
    assert thought.endswith(THINKING_MESSAGE)
    assert json.loads(text)["a"] in (1, 2)
    assert reply["choices"][0]["finish_reason"] == "stop"


def test_a_message_of_the_request_is_said(client: httpx.Client, thinker: str) -> None:
    reply = ask(client, CHAT, thinker, thinking_budget=SPENT, reasoning_budget_message="Enough.")
    assert tell_apart(CHAT, reply)[0].endswith("\n\nEnough.")


def test_a_text_with_a_thought_is_bounded_too(client: httpx.Client, thinker: str) -> None:
    prompt = "<|im_start|>user\nWhat does os.path.join do?<|im_end|>\n<|im_start|>assistant\n<think>\n"
    for path, name in (("/v1/completions", "max_tokens"), ("/completion", "n_predict")):
        body = {"model": thinker, "prompt": prompt, name: 90, "temperature": 0}
        reply = client.post(path, json=body | {"reasoning_budget_tokens": SPENT}).json()
        text = reply["choices"][0]["text"] if path == "/v1/completions" else reply["content"]
        assert f"\n\n{THINKING_MESSAGE}\n</think>" in text
        plain = client.post(path, json=body | {"prompt": "import os"} | {"reasoning_budget_tokens": 1}).json()
        assert "</think>" not in json.dumps(plain["choices"] if "choices" in plain else plain["content"])


def test_what_is_no_budget_is_refused(client: httpx.Client, thinker: str) -> None:
    for path, options, field in (
        (CHAT, {"thinking_budget": -2}, "thinking_budget"),
        (CHAT, {"reasoning": {"max_tokens": "9"}}, "reasoning.max_tokens"),
        (RESPONSE, {"reasoning_budget": 1.5}, "reasoning_budget"),
    ):
        reply = client.post(path, json={"model": thinker, "messages": QUESTION, "input": "Hi", **options})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)
    assert (
        "budget_tokens"
        in client.post(
            MESSAGE, json={"model": thinker, "messages": QUESTION, "max_tokens": 9, "thinking": on(-1)}
        ).json()["error"]["message"]
    )


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server whose models think for 6 tokens, with a model that was made to think for 3."""
    server = start_server(
        tmp_path_factory.mktemp("thinking"), thinking_budget_tokens=SPENT, thinking_message="Now.", api_keys="a,b"
    )
    registry = server.app.state.parts.registry
    registry.derive("thinker", registry.get("demo"), Changes(template=TEMPLATE))
    registry.derive("brief", registry.get("thinker"), Changes(parameters={"thinking_budget": 3}))
    yield server
    server.stop()


def test_settings_models_efforts_and_requests(own: RunningServer) -> None:
    with own.client("a") as client:

        def think(model: str, **options: object) -> str:
            return tell_apart(CHAT, ask(client, CHAT, model, **options))[0]

        free = think("thinker", thinking_budget=-1)
        by_setting, by_model = think("thinker"), think("brief")
        assert by_setting.endswith("\n\nNow.")
        assert by_model.endswith("\n\nNow.")
        assert len(by_model) < len(by_setting)
        assert think("brief", reasoning_effort="high") == by_model
        assert think("brief", thinking_budget=SPENT) == by_setting
        assert think("thinker", reasoning_effort="high") == think("thinker", reasoning_effort="max") == free
        assert think("thinker", reasoning_effort="none") == ""


@pytest.mark.parametrize("by", ["request", "reply", "llama.cpp"])
def test_a_thought_is_ended_while_it_grows(own: RunningServer, by: str) -> None:
    names = {"x-request-id": f"thinks-{by.replace('.', '-')}"}
    body = {"model": "thinker", "messages": QUESTION, "thinking_budget": -1, "max_tokens": 1500, "stream": True}
    body |= {"temperature": 2.0, "seed": 1, "min_tokens": 1400, "reasoning_control": True}
    thoughts, texts = list[str](), list[str]()
    with (
        own.client("a") as client,
        own.client("b") as other,
        client.stream("POST", CHAT, json=body, headers=names) as reply,
    ):
        lines = (json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: {"))
        first = next(lines)
        target = first["id"] if by != "request" else names["x-request-id"]
        path, word = f"/v1/admin/requests/{target}/end_thinking", None
        if by == "llama.cpp":
            path, word = f"{CHAT}/control", {"id": target, "action": "reasoning_end"}
        assert other.post(path, json=word).status_code == 404, "only who asked may end it"
        with own.client("a") as again:
            assert again.post(path, json=word).status_code == 200
        for piece in lines:
            delta = piece["choices"][0]["delta"]
            thoughts.append(delta.get("reasoning_content") or "")
            texts.append(delta.get("content") or "")
            if "".join(texts).strip():
                break
    assert "".join(thoughts).endswith("\n\nNow.")


def test_only_answers_that_think_can_be_ended(own: RunningServer) -> None:
    with own.client("a") as client:
        assert client.post("/v1/admin/requests/none/end_thinking").status_code == 404
        assert client.post(f"{CHAT}/control", json={"id": "x", "action": "reasoning_end"}).status_code == 404
        assert client.post(f"{CHAT}/control", json={"id": "x", "action": "other"}).status_code == 400
        statuses = list[int]()

        def end() -> None:
            wait_until(lambda: any(row.generated_tokens for row in own.app.state.parts.activity))
            with own.client("a") as other:
                statuses.append(other.post("/v1/admin/requests/plain/end_thinking").status_code)
                other.delete("/v1/admin/requests/plain")

        thread = threading.Thread(target=end)
        thread.start()
        body = {"model": "demo", "messages": QUESTION, "max_tokens": 1500, "ignore_eos": True}
        client.post(CHAT, json=body, headers={"x-request-id": "plain"})
        thread.join()
        assert statuses == [400]
