"""Parameters and messages that a model was made with hold in every dialect, unless a request says otherwise."""

from __future__ import annotations

import httpx
import pytest
from running_server import RunningServer

from mlxr.registry import Changes

QUESTION = {"role": "user", "content": "What does os.path.join do?"}
START = "`os.path.join`: Join two or more pathname "
CHAT, RESPONSE, MESSAGE = "/v1/chat/completions", "/v1/responses", "/v1/messages"


@pytest.fixture(scope="module")
def made(running: RunningServer) -> str:
    registry = running.app.state.parts.registry
    parameters = {"temperature": 0.0, "stop": ["components"], "num_predict": 30, "seed": -1, "top_k": 40}
    changes = Changes(parameters=parameters, messages=[{"role": "system", "content": "Be short."}])
    registry.derive("made", registry.get("demo"), changes)
    return "made"


def ask(client: httpx.Client, path: str, model: str, **options: object) -> tuple[str, int]:
    """The text of the answer and the length of the prompt."""
    body: dict[str, object] = {"model": model, **options}
    body |= {"input": QUESTION["content"]} if path == RESPONSE else {"messages": [QUESTION]}
    reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    usage = answer["usage"]
    if path == CHAT:
        return answer["choices"][0]["message"]["content"], usage["prompt_tokens"]
    if path == RESPONSE:
        return answer["output"][0]["content"][0]["text"], usage["input_tokens"]
    return answer["content"][0]["text"], usage["input_tokens"] + usage["cache_read_input_tokens"]


@pytest.mark.parametrize("path", [CHAT, RESPONSE, MESSAGE])
def test_what_a_model_brings_along(client: httpx.Client, made: str, path: str) -> None:
    options = {"max_tokens": 50} if path == MESSAGE else {}
    text, prompt_tokens = ask(client, path, made, **options)
    assert text == START
    assert prompt_tokens > ask(client, path, "demo", **options)[1]


def test_a_request_has_the_last_word(client: httpx.Client, made: str) -> None:
    text, _ = ask(client, CHAT, made, max_completion_tokens=3, stop=["zzz"])
    assert text == "`os.path.join"
    whole, _ = ask(client, CHAT, made, max_completion_tokens=60, stop=["zzz"])
    assert whole.startswith(START + "components")


def test_text_completions_have_them_too(client: httpx.Client, made: str) -> None:
    body = {"model": made, "prompt": "import os\n", "stop": [], "ignore_eos": True}
    assert client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 30
