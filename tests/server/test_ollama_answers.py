"""Ollama's own client against the running server: chat, generate and embeddings, streaming and not."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import httpx
import ollama
import pytest
from jsonschema import validate
from questions import ANSWER
from running_server import RunningServer

from mlxr.registry import Changes

ASK = "What does os.path.join do?"
MESSAGES = [{"role": "user", "content": ASK}]
GREEDY = {"temperature": 0}
THINKING = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{{ '<|im_start|>assistant\n' }}{% if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\n\n</think>\n\n' }}{% else %}{{ '<think>\n' }}{% endif %}"
)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["join", "split"]}, "count": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["name", "count"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def api(server: str) -> Iterator[ollama.Client]:
    with ollama.Client(server) as client:
        yield client


@pytest.fixture(scope="module")
def thinker(running: RunningServer) -> str:
    registry = running.app.state.parts.registry
    registry.derive("ollama-thinker", registry.get("demo"), Changes(template=THINKING))
    return "ollama-thinker"


def test_chat(api: ollama.Client) -> None:
    reply = api.chat("demo", MESSAGES, options=GREEDY)
    assert (reply.message.role, reply.message.content) == ("assistant", ANSWER)
    assert (reply.model, reply.done, reply.done_reason) == ("demo", True, "stop")
    assert (reply.message.thinking, reply.message.tool_calls, reply.logprobs) == (None, None, None)
    assert reply.created_at is not None
    assert reply.created_at.endswith("Z")
    assert reply.prompt_eval_count == 17
    assert reply.eval_count == 20
    times = (reply.total_duration, reply.prompt_eval_duration, reply.eval_duration)
    assert all(isinstance(time, int) and time > 0 for time in times)
    assert times[0] >= times[1] + times[2]  # type: ignore[operator]
    assert reply.load_duration == 0


def test_chat_streams_the_same(api: ollama.Client) -> None:
    pieces = list(api.chat("demo", MESSAGES, stream=True, options=GREEDY))
    assert "".join(piece.message.content or "" for piece in pieces) == ANSWER
    assert len(pieces) > 5
    assert [piece.done for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert all(piece.done_reason is None and piece.eval_count is None for piece in pieces[:-1])
    assert all(piece.message.content for piece in pieces[:-1])
    assert (pieces[-1].done_reason, pieces[-1].eval_count, pieces[-1].message.content) == ("stop", 20, "")


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_streaming_is_the_default_and_lines_are_json(client: httpx.Client, path: str) -> None:
    body = (
        {"model": "demo", "options": GREEDY, "prompt": ASK}
        if "gen" in path
        else {"model": "demo", "messages": MESSAGES}
    )
    reply = client.post(path, json=body)
    assert reply.headers["content-type"] == "application/x-ndjson"
    assert len([json.loads(line) for line in reply.text.splitlines()]) > 2
    whole = client.post(path, json={**body, "stream": False})
    assert whole.headers["content-type"] == "application/json"
    assert whole.json()["done"] is True


def test_generate(api: ollama.Client) -> None:
    reply = api.generate("demo", ASK, options=GREEDY)
    assert (reply.response, reply.done_reason, reply.eval_count) == (ANSWER, "stop", 20)
    pieces = list(api.generate("demo", ASK, stream=True, options=GREEDY))
    assert "".join(piece.response or "" for piece in pieces) == ANSWER
    assert pieces[-1].context == reply.context
    assert all(piece.context is None for piece in pieces[:-1])


def test_context_goes_on_with_the_conversation(api: ollama.Client) -> None:
    first = api.generate("demo", ASK, options=GREEDY)
    second = api.generate("demo", "What does json.dumps do?", context=first.context, options=GREEDY)
    assert second.prompt_eval_count > len(first.context or [])  # type: ignore[operator]
    assert list(second.context or [])[: len(first.context or [])] == list(first.context or [])
    assert second.response


def test_a_context_holds_the_messages_of_its_model(running: RunningServer, api: ollama.Client) -> None:
    registry = running.app.state.parts.registry
    taught = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    registry.derive("ollama-taught", registry.get("demo"), Changes(messages=taught))
    options = {**GREEDY, "num_predict": 1}
    first = api.generate("ollama-taught", ASK, options=options).context
    again = api.generate("ollama-taught", ASK, context=first, options=options).context
    assert first is not None
    assert list(api.generate("demo", ASK, context=first, options=options).context or []) == list(again or [])
    assert len(first) > len(api.generate("demo", ASK, options=options).context or [])


def test_a_request_brings_a_template(api: ollama.Client, client: httpx.Client) -> None:
    options = {**GREEDY, "num_predict": 1}
    go = api.generate("demo", "1 2 3", system="S", template="{{ .System }}|{{ .Prompt }}", options=options)
    raw = api.generate("demo", "S|1 2 3", raw=True, options=options)
    assert (go.response, go.prompt_eval_count) == (raw.response, raw.prompt_eval_count)
    asked = {"model": "demo", "messages": [{"role": "user", "content": "1 2 3"}], "max_tokens": 1}
    for given, text in (
        ("{{ messages[0].content }}{{ end }}", "1 2 3!"),
        ("zephyr", "<|user|>\n1 2 3<|im_end|>\n<|assistant|>\n"),
    ):
        brought = {**asked, "chat_template": given, "chat_template_kwargs": {"end": "!"}}
        assert client.post("/apply-template", json=brought).json()["prompt"] == text
        assert client.post("/v1/chat/completions", json=brought).status_code == 200
    for change, start in (
        ({"chat_template": "/etc/passwd"}, "chat_template: is no template, and none has the name"),
        ({"chat_template": "{% if %}"}, "chat_template: chat template that was given, line 1"),
        ({"chat_template": "{{ raise_exception('no') }}"}, "chat template that was given, line 1: no"),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs: is a variable"),
    ):
        refused = client.post("/v1/chat/completions", json={**asked, **change})
        assert refused.status_code == 400
        assert refused.json()["error"]["message"].startswith(start)
        assert client.post("/apply-template", json={**asked, **change}).json()["error"]["message"].startswith(start)


def test_raw_continues_text(api: ollama.Client) -> None:
    reply = api.generate("demo", "import os\n", raw=True, options={**GREEDY, "num_predict": 5})
    assert (reply.done_reason, reply.eval_count, reply.context) == ("length", 5, None)
    assert reply.prompt_eval_count < 10  # type: ignore[operator]


def test_system_is_a_message(api: ollama.Client) -> None:
    plain = api.generate("demo", ASK, options={**GREEDY, "num_predict": 1})
    with_system = api.generate("demo", ASK, system="Be brief.", options={**GREEDY, "num_predict": 1})
    chat = [{"role": "system", "content": "Be brief."}, *MESSAGES]
    as_chat = api.chat("demo", chat, options={**GREEDY, "num_predict": 1})
    assert with_system.prompt_eval_count == as_chat.prompt_eval_count
    assert with_system.prompt_eval_count > plain.prompt_eval_count  # type: ignore[operator]


def test_options(api: ollama.Client) -> None:
    stopped = api.chat("demo", MESSAGES, options={**GREEDY, "stop": ["pathname"]})
    assert (stopped.message.content, stopped.done_reason) == ("`os.path.join`: Join two or more ", "stop")
    cut = api.chat("demo", MESSAGES, options={**GREEDY, "num_predict": 3})
    assert (cut.done_reason, cut.eval_count) == ("length", 3)
    warm = {"temperature": 1.5, "seed": 7, "num_predict": 12, "top_k": 0, "top_p": 1.0}
    assert api.chat("demo", MESSAGES, options=warm).message == api.chat("demo", MESSAGES, options=warm).message
    others = {"num_ctx": 512, "num_thread": 2, "mirostat": 0, "num_gpu": 1, "use_mmap": True, "low_vram": False}
    assert api.chat("demo", MESSAGES, options={**GREEDY, **others}).message.content == ANSWER
    assert api.chat("demo", MESSAGES, options={**warm, "top_k": 1}).message.content == ANSWER[:53]


def test_a_models_own_options_hold_unless_the_request_says_otherwise(
    running: RunningServer, api: ollama.Client
) -> None:
    registry = running.app.state.parts.registry
    taught = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    changes = Changes(parameters={"temperature": 0, "num_predict": 2}, system="Be brief.", messages=taught)
    registry.derive("ollama-own", registry.get("demo"), changes)
    reply = api.chat("ollama-own", MESSAGES)
    assert reply.eval_count == 2
    assert reply.prompt_eval_count > 25  # type: ignore[operator]
    assert api.chat("ollama-own", MESSAGES, options={"num_predict": 4}).eval_count == 4
    assert api.generate("ollama-own", ASK).prompt_eval_count == reply.prompt_eval_count


@pytest.mark.parametrize("stream", [False, True])
def test_format_schema(api: ollama.Client, stream: bool) -> None:
    replies: Any = api.chat("demo", MESSAGES, format=SCHEMA, stream=stream, options={"temperature": 1, "seed": 3})
    text = "".join(reply.message.content for reply in replies) if stream else replies.message.content
    validate(json.loads(text), SCHEMA)


def test_format_json(api: ollama.Client) -> None:
    reply = api.generate("demo", ASK, format="json", options={**GREEDY, "num_predict": 60})
    assert reply.response.startswith("{")
    if reply.done_reason == "stop":
        assert isinstance(json.loads(reply.response), dict)
    assert api.generate("demo", ASK, format="", options=GREEDY).response == ANSWER


@pytest.mark.parametrize("path", ["chat", "generate"])
def test_logprobs(api: ollama.Client, path: str) -> None:
    options = {**GREEDY, "num_predict": 4}
    if path == "chat":
        reply: Any = api.chat("demo", MESSAGES, logprobs=True, top_logprobs=2, options=options)
        pieces: Any = list(api.chat("demo", MESSAGES, logprobs=True, stream=True, options=options))
    else:
        reply = api.generate("demo", ASK, logprobs=True, top_logprobs=2, options=options)
        pieces = list(api.generate("demo", ASK, logprobs=True, stream=True, options=options))
    assert [token.token for token in reply.logprobs] == ["`os", ".path", ".join", "`:"]
    for token in reply.logprobs:
        assert len(token.top_logprobs) == 2
        assert token.top_logprobs[0].logprob == token.logprob <= 0
        assert math.isfinite(token.top_logprobs[1].logprob)
    streamed = [token for piece in pieces for token in piece.logprobs or []]
    assert [token.logprob for token in streamed] == [token.logprob for token in reply.logprobs]
    assert streamed[0].top_logprobs is None


def test_thinking(api: ollama.Client, thinker: str) -> None:
    options = {**GREEDY, "num_predict": 12}
    reply = api.chat(thinker, MESSAGES, think=True, options=options)
    assert reply.message.thinking
    assert reply.message.content == ""
    pieces = list(api.chat(thinker, MESSAGES, think="high", stream=True, options=options))
    assert "".join(piece.message.thinking or "" for piece in pieces) == reply.message.thinking
    off = api.chat(thinker, MESSAGES, think=False, options=options)
    assert off.message.thinking is None
    assert off.message.content
    generated = api.generate(thinker, ASK, think=True, options=options)
    assert (generated.thinking, generated.response) == (reply.message.thinking, "")
    assert api.generate("demo", ASK, think=False, options=GREEDY).response == ANSWER
    for think in (True, "low"):
        with pytest.raises(ollama.ResponseError, match="'demo' does not support thinking") as caught:
            api.chat("demo", MESSAGES, think=think)  # type: ignore[arg-type]
        assert caught.value.status_code == 400


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def test_tools(api: ollama.Client) -> None:
    plain = api.chat("demo", MESSAGES, options={**GREEDY, "num_predict": 8})
    reply = api.chat("demo", MESSAGES, tools=[add], options={**GREEDY, "num_predict": 8})
    assert reply.prompt_eval_count > plain.prompt_eval_count + 20  # type: ignore[operator]
    conversation: list[dict[str, Any]] = [
        *MESSAGES,
        {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1, "b": 2}}}]},
        {"role": "tool", "content": "3", "tool_name": "add"},
        {"role": "user", "content": ASK},
    ]
    assert api.chat("demo", conversation, tools=[add], options={**GREEDY, "num_predict": 8}).done


def test_a_conversation_that_is_too_long_loses_its_oldest_messages(api: ollama.Client, client: httpx.Client) -> None:
    long = [{"role": "system", "content": "Be brief."}]
    for number in range(80):
        long += [{"role": "user", "content": f"{number} " + "words and more words " * 10}]
        long += [{"role": "assistant", "content": "Yes."}]
    options = {**GREEDY, "num_predict": 4}
    reply = api.chat("demo", [*long, *MESSAGES], options=options)
    assert 1500 < reply.prompt_eval_count < 2048  # type: ignore[operator]
    body = {"model": "demo", "messages": [*long, *MESSAGES], "options": options, "stream": False, "truncate": False}
    refused = client.post("/api/chat", json=body)
    assert (refused.status_code, list(refused.json())) == (400, ["error"])
    assert "maximum context length is 2048 tokens" in refused.json()["error"]
    assert "input length exceeds the context length" in refused.json()["error"]


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_one_text_that_is_too_long_is_cut_in_the_middle(client: httpx.Client, path: str) -> None:
    text = "first " + "words " * 4000 + "last"
    asked = {"messages": [{"role": "user", "content": text}]} if path == "/api/chat" else {"prompt": text}

    def ask(**options: object) -> dict[str, Any]:
        body = {"model": "demo", **asked, "stream": False, "options": {**GREEDY, "num_predict": 4, **options}}
        reply = client.post(path, json=body)
        assert reply.status_code == 200, reply.text
        found: dict[str, Any] = reply.json()
        return found

    assert ask()["prompt_eval_count"] == 2048 - 4
    assert ask(num_ctx=100_000)["prompt_eval_count"] == 2048 - 4  # as far as the model goes
    cut = ask(num_ctx=64, num_keep=8)
    assert (cut["prompt_eval_count"], cut["eval_count"]) == (60, 4)
    assert ask(num_ctx=64, num_predict=-1)["prompt_eval_count"] == 32  # half of it is for the answer
    assert ask(num_ctx=64, num_keep=-1)["prompt_eval_count"] == 60
    asked["truncate"] = False  # type: ignore[assignment]
    refused = client.post(path, json={"model": "demo", **asked, "options": {"num_ctx": 64}})
    assert refused.status_code == 400
    assert "maximum context length is 64 tokens" in refused.json()["error"]


def test_the_answer_ends_where_num_ctx_does(api: ollama.Client) -> None:
    for options in ({"num_ctx": 40}, {"num_ctx": 40, "num_predict": 30}):
        reply = api.generate("demo", "def f(a, b, c):\n" * 2, raw=True, options={**GREEDY, **options})
        assert (reply.prompt_eval_count or 0) + (reply.eval_count or 0) == 40
        assert reply.done_reason == "length"


def test_embed(api: ollama.Client) -> None:
    reply = api.embed("demo", ["os.path.join", "json.dumps", ""])
    assert [len(vector) for vector in reply.embeddings] == [512] * 3
    assert all(math.isclose(sum(x * x for x in vector), 1, rel_tol=1e-4) for vector in reply.embeddings)
    one = api.embed("demo", "os.path.join")
    assert one.embeddings[0] == reply.embeddings[0]
    assert (
        one.prompt_eval_count
        == api.generate("demo", "os.path.join", raw=True, options={"num_predict": 1}).prompt_eval_count
    )
    assert [len(vector) for vector in api.embed("demo", "x", dimensions=16).embeddings] == [16]
    assert api.embed("demo", []).embeddings == []
    long = "word " * 5000
    assert api.embed("demo", long).prompt_eval_count == 2048
    with pytest.raises(ollama.ResponseError, match=r"input: text 0: .*and this one has.* input length exceeds"):
        api.embed("demo", long, truncate=False)


def test_old_embeddings(api: ollama.Client) -> None:
    old = api.embeddings("demo", "os.path.join").embedding
    new = api.embed("demo", "os.path.join").embeddings[0]
    length = math.sqrt(sum(x * x for x in old))
    assert all(math.isclose(a / length, b, abs_tol=1e-5) for a, b in zip(old, new, strict=True))
    assert api.embeddings("demo", "").embedding == []


@pytest.mark.one_server("each replica loads and unloads models by itself")
def test_load_and_unload(api: ollama.Client, client: httpx.Client, running: RunningServer) -> None:
    registry = running.app.state.parts.registry
    registry.copy("demo-draft", "ollama-draft")
    loaded = api.generate("ollama-draft", "", keep_alive="10m")
    assert (loaded.response, loaded.done, loaded.done_reason) == ("", True, "load")
    (model,) = [model for model in api.ps().models if model.name == "ollama-draft:latest"]
    assert model.size > 4_000_000  # type: ignore[operator]
    assert 9 < minutes_left(model.expires_at) <= 10
    assert api.chat("ollama-draft", [], keep_alive=-1).done_reason == "load"
    (model,) = [model for model in api.ps().models if model.name == "ollama-draft:latest"]
    assert minutes_left(model.expires_at) > 1e6
    assert api.chat("ollama-draft", keep_alive=0).done_reason == "unload"
    assert "ollama-draft:latest" not in [model.name for model in api.ps().models]
    reply = api.chat("ollama-draft", MESSAGES, keep_alive=0, options={"num_predict": 1})
    assert reply.load_duration > 0  # type: ignore[operator]
    body = {"model": "ollama-draft", "keep_alive": "0s"}
    assert client.post("/api/generate", json=body).json()["done_reason"] == "unload"
    assert "ollama-draft:latest" not in [model.name for model in api.ps().models]


def minutes_left(end: Any) -> float:
    return float((end - datetime.now(UTC)).total_seconds() / 60)


def test_the_asynchronous_client(server: str) -> None:
    async def talk() -> tuple[str, str]:
        async with ollama.AsyncClient(server) as api:
            pieces = [piece async for piece in await api.chat("demo", MESSAGES, stream=True, options=GREEDY)]
            reply = await api.generate("demo", ASK, options=GREEDY)
            return "".join(piece.message.content or "" for piece in pieces), reply.response

    assert asyncio.run(talk()) == (ANSWER, ANSWER)
