"""/v1/messages and /v1/messages/count_tokens through the real `anthropic` client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import anthropic
import httpx
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from questions import ANSWER, MESSAGES

TOOL = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
OTHER = {"name": "get_time", "input_schema": {"type": "object", "properties": {}, "additionalProperties": False}}


@pytest.fixture(scope="module")
def ai(server: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server, api_key="none", max_retries=0) as client:
        yield client


def make_body(options: dict[str, object]) -> dict[str, object]:
    """The client has no parameter for the temperature; the field is part of the dialect all the same."""
    temperature = options.pop("temperature", 0)
    extra = {"temperature": temperature, **options.pop("extra_body", {})}  # type: ignore[dict-item]
    return {"model": "demo", "messages": MESSAGES, "max_tokens": 100, "extra_body": extra, **options}


def ask(ai: anthropic.Anthropic, **options: object) -> Message:
    return ai.messages.create(**make_body(options))  # type: ignore[call-overload, no-any-return]


def stream(ai: anthropic.Anthropic, **options: object) -> list[RawMessageStreamEvent]:
    return list(ask(ai, stream=True, **options))  # type: ignore[call-overload]


def without_repeats(kinds: list[str]) -> list[str]:
    return [kind for before, kind in zip(["", *kinds], kinds, strict=False) if kind != before]


def test_a_conversation_is_answered(ai: anthropic.Anthropic) -> None:
    reply = ask(ai)
    assert (reply.type, reply.role, reply.model) == ("message", "assistant", "demo")
    assert reply.id.startswith("msg_")
    assert [block.type for block in reply.content] == ["text"]
    assert reply.content[0].text == ANSWER  # type: ignore[union-attr]
    assert (reply.stop_reason, reply.stop_sequence) == ("end_turn", None)
    assert reply.usage.output_tokens > 5


def test_input_tokens_are_those_that_were_not_cached(ai: anthropic.Anthropic) -> None:
    long = [{"role": "user", "content": "What does zlib.compress do? " * 20}]
    first = ask(ai, messages=long, max_tokens=1).usage
    again = ask(ai, messages=long, max_tokens=1).usage
    total = first.input_tokens + (first.cache_read_input_tokens or 0)
    assert again.input_tokens + (again.cache_read_input_tokens or 0) == total
    assert (again.cache_read_input_tokens or 0) > 32


def test_the_events_of_a_text(ai: anthropic.Anthropic) -> None:
    events = stream(ai)
    assert without_repeats([event.type for event in events]) == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start, end = events[0], events[-2]
    assert start.type == "message_start"
    assert (start.message.content, start.message.stop_reason) == ([], None)
    assert start.message.usage.input_tokens > 0
    texts = [event.delta.text for event in events if event.type == "content_block_delta"]  # type: ignore[union-attr]
    assert "".join(texts) == ANSWER
    assert end.type == "message_delta"
    assert end.delta.stop_reason == "end_turn"
    assert end.usage.output_tokens == ask(ai).usage.output_tokens


def test_the_stream_on_the_wire(server: str) -> None:
    body = {"model": "demo", "messages": MESSAGES, "max_tokens": 3, "temperature": 0, "stream": True}
    reply = httpx.post(f"{server}/v1/messages", json=body)
    assert reply.headers["content-type"].startswith("text/event-stream")
    frames = [frame.splitlines() for frame in reply.text.strip().split("\n\n")]
    names = [frame[0].removeprefix("event: ") for frame in frames]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert all(f'"type":"{name}"' in frame[1] for name, frame in zip(names, frames, strict=True))


def test_the_stream_accumulator_of_the_client_works(ai: anthropic.Anthropic) -> None:
    with ai.messages.stream(**make_body({})) as events:  # type: ignore[arg-type]
        text = "".join(events.text_stream)
        final = events.get_final_message()
    assert text == ANSWER
    assert final.content[0].text == ANSWER  # type: ignore[union-attr]
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens > 5


def test_the_asynchronous_client_gets_the_same(server: str) -> None:
    async def talk() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=server, api_key="none", max_retries=0) as ai:
            replies = await asyncio.gather(*(ai.messages.create(**make_body({})) for _ in range(8)))  # type: ignore[call-overload]
        return [reply.content[0].text for reply in replies]

    assert asyncio.run(talk()) == [ANSWER] * 8


def test_a_system_prompt_as_text_and_as_blocks(ai: anthropic.Anthropic) -> None:
    blocks = [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}]
    as_text, as_blocks = ask(ai, system="Be short."), ask(ai, system=blocks)
    assert as_text.content[0].text == as_blocks.content[0].text  # type: ignore[union-attr]
    assert as_text.usage.input_tokens + (as_text.usage.cache_read_input_tokens or 0) > count(ai, MESSAGES)


def count(ai: anthropic.Anthropic, messages: object, **options: object) -> int:
    return ai.messages.count_tokens(model="demo", messages=messages, **options).input_tokens  # type: ignore[arg-type]


def test_tokens_are_counted_as_they_are_read(ai: anthropic.Anthropic) -> None:
    for options in ({}, {"system": "Be short."}, {"tools": [TOOL]}):
        usage = ask(ai, max_tokens=1, **options).usage
        assert count(ai, MESSAGES, **options) == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_a_stop_sequence_is_named(ai: anthropic.Anthropic) -> None:
    reply = ask(ai, stop_sequences=["zzz", "components"])
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "components")
    assert reply.content[0].text == ANSWER.split("components")[0]  # type: ignore[union-attr]


def test_max_tokens_is_a_bound(ai: anthropic.Anthropic) -> None:
    reply = ask(ai, max_tokens=3)
    assert (reply.stop_reason, reply.usage.output_tokens) == ("max_tokens", 3)


def test_top_k_one_is_greedy(ai: anthropic.Anthropic) -> None:
    assert ask(ai, temperature=1, extra_body={"top_k": 1}).content[0].text == ANSWER  # type: ignore[union-attr]


def test_any_tool_is_called(ai: anthropic.Anthropic) -> None:
    choice = {"type": "any", "disable_parallel_tool_use": True}
    reply = ask(ai, tools=[TOOL], tool_choice=choice, max_tokens=200)
    assert reply.stop_reason == "tool_use"
    assert [block.type for block in reply.content] == ["tool_use"]
    call = reply.content[0]
    assert call.type == "tool_use"
    assert call.name == "get_weather"
    assert set(call.input) == {"city"}
    assert call.id


def test_this_tool_is_called(ai: anthropic.Anthropic) -> None:
    reply = ask(ai, tools=[TOOL, OTHER], tool_choice={"type": "tool", "name": "get_time"}, max_tokens=200)
    assert {block.name for block in reply.content if block.type == "tool_use"} == {"get_time"}


def test_no_tool_is_called_where_none_may_be(ai: anthropic.Anthropic) -> None:
    reply = ask(ai, tools=[TOOL], tool_choice={"type": "none"})
    assert [block.type for block in reply.content] == ["text"]


def test_the_events_of_a_call(ai: anthropic.Anthropic) -> None:
    choice = {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}
    events = stream(ai, tools=[TOOL], tool_choice=choice, max_tokens=200)
    start = next(event for event in events if event.type == "content_block_start")
    assert start.content_block.type == "tool_use"
    assert start.content_block.input == {}
    deltas = [event.delta for event in events if event.type == "content_block_delta"]
    assert {delta.type for delta in deltas} == {"input_json_delta"}
    assert events[-2].delta.stop_reason == "tool_use"  # type: ignore[union-attr]
    with ai.messages.stream(**make_body({"tools": [TOOL], "tool_choice": choice, "max_tokens": 200})) as accumulated:  # type: ignore[arg-type]
        final = accumulated.get_final_message()
    assert set(final.content[0].input) == {"city"}  # type: ignore[union-attr]


def test_the_answer_of_a_tool_goes_back(ai: anthropic.Anthropic) -> None:
    messages = [
        {"role": "user", "content": "How is the weather in Rome?"},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "I will look."},
                {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Rome"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "sunny"}]},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    assert ask(ai, messages=messages, tools=[TOOL], tool_choice={"type": "none"}, max_tokens=4).content


def test_json_keeps_to_its_schema(ai: anthropic.Anthropic) -> None:
    schema = {
        "type": "object",
        "properties": {"good": {"type": "boolean"}},
        "required": ["good"],
        "additionalProperties": False,
    }
    reply = ask(ai, output_config={"format": {"type": "json_schema", "schema": schema}}, temperature=1)
    assert set(json.loads(reply.content[0].text)) == {"good"}  # type: ignore[union-attr]


def test_models_are_listed(ai: anthropic.Anthropic) -> None:
    models = list(ai.models.list())
    assert {"demo", "demo-draft"} <= {model.id for model in models}
    assert {model.type for model in models} == {"model"}
    assert ai.models.retrieve("demo").display_name == "demo"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_tokens": -3}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0].source",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"temperature": 2}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64"}}]}]},
            "messages[0].content[0].source.data",
        ),
        ({"extra_body": {"mcp_servers": [{"type": "url", "url": "http://x", "name": "x"}]}}, "mcp_servers"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "nobody"}}, "tool_choice.name"),
    ],
)
def test_what_is_wrong_is_named(ai: anthropic.Anthropic, options: dict[str, object], field: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        ask(ai, **options)
    body = refused.value.body
    assert isinstance(body, dict)
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["message"].startswith(f"{field}:")
    assert body["request_id"] == refused.value.request_id


def test_max_tokens_must_be_there(server: str) -> None:
    refused = httpx.post(f"{server}/v1/messages", json={"model": "demo", "messages": MESSAGES})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("max_tokens:")


def test_threads_are_refused_in_the_words_that_clients_fall_back_upon(server: str, ai: anthropic.Anthropic) -> None:
    body = {"model": "demo", "max_tokens": 8, "messages": MESSAGES, "thread": {"type": "create"}}
    refused = httpx.post(f"{server}/v1/messages", json=body).json()["error"]
    assert refused["message"].startswith("thread:")
    assert refused["details"] == {"error_code": "thread_unsupported_request"}
    asked = []

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """The weather of a city."""
        asked.append(city)
        return "sunny"

    forced = {"type": "tool", "name": "get_weather"}
    common = {"model": "demo", "max_tokens": 60, "messages": MESSAGES, "max_iterations": 2}
    runner = ai.beta.messages.tool_runner(**common, tools=[get_weather], tool_choice=forced)  # type: ignore[call-overload]
    assert [reply.stop_reason for reply in runner] == ["tool_use", "tool_use"]
    assert len(asked) == 2


def test_an_unknown_model_is_not_found(ai: anthropic.Anthropic) -> None:
    for call in (lambda: ask(ai, model="no-such"), lambda: stream(ai, model="no-such")):
        with pytest.raises(anthropic.NotFoundError) as refused:
            call()
        body = refused.value.body
        assert isinstance(body, dict)
        assert body["error"]["type"] == "not_found_error"


def ask_as_claude_code(server: str, nonce: str) -> httpx.Response:
    """Send one request with everything that Claude Code sends."""
    hint = {"cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "global"}}
    call = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Rome"}}
    found = [{"type": "tool_reference", "tool_name": "get_time"}, {"type": "text", "text": "sunny", **hint}]
    body = {
        "model": "demo",
        "max_tokens": 8,
        "stream": False,
        "temperature": 1,
        "system": [
            {
                "type": "text",
                "text": f"x-anthropic-billing-header: cc_version=2.1.100.7b4; cc_entrypoint=cli; cch={nonce};",
            },
            {"type": "text", "text": "You help with code. " * 12, **hint},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Weather?", **hint}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Rome.", "signature": "c2ln"},
                    {"type": "redacted_thinking", "data": "eA=="},
                    {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}},
                    {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []},
                    {**call, "caller": {"type": "direct"}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": found, **hint}]},
            {"role": "system", "content": [{"type": "text", "text": "The date is today."}]},
            {"role": "user", "content": MESSAGES[0]["content"]},
        ],
        "tools": [
            {
                **TOOL,
                "eager_input_streaming": True,
                "strict": False,
                "defer_loading": True,
                "input_examples": [],
                **hint,
            },
            {"type": "web_search_20260209", "name": "web_search", "max_uses": 8},
        ],
        "tool_choice": {"type": "auto"},
        "metadata": {"user_id": "{}"},
        "thinking": {"type": "adaptive", "display": "omitted"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium", "task_budget": {"type": "tokens", "total": 9}},
        "speed": "fast",
        "service_tier": "auto",
    }
    headers = {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,context-management-2025-06-27",
    }
    count = {name: value for name, value in body.items() if name not in ("max_tokens", "stream", "temperature")}
    counted = httpx.post(f"{server}/v1/messages/count_tokens?beta=true", json=count, headers=headers, timeout=60)
    assert counted.status_code == 200, counted.text
    reply = httpx.post(f"{server}/v1/messages?beta=true", json=body, headers=headers, timeout=60)
    assert reply.status_code == 200, reply.text
    usage = reply.json()["usage"]
    assert counted.json()["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]
    return reply


def test_all_that_claude_code_sends_is_taken(server: str) -> None:
    named = set(ask_as_claude_code(server, "aaaaa").headers["x-mlxr-ignored"].split(", "))
    assert {"system[].x-anthropic-billing-header", "tools[].web_search_20260209", "metadata"} <= named
    usage = ask_as_claude_code(server, "bbbbb").json()["usage"]
    assert usage["cache_read_input_tokens"] > 96  # the header that changes has left the prefix alone


def test_documents_and_search_results_are_read(ai: anthropic.Anthropic) -> None:
    blocks = [
        {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "D"}},
        {"type": "search_result", "title": "S", "source": "http://s", "content": [{"type": "text", "text": "R"}]},
    ]
    plain = [{"role": "user", "content": "T\nD\nS\nhttp://s\nR"}]
    counts = [
        ai.messages.count_tokens(model="demo", messages=messages).input_tokens  # type: ignore[arg-type]
        for messages in ([{"role": "user", "content": blocks}], plain)
    ]
    assert counts[0] == counts[1]


def test_the_older_place_of_a_format(ai: anthropic.Anthropic) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"], "additionalProperties": False}
    reply = ask(ai, extra_body={"output_format": {"type": "json_schema", "schema": schema}})
    assert json.loads(reply.content[0].text) == {"a": 7}  # type: ignore[union-attr]
