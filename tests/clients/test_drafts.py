"""Clients set drafts in each dialect's words: the answer stays the same, and the guesses are counted."""

from __future__ import annotations

import re
from typing import Any

import httpx
import ollama
import openai
import pytest
from questions import MESSAGES
from served import Served

PROMPT = "def add(a, b):\n    return a + b\n" * 4
FIELDS = ("draft_tokens", "speculative.n_max")


@pytest.fixture
def ai(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.v1, api_key="none", max_retries=0)


def read_timings(reply: Any) -> dict[str, Any]:
    return dict((reply.model_extra or {})["timings"])


@pytest.mark.parametrize("field", FIELDS)
def test_openai_without_drafts(ai: openai.OpenAI, served: Served, field: str) -> None:
    """Chats, texts and Responses."""
    common, without = {"model": served.model, "temperature": 0}, {"extra_body": {field: 0}}
    chats = [
        ai.chat.completions.create(messages=MESSAGES, max_tokens=30, **common, **more)  # type: ignore[call-overload]
        for more in ({}, without)
    ]
    texts = [ai.completions.create(prompt=PROMPT, max_tokens=30, **common, **more) for more in ({}, without)]  # type: ignore[call-overload]
    said = [
        ai.responses.create(input="What is a list?", max_output_tokens=30, **common, **more)  # type: ignore[call-overload]
        for more in ({}, without)
    ]
    assert chats[0].choices[0].message == chats[1].choices[0].message
    assert texts[0].choices[0].text == texts[1].choices[0].text
    assert said[0].output_text == said[1].output_text
    for reply in (chats[1], texts[1]):
        assert read_timings(reply)["draft_n"] == 0


def test_openai_prediction(ai: openai.OpenAI, served: Served) -> None:
    common = {"model": served.model, "messages": MESSAGES, "temperature": 0, "max_tokens": 60}
    plain = ai.chat.completions.create(**common)  # type: ignore[call-overload]
    text = plain.choices[0].message.content
    raw = ai.chat.completions.with_raw_response.create(prediction={"type": "content", "content": text}, **common)  # type: ignore[call-overload]
    assert "x-mlxr-ignored" not in raw.headers
    reply = raw.parse()
    assert reply.choices[0].message.content == text
    details = reply.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > reply.usage.completion_tokens // 2
    timings = read_timings(reply)
    assert timings["draft_n_accepted"] <= timings["draft_n"]
    parts = [{"type": "text", "text": text}]
    pieces = ai.chat.completions.create(
        stream=True, stream_options={"include_usage": True}, prediction={"type": "content", "content": parts}, **common
    )  # type: ignore[call-overload]
    *chunks, last = list(pieces)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert last.usage.completion_tokens_details == details


def count_drafted(served: Served) -> float:
    """Tokens drafted so far."""
    text = httpx.get(f"{served.url}/metrics", timeout=60).text
    return sum(float(value) for value in re.findall(r"^mlxr\S*drafted_tokens\S* (\S+)$", text, re.MULTILINE))


def test_ollama_options_and_a_models_own(served: Served, request: pytest.FixtureRequest) -> None:
    api, options = ollama.Client(served.url), {"temperature": 0, "num_predict": 30}
    wanted = api.generate(served.model, prompt=PROMPT, raw=True, options={**options, "draft_num_predict": 4}).response
    chat = api.chat(served.model, messages=MESSAGES, options=options).message.content
    before = count_drafted(served)
    for most in (0, -1):
        less = {**options, "draft_num_predict": most}
        assert api.generate(served.model, prompt=PROMPT, raw=True, options=less).response == wanted
        assert api.chat(served.model, messages=MESSAGES, options=less).message.content == chat
    assert count_drafted(served) == before
    if request.config.getoption("--cluster"):
        return  # a cluster refuses to change models
    assert "drafted_tokens" in httpx.get(f"{served.url}/metrics", timeout=60).text
    api.create("plain", from_=served.model, parameters={"draft_num_predict": 0}, stream=False)
    assert "draft_num_predict 0" in (api.show("plain").modelfile or "")
    assert api.generate("plain", prompt=PROMPT, raw=True, options=options).response == wanted
    assert count_drafted(served) == before
    api.delete("plain")


@pytest.mark.parametrize("field", FIELDS)
def test_llamacpp_completion(served: Served, field: str) -> None:
    body = {"prompt": PROMPT, "n_predict": 30, "temperature": 0}
    replies = [httpx.post(f"{served.url}/completion", json=body | more, timeout=60).json() for more in ({}, {field: 0})]
    assert replies[0]["content"] == replies[1]["content"]
    assert replies[1]["timings"]["draft_n"] == 0
