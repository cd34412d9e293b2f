"""Libraries that speak to many services speak to this one: `litellm` and `langchain-openai`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import warnings
from collections.abc import Iterator

import pytest
from demo_texts import ANSWER, QUESTION, WEATHER

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would ask the network for a price list
TOO_LONG = [{"role": "user", "content": "word " * 4000}]

pytestmark = pytest.mark.filterwarnings("ignore")  # both libraries warn about each other and about pydantic


@pytest.fixture(scope="module", autouse=True)
def close_left_loop() -> Iterator[None]:
    """They leave an event loop open in this thread, which Python would tell of during some later test."""
    yield
    with warnings.catch_warnings(), contextlib.suppress(RuntimeError):  # since Python 3.14: there is none
        warnings.simplefilter("ignore")
        asyncio.get_event_loop().close()
    asyncio.set_event_loop(None)


@pytest.fixture(scope="module")
def litellm():  # type: ignore[no-untyped-def]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import litellm

    litellm.telemetry = False
    return litellm


def test_litellm_as_openai(litellm, server: str) -> None:  # type: ignore[no-untyped-def]
    common = {"model": "openai/demo", "messages": QUESTION, "api_base": f"{server}/v1", "api_key": "none"}
    reply = litellm.completion(**common, temperature=0)
    assert reply.choices[0].message.content == ANSWER
    assert reply.usage.completion_tokens > 5
    chunks = litellm.completion(**common, temperature=0, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
    tools = {"tools": [WEATHER], "tool_choice": "required"}  # as a parameter, `tools` needs a package more
    called = litellm.completion(**common, extra_body=tools, temperature=0, max_tokens=200)
    call = called.choices[0].message.tool_calls[0]
    assert call.function.name == "get_weather"
    assert set(json.loads(call.function.arguments)) == {"city"}


def test_litellm_as_anthropic(litellm, server: str) -> None:  # type: ignore[no-untyped-def]
    common = {"model": "anthropic/demo", "messages": QUESTION, "api_base": server, "api_key": "none", "max_tokens": 60}
    assert litellm.completion(**common, temperature=0).choices[0].message.content == ANSWER
    chunks = litellm.completion(**common, temperature=0, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER


def test_litellm_sends_its_own_messages_back(litellm, server: str) -> None:  # type: ignore[no-untyped-def]
    common = {"model": "openai/demo", "api_base": f"{server}/v1", "api_key": "none", "max_tokens": 60}
    asked = [{"role": "user", "content": "Rome?"}]
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
    called = litellm.Message(
        content=None,
        tool_calls=[call],
        reasoning_content="Rome, then.",
        provider_specific_fields={"refusal": None},
        thinking_blocks=[{"type": "thinking", "thinking": "Rome, then.", "signature": "s"}],
    )
    result = {"role": "tool", "tool_call_id": "c1", "name": "get_weather", "content": "sunny"}
    for message in (called, called.model_dump(), called.model_dump(exclude_none=True)):
        reply = litellm.completion(messages=[*asked, message, result], **common)
        assert reply.choices[0].message.content


def test_langchain_sends_its_own_messages_back(server: str) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    for is_response in (False, True):
        chat = ChatOpenAI(
            model="demo",
            base_url=f"{server}/v1",
            api_key="none",  # type: ignore[arg-type]
            temperature=0,
            max_retries=0,
            use_responses_api=is_response,
        )
        asked = HumanMessage("Rome?", id="human-1")
        called = chat.bind_tools([WEATHER], tool_choice="get_weather").invoke([asked])
        result = ToolMessage("sunny", tool_call_id=called.tool_calls[0]["id"], name="get_weather")
        assert chat.invoke([asked, called, result]).text


def test_litellm_embeds(litellm, server: str) -> None:  # type: ignore[no-untyped-def]
    reply = litellm.embedding(
        model="openai/demo", input=["a", "b"], api_base=f"{server}/v1", api_key="none", encoding_format="float"
    )
    assert len(reply.data) == 2


def test_litellm_knows_our_errors(litellm, server: str) -> None:  # type: ignore[no-untyped-def]
    common = {"messages": QUESTION, "api_base": f"{server}/v1", "api_key": "none", "num_retries": 0}
    with pytest.raises(litellm.exceptions.NotFoundError):
        litellm.completion(model="openai/no-such-model", **common)
    with pytest.raises(litellm.exceptions.BadRequestError, match="temperature"):
        litellm.completion(model="openai/demo", temperature=-1, **common)
    for model, base in (("openai/demo", f"{server}/v1"), ("anthropic/demo", server)):
        asked = {**common, "messages": TOO_LONG, "api_base": base, "max_tokens": 8}
        with pytest.raises(litellm.exceptions.ContextWindowExceededError):
            litellm.completion(model=model, **asked)


def test_langchain_talks(server: str) -> None:
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(model="demo", base_url=f"{server}/v1", api_key="none", temperature=0, max_retries=0)  # type: ignore[arg-type]
    reply = chat.invoke("What does os.path.join do?")
    assert reply.content == ANSWER
    assert reply.response_metadata["finish_reason"] == "stop"
    assert reply.usage_metadata is not None
    assert reply.usage_metadata["output_tokens"] > 5
    assert "".join(str(chunk.content) for chunk in chat.stream("What does os.path.join do?")) == ANSWER
    assert [one.content for one in chat.batch(["What does os.path.join do?"] * 3)] == [ANSWER] * 3


def test_langchain_knows_a_full_context(server: str) -> None:
    from langchain_core.exceptions import ContextOverflowError
    from langchain_openai import ChatOpenAI

    for is_response in (False, True):
        chat = ChatOpenAI(
            model="demo",
            base_url=f"{server}/v1",
            api_key="none",  # type: ignore[arg-type]
            max_retries=0,
            use_responses_api=is_response,
        )
        with pytest.raises(ContextOverflowError):
            chat.invoke(TOO_LONG)


def test_langchain_calls_tools_and_structures(server: str) -> None:
    import pydantic
    from langchain_openai import ChatOpenAI

    class Verdict(pydantic.BaseModel):
        """A verdict."""

        good: bool

    chat = ChatOpenAI(model="demo", base_url=f"{server}/v1", api_key="none", temperature=0, max_retries=0)  # type: ignore[arg-type]
    called = chat.bind_tools([WEATHER], tool_choice="get_weather", parallel_tool_calls=False).invoke("Rome?")
    assert [call["name"] for call in called.tool_calls] == ["get_weather"]
    assert set(called.tool_calls[0]["args"]) == {"city"}
    for method in ("json_schema", "function_calling"):
        assert isinstance(chat.with_structured_output(Verdict, method=method).invoke("Good?"), Verdict), method


def test_langchain_over_responses(server: str) -> None:
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(
        model="demo",
        base_url=f"{server}/v1",
        api_key="none",  # type: ignore[arg-type]
        temperature=0,
        max_retries=0,
        use_responses_api=True,
    )
    assert chat.invoke("What does os.path.join do?").text == ANSWER
    assert "".join(chunk.text for chunk in chat.stream("What does os.path.join do?")) == ANSWER


def test_langchain_embeds_and_completes(server: str) -> None:
    from langchain_openai import OpenAI, OpenAIEmbeddings

    vectors = OpenAIEmbeddings(
        model="demo",
        base_url=f"{server}/v1",
        api_key="none",  # type: ignore[arg-type]
        check_embedding_ctx_length=False,
    ).embed_documents(["a", "b"])
    assert len(vectors) == 2
    assert len(vectors[0]) > 8
    text = OpenAI(model="demo", base_url=f"{server}/v1", api_key="none", temperature=0, max_tokens=8)  # type: ignore[arg-type]
    assert text.invoke("import os\n")
