"""Anthropic's own Python client: messages, streams, tools and the tool runner, token counts, structured output."""

from __future__ import annotations

import anthropic
import pytest
from pydantic import BaseModel
from questions import ANSWER, MESSAGES, WEATHER, WEATHER_QUESTION
from served import Served

COLD = {"extra_body": {"temperature": 0}}  # the client has no parameter for it any more
TOOL = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": WEATHER["function"]["parameters"],  # type: ignore[index]
}


class Report(BaseModel):
    city: str
    degrees: int


@pytest.fixture
def api(served: Served) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)


def test_it_talks(api: anthropic.Anthropic, served: Served) -> None:
    common = {"model": served.model, "messages": MESSAGES, "max_tokens": 60, **COLD}
    reply = api.messages.create(**common)  # type: ignore[call-overload]
    assert served.is_real or reply.content[0].text == ANSWER
    with api.messages.stream(**common) as stream:  # type: ignore[arg-type]
        assert "".join(stream.text_stream) == reply.content[0].text
        assert stream.get_final_message().usage.output_tokens == reply.usage.output_tokens > 5
    follow_up = [*MESSAGES, {"role": "assistant", "content": reply.content}, {"role": "user", "content": "Thanks."}]
    assert api.messages.create(**{**common, "messages": follow_up}).content  # type: ignore[call-overload]
    counted = api.messages.count_tokens(model=served.model, messages=MESSAGES)  # type: ignore[arg-type]
    assert counted.input_tokens == reply.usage.input_tokens


ONE_CALL = {"type": "any", "disable_parallel_tool_use": True}  # a small model would go on calling until its tokens end


def test_a_tool_and_its_result(api: anthropic.Anthropic, served: Served) -> None:
    common = {"model": served.model, "max_tokens": 60, **COLD, "tools": [TOOL]}
    asked = [{"role": "user", "content": WEATHER_QUESTION}]
    reply = api.messages.create(**common, messages=asked, tool_choice=ONE_CALL)  # type: ignore[call-overload]
    assert reply.stop_reason == "tool_use"
    call = reply.content[-1]
    assert (call.type, call.name) == ("tool_use", "get_weather")
    assert set(call.input) == {"city"}
    assert not served.is_real or call.input == {"city": "Rome"}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "21 degrees"}]}
    history = [*asked, {"role": "assistant", "content": reply.content}, {"role": "user", "content": [result]}]
    assert api.messages.create(**common, messages=history).content  # type: ignore[call-overload]


def test_the_tool_runner(api: anthropic.Anthropic, served: Served) -> None:
    asked = []

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """The weather of a city."""
        asked.append(city)
        return f"{city}: sunny, 21 degrees"

    runner = api.beta.messages.tool_runner(
        model=served.model,
        max_tokens=150,
        **COLD,  # type: ignore[arg-type]
        tools=[get_weather],
        messages=[{"role": "user", "content": WEATHER_QUESTION}],
        tool_choice={"type": "tool", "name": "get_weather"},
        max_iterations=2,
    )
    replies = list(runner)
    assert replies[0].stop_reason == "tool_use"
    assert asked
    assert not served.is_real or asked[0] == "Rome"


def test_structured_output(api: anthropic.Anthropic, served: Served) -> None:
    reply = api.messages.parse(
        model=served.model,
        max_tokens=150,
        **COLD,  # type: ignore[arg-type]
        messages=[{"role": "user", "content": "Rome has 21 degrees."}],
        output_format=Report,
    )
    assert isinstance(reply.parsed_output, Report)
    assert not served.is_real or reply.parsed_output == Report(city="Rome", degrees=21)
