"""LiteLLM as its users point it at a server: as OpenAI's, Anthropic's and Ollama's."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from pydantic import BaseModel
from questions import ANSWER, MESSAGES, TOO_LONG, WEATHER, WEATHER_QUESTION
from served import Served

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would ask the network for a price list

import litellm

litellm.telemetry = False


class Report(BaseModel):
    city: str
    degrees: int


@pytest.fixture(params=["openai", "anthropic", "ollama_chat", "hosted_vllm"])
def common(request: pytest.FixtureRequest, served: Served) -> dict[str, Any]:
    base = served.v1 if request.param in {"openai", "hosted_vllm"} else served.url
    model = f"{request.param}/{served.model}"
    return {"model": model, "api_base": base, "api_key": "none", "num_retries": 0, "temperature": 0, "max_tokens": 60}


def test_it_talks(common: dict[str, Any], served: Served) -> None:
    reply = litellm.completion(**common, messages=MESSAGES)
    text = reply.choices[0].message.content
    assert text
    assert served.is_real or text == ANSWER
    assert reply.usage.completion_tokens > 5
    chunks = litellm.completion(**common, messages=MESSAGES, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text


def test_a_round_trip_of_its_own_messages(common: dict[str, Any]) -> None:
    """Its message of an answer, with all its own fields, goes back as history of the next request."""
    first = litellm.completion(**common, messages=MESSAGES).choices[0].message
    history = [*MESSAGES, first, {"role": "user", "content": "Thanks. And os.path.split?"}]
    assert litellm.completion(**common, messages=history).choices[0].message.content
    dumped = [*MESSAGES, first.model_dump(), {"role": "user", "content": "Thanks. And os.path.split?"}]
    assert litellm.completion(**common, messages=dumped).choices[0].message.content


def test_a_message_with_all_its_fields_is_a_history(served: Served) -> None:
    """A call with thoughts, as it keeps one that came from another service."""
    common = {"model": f"openai/{served.model}", "api_base": served.v1, "api_key": "none", "max_tokens": 60}
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
    called = litellm.Message(
        content=None,
        tool_calls=[call],
        reasoning_content="Rome, then.",
        provider_specific_fields={"refusal": None},
        thinking_blocks=[{"type": "thinking", "thinking": "Rome, then.", "signature": "s"}],
    )
    asked = {"role": "user", "content": WEATHER_QUESTION}
    result = {"role": "tool", "tool_call_id": "c1", "name": "get_weather", "content": "sunny"}
    for message in (called, called.model_dump(), called.model_dump(exclude_none=True)):
        assert litellm.completion(**common, messages=[asked, message, result]).choices[0].message.content


@pytest.mark.parametrize("provider", ["openai", "anthropic", "hosted_vllm"])
def test_a_tool_and_its_result(provider: str, served: Served) -> None:
    common = {
        "model": f"{provider}/{served.model}",
        "api_base": served.url if provider == "anthropic" else served.v1,
        "api_key": "none",
        "temperature": 0,
        "max_tokens": 60,
        "tools": [WEATHER],
    }
    question = [{"role": "user", "content": WEATHER_QUESTION}]
    message = litellm.completion(**common, messages=question, tool_choice="required").choices[0].message
    call = message.tool_calls[0]
    assert call.function.name == "get_weather"
    assert set(json.loads(call.function.arguments)) == {"city"}
    assert not served.is_real or json.loads(call.function.arguments) == {"city": "Rome"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny, 21 degrees"}
    for own in (message, message.model_dump()):
        final = litellm.completion(**common, messages=[*question, own, result]).choices[0].message
        assert final.content or final.tool_calls


def test_structured_output(served: Served) -> None:
    common = {"model": f"hosted_vllm/{served.model}", "api_base": served.v1, "temperature": 0, "max_tokens": 150}
    asked = [{"role": "user", "content": "Rome has 21 degrees."}]
    reply = litellm.completion(**common, messages=asked, response_format=Report)
    report = Report.model_validate_json(reply.choices[0].message.content)
    assert not served.is_real or report == Report(city="Rome", degrees=21)


def test_embeddings(served: Served) -> None:
    common = {"model": f"openai/{served.model}", "api_base": served.v1, "api_key": "none"}
    assert len(litellm.embedding(**common, input=["a", "b"], encoding_format="float").data) == 2


def test_it_knows_our_errors(served: Served) -> None:
    common = {"model": f"openai/{served.model}", "api_base": served.v1, "api_key": "none", "num_retries": 0}
    with pytest.raises(litellm.exceptions.BadRequestError, match="temperature"):
        litellm.completion(**common, messages=MESSAGES, temperature=-1)
    for provider, base in (("openai", served.v1), ("anthropic", served.url)):
        asked = {**common, "model": f"{provider}/{served.model}", "api_base": base, "max_tokens": 8}
        with pytest.raises(litellm.exceptions.ContextWindowExceededError):
            litellm.completion(**asked, messages=TOO_LONG)
