"""LangChain's `ChatOpenAI`, over chat completions and over responses, its completions and embeddings."""

from __future__ import annotations

import asyncio

import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel
from questions import ANSWER, QUESTION, TOO_LONG, WEATHER, WEATHER_QUESTION
from served import Served

LOOP = asyncio.new_event_loop()  # for all tests: the library shares one HTTP client among its models


class Report(BaseModel):
    """A weather report."""

    city: str
    degrees: int


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"{city}: sunny, 21 degrees"


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def chat(request: pytest.FixtureRequest, served: Served) -> ChatOpenAI:
    return ChatOpenAI(
        model=served.model,
        base_url=served.v1,
        api_key="none",  # type: ignore[arg-type]
        temperature=0,
        max_retries=0,
        max_completion_tokens=200,
        use_responses_api=request.param,
    )


def test_it_talks(chat: ChatOpenAI, served: Served) -> None:
    reply = chat.invoke(QUESTION)
    text = reply.text
    assert served.is_real or text == ANSWER
    assert text
    assert reply.usage_metadata is not None
    assert reply.usage_metadata["output_tokens"] > 5
    assert "".join(chunk.text for chunk in chat.stream(QUESTION)) == text
    assert [one.text for one in chat.batch([QUESTION] * 3)] == [text] * 3
    assert LOOP.run_until_complete(chat.ainvoke(QUESTION)).text == text


def test_a_tool_and_its_result(chat: ChatOpenAI, served: Served) -> None:
    for bound in (
        chat.bind_tools([get_weather], tool_choice="required"),
        chat.bind_tools([WEATHER], tool_choice="any"),
    ):
        called = bound.invoke(WEATHER_QUESTION)
        assert [call["name"] for call in called.tool_calls] == ["get_weather"]
        assert set(called.tool_calls[0]["args"]) == {"city"}
        assert not served.is_real or called.tool_calls[0]["args"] == {"city": "Rome"}
    chunks = list(bound.stream(WEATHER_QUESTION))
    whole = sum(chunks[1:], chunks[0])
    assert [call["args"] for call in whole.tool_calls] == [called.tool_calls[0]["args"]]
    history = [HumanMessage(WEATHER_QUESTION), called, get_weather.invoke(called.tool_calls[0])]
    final = chat.invoke(history)
    assert isinstance(final, AIMessage)
    assert final.text


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_structured_output(chat: ChatOpenAI, served: Served, method: str) -> None:
    if method == "json_mode" and not served.is_real:
        pytest.skip("JSON without a schema: the demo's has other keys, and no end")
    structured = chat.with_structured_output(Report, method=method)
    report = structured.invoke("Rome has 21 degrees. Reply with JSON: the city and its degrees.")
    assert isinstance(report, Report)
    assert not served.is_real or report == Report(city="Rome", degrees=21)


def test_structured_output_of_a_schema_and_in_a_stream(chat: ChatOpenAI) -> None:
    schema = {
        "title": "Number",
        "description": "A number.",
        "type": "object",
        "properties": {"number": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["number"],
    }
    reply = chat.with_structured_output(schema).invoke("The number is 3.")
    assert isinstance(reply, dict)
    assert isinstance(reply["number"], int)
    pieces = list(chat.with_structured_output(Report, method="json_schema").stream("Rome has 21 degrees."))
    assert isinstance(pieces[-1], Report)


def test_tools_together_with_a_response_format(chat: ChatOpenAI, served: Served) -> None:
    both = chat.bind_tools([get_weather], response_format=Report, strict=True, tool_choice="required")
    called = both.invoke(WEATHER_QUESTION)
    assert [call["name"] for call in called.tool_calls] == ["get_weather"]
    report = chat.bind_tools([get_weather], response_format=Report, strict=True, tool_choice="none")
    history = [HumanMessage(WEATHER_QUESTION), called, get_weather.invoke(called.tool_calls[0])]
    parsed = report.invoke(history).additional_kwargs["parsed"]
    assert isinstance(parsed, Report)
    assert not served.is_real or parsed == Report(city="Rome", degrees=21)
    free = chat.bind_tools([get_weather], response_format=Report, strict=True).invoke(WEATHER_QUESTION)
    assert free.tool_calls or isinstance(free.additional_kwargs["parsed"], Report)


def test_a_full_context_is_known(chat: ChatOpenAI) -> None:
    with pytest.raises(ContextOverflowError):
        chat.invoke(TOO_LONG)


def test_embeddings_and_completions(served: Served) -> None:
    common = {"model": served.model, "base_url": served.v1, "api_key": "none"}
    vectors = OpenAIEmbeddings(**common, check_embedding_ctx_length=False).embed_documents(["a", "b"])  # type: ignore[arg-type]
    assert len(vectors) == 2
    assert len(vectors[0]) > 8
    assert OpenAI(**common, temperature=0, max_tokens=8).invoke("import os\n")  # type: ignore[arg-type]
