"""OpenAI's Agents SDK: tools, tools with an output type, handoffs and sessions, over both of OpenAI's protocols."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel
from questions import ANSWER, QUESTION, WEATHER_QUESTION
from served import Served

set_tracing_disabled(True)  # it would send traces over the network

MakeAgent = Callable[..., Agent[Any]]
FEW_TURNS = 4


class Report(BaseModel):
    city: str
    degrees: int


@pytest.fixture(params=[OpenAIChatCompletionsModel, OpenAIResponsesModel], ids=["chat", "responses"])
def make_agent(request: pytest.FixtureRequest, served: Served) -> MakeAgent:
    """Makes an agent on the server; options of its model are `tool_choice` and such."""

    def make(name: str, tool_choice: str | None = None, **options: object) -> Agent[Any]:
        client = AsyncOpenAI(base_url=served.v1, api_key="none", max_retries=0)
        model = request.param(model=served.model, openai_client=client)
        settings = ModelSettings(temperature=0, max_tokens=200, tool_choice=tool_choice)
        return Agent(name, model=model, model_settings=settings, **options)  # type: ignore[arg-type]

    return make


@pytest.fixture
def asked() -> list[str]:
    """The cities that `get_weather` was called with."""
    return []


@pytest.fixture
def weather(asked: list[str]) -> Any:
    @function_tool
    def get_weather(city: str) -> str:
        """The weather of a city."""
        asked.append(city)
        return f"{city}: sunny, 21 degrees"

    return get_weather


def kinds(result: Any) -> list[str]:
    return [item.type for item in result.new_items]


def test_a_tool_is_called_and_its_result_read(
    make_agent: MakeAgent, weather: Any, asked: list[str], served: Served
) -> None:
    agent = make_agent("Weather", "required", instructions="Use the tool, then say the weather.", tools=[weather])
    result = Runner.run_sync(agent, WEATHER_QUESTION, max_turns=FEW_TURNS)
    assert list(dict.fromkeys(kinds(result))) == ["tool_call_item", "tool_call_output_item", "message_output_item"]
    assert result.final_output
    assert result.context_wrapper.usage.requests == len(result.raw_responses) >= 2
    assert result.context_wrapper.usage.output_tokens > 5
    assert len(asked) == kinds(result).count("tool_call_item")
    if served.is_real:
        assert asked[0] == "Rome"


def test_a_tool_with_an_output_type(make_agent: MakeAgent, weather: Any, asked: list[str], served: Served) -> None:
    common = {"instructions": "Use the tool, then report.", "tools": [weather], "output_type": Report}
    calling = make_agent("Weather", "required", tool_use_behavior="stop_on_first_tool", **common)
    called = Runner.run_sync(calling, WEATHER_QUESTION, max_turns=FEW_TURNS)
    assert list(dict.fromkeys(kinds(called))) == ["tool_call_item", "tool_call_output_item"]
    reported = Runner.run_sync(make_agent("Weather", "none", **common), called.to_input_list())
    assert kinds(reported) == ["message_output_item"]
    assert isinstance(reported.final_output, Report)
    assert asked
    if served.is_real:  # the demo would call the tool without end where nothing forbids it
        whole = Runner.run_sync(make_agent("Weather", "required", **common), WEATHER_QUESTION, max_turns=FEW_TURNS)
        assert whole.final_output == reported.final_output == Report(city="Rome", degrees=21)


def test_an_output_type_alone(make_agent: MakeAgent, served: Served) -> None:
    agent = make_agent("Reporter", instructions="Report the weather.", output_type=Report)
    result = Runner.run_sync(agent, "Rome has 21 degrees.")
    assert isinstance(result.final_output, Report)
    if served.is_real:
        assert result.final_output == Report(city="Rome", degrees=21)


def test_a_handoff(make_agent: MakeAgent) -> None:
    italian = make_agent("Italian", instructions="Answer in Italian.", handoff_description="Answers in Italian.")
    triage = make_agent("Triage", "transfer_to_italian", instructions="Hand off.", handoffs=[italian])
    result = Runner.run_sync(triage, "Ciao!", max_turns=FEW_TURNS)
    assert kinds(result) == ["handoff_call_item", "handoff_output_item", "message_output_item"]
    assert result.last_agent.name == "Italian"


def test_a_session_remembers(make_agent: MakeAgent, served: Served) -> None:
    session = SQLiteSession("conversation")
    agent = make_agent("Assistant")
    first = Runner.run_sync(agent, "My name is Ada." if served.is_real else QUESTION, session=session)
    if not served.is_real:
        assert first.final_output == ANSWER
    second = Runner.run_sync(agent, "What is my name?", session=session)
    if served.is_real:
        assert "Ada" in second.final_output
    assert [item.get("role") for item in asyncio.run(session.get_items())] == ["user", "assistant"] * 2
    usage = [result.context_wrapper.usage.input_tokens for result in (first, second)]
    assert usage[1] > usage[0] + 10, "the second request holds the first conversation"


def test_a_stream_of_a_run_with_a_tool(make_agent: MakeAgent, weather: Any, asked: list[str]) -> None:
    agent = make_agent("Weather", "required", instructions="Use the tool.", tools=[weather])

    async def run() -> tuple[list[str], str]:
        result = Runner.run_streamed(agent, WEATHER_QUESTION, max_turns=FEW_TURNS)
        events = [event async for event in result.stream_events()]
        raw = [event.data.type for event in events if event.type == "raw_response_event"]
        text = "".join(
            event.data.delta
            for event in events
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
        )
        assert text == result.final_output
        return raw, str(result.final_output)

    raw, text = asyncio.run(run())
    assert raw.count("response.created") == raw.count("response.completed") == 2
    assert "response.function_call_arguments.delta" in raw
    assert text
    assert len(asked) == 1
