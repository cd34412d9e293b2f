"""Ollama's own Python client: its usual flows. What each field does is tested with the server's own tests."""

from __future__ import annotations

import asyncio

import ollama
import pytest
from pydantic import BaseModel
from questions import ANSWER, MESSAGES, WEATHER_QUESTION
from served import Served

OPTIONS = {"temperature": 0, "num_predict": 60}


class Report(BaseModel):
    city: str
    degrees: int


@pytest.fixture
def api(served: Served) -> ollama.Client:
    return ollama.Client(served.url)


def get_weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: Name of the city.

    Returns:
        Its weather.
    """
    return f"{city}: sunny, 21 degrees"


def test_it_talks(api: ollama.Client, served: Served) -> None:
    reply = api.chat(served.model, MESSAGES, options=OPTIONS)
    assert reply.message.content
    assert served.is_real or reply.message.content == ANSWER
    assert (reply.done, reply.done_reason) == (True, "length" if served.is_real else "stop")
    pieces = list(api.chat(served.model, MESSAGES, stream=True, options=OPTIONS))
    assert "".join(piece.message.content or "" for piece in pieces) == reply.message.content

    async def ask() -> str | None:
        return (await ollama.AsyncClient(served.url).chat(served.model, MESSAGES, options=OPTIONS)).message.content

    assert asyncio.run(ask()) == reply.message.content
    follow_up = [*MESSAGES, reply.message, {"role": "user", "content": "And os.path.split?"}]
    assert api.chat(served.model, follow_up, options=OPTIONS).message.content
    assert api.generate(served.model, MESSAGES[0]["content"], options=OPTIONS).response


def test_structured_output(api: ollama.Client, served: Served) -> None:
    asked = [{"role": "user", "content": "Rome has 21 degrees."}]
    reply = api.chat(served.model, asked, format=Report.model_json_schema(), options=OPTIONS)
    report = Report.model_validate_json(reply.message.content or "")
    assert not served.is_real or report == Report(city="Rome", degrees=21)


def test_a_function_as_a_tool_and_its_result(api: ollama.Client, served: Served) -> None:
    """This protocol cannot force a call, so the history holds one as the client itself would send it."""
    asked = [{"role": "user", "content": WEATHER_QUESTION}]
    assert api.chat(served.model, asked, tools=[get_weather], options=OPTIONS).done
    call = ollama.Message.ToolCall(
        function=ollama.Message.ToolCall.Function(name="get_weather", arguments={"city": "Rome"})
    )
    history = [
        *asked,
        ollama.Message(role="assistant", tool_calls=[call]),
        {"role": "tool", "tool_name": "get_weather", "content": get_weather("Rome")},
    ]
    final = api.chat(served.model, history, tools=[get_weather], options=OPTIONS)
    assert final.message.content or final.message.tool_calls


def test_models(api: ollama.Client, served: Served) -> None:
    shown = api.show(served.model)
    assert "completion" in (shown.capabilities or [])
    assert any(served.model in (model.model or "") for model in api.list().models)
    assert api.ps().models
    assert len(api.embed(served.model, ["a", "b"]).embeddings) == 2
