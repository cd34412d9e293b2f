"""LlamaIndex's client for servers with OpenAI's protocol: answers, streams, tools and structured output."""

from __future__ import annotations

import asyncio

import pytest
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel
from questions import ANSWER, QUESTION, WEATHER_QUESTION
from served import Served


class Report(BaseModel):
    """A weather report."""

    city: str
    degrees: int


def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"{city}: sunny, 21 degrees"


@pytest.fixture
def llm(served: Served) -> OpenAILike:
    return OpenAILike(
        model=served.model,
        api_base=served.v1,
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        should_use_structured_outputs=True,
        temperature=0,
        max_tokens=60,
        max_retries=0,
    )


def test_it_talks(llm: OpenAILike, served: Served) -> None:
    messages = [ChatMessage(role="user", content=QUESTION)]
    text = llm.chat(messages).message.content
    assert text
    assert served.is_real or text == ANSWER
    assert "".join(chunk.delta or "" for chunk in llm.stream_chat(messages)) == text
    assert asyncio.run(llm.achat(messages)).message.content == text
    assert llm.complete(QUESTION).text == text


def test_a_tool_and_its_result(llm: OpenAILike, served: Served) -> None:
    tool = FunctionTool.from_defaults(get_weather)
    reply = llm.chat_with_tools([tool], user_msg=WEATHER_QUESTION, tool_required=True)
    (call,) = llm.get_tool_calls_from_response(reply)
    assert call.tool_name == "get_weather"
    assert set(call.tool_kwargs) == {"city"}
    assert not served.is_real or call.tool_kwargs == {"city": "Rome"}
    history = [
        ChatMessage(role="user", content=WEATHER_QUESTION),
        reply.message,
        ChatMessage(role="tool", content="sunny", additional_kwargs={"tool_call_id": call.tool_id}),
    ]
    assert llm.chat(history).message.content


def test_structured_output(llm: OpenAILike, served: Served) -> None:
    reply = llm.as_structured_llm(Report).chat([ChatMessage(role="user", content="Rome has 21 degrees.")])
    assert isinstance(reply.raw, Report)
    assert not served.is_real or reply.raw == Report(city="Rome", degrees=21)
