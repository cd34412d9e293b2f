"""/v1/responses through the real `openai` client."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from questions import ANSWER

MESSAGES = "What does os.path.join do?"
TOOL = {
    "type": "function",
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
TEXT_EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]
CALL_EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
    "response.completed",
]


@pytest.fixture(scope="module")
def ai(server: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(ai: openai.OpenAI, wanted: object = MESSAGES, **options: object) -> Response:
    return ai.responses.create(model="demo", input=wanted, **{"temperature": 0, **options})  # type: ignore[call-overload, no-any-return]


def stream(ai: openai.OpenAI, wanted: object = MESSAGES, **options: object) -> list[ResponseStreamEvent]:
    return list(ask(ai, wanted, stream=True, **options))  # type: ignore[arg-type]


def without_repeats(kinds: list[str]) -> list[str]:
    return [kind for before, kind in zip(["", *kinds], kinds, strict=False) if kind != before]


def test_an_input_is_answered(ai: openai.OpenAI) -> None:
    reply = ask(ai)
    assert reply.output_text == ANSWER
    assert (reply.object, reply.status, reply.error, reply.incomplete_details) == ("response", "completed", None, None)
    assert reply.id.startswith("resp_")
    item = reply.output[0]
    assert item.type == "message"
    assert (item.role, item.status) == ("assistant", "completed")
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.input_tokens + reply.usage.output_tokens
    assert (reply.tool_choice, reply.tools, reply.parallel_tool_calls, reply.temperature) == ("auto", [], True, 0.0)


def test_what_was_asked_for_is_told_again(ai: openai.OpenAI) -> None:
    reply = ask(ai, instructions="Be short.", max_output_tokens=4, metadata={"a": "b"}, user="u", top_p=0.5)
    assert (reply.instructions, reply.max_output_tokens, reply.metadata) == ("Be short.", 4, {"a": "b"})
    assert (reply.user, reply.top_p) == ("u", 0.5)


def test_an_answer_cut_short_is_incomplete(ai: openai.OpenAI) -> None:
    reply = ask(ai, max_output_tokens=3)
    assert reply.status == "incomplete"
    assert reply.incomplete_details is not None
    assert reply.incomplete_details.reason == "max_output_tokens"
    events = stream(ai, max_output_tokens=3)
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == reply.output_text


def test_the_events_of_a_text(ai: openai.OpenAI) -> None:
    events = stream(ai)
    assert without_repeats([event.type for event in events]) == TEXT_EVENTS
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == ANSWER
    done = next(event for event in events if event.type == "response.output_text.done")
    assert done.text == ANSWER
    assert {event.item_id for event in deltas} == {done.item_id}
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == ANSWER
    assert last.response.output[0].id == done.item_id


def test_the_stream_accumulator_of_the_client_works(ai: openai.OpenAI) -> None:
    with ai.responses.stream(model="demo", input=MESSAGES, temperature=0) as events:
        for _ in events:
            pass
        assert events.get_final_response().output_text == ANSWER


def test_a_conversation_as_items(ai: openai.OpenAI) -> None:
    first = ask(ai, "Hello", max_output_tokens=5)
    items = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        *[item.model_dump(exclude_none=True) for item in first.output],
        {"type": "message", "role": "user", "content": MESSAGES},
    ]
    reply = ask(ai, items, max_output_tokens=8)
    assert reply.output_text
    assert reply.usage is not None
    assert reply.usage.input_tokens > 20


def test_logprobs(ai: openai.OpenAI) -> None:
    reply = ask(ai, include=["message.output_text.logprobs"], top_logprobs=2, max_output_tokens=4)
    part = reply.output[0].content[0]  # type: ignore[union-attr, index]
    assert "".join(token.token for token in part.logprobs) == part.text  # type: ignore[union-attr]
    assert {len(token.top_logprobs) for token in part.logprobs} == {2}  # type: ignore[union-attr]
    assert ask(ai, max_output_tokens=4).output[0].content[0].logprobs is None  # type: ignore[union-attr, index]


def test_a_tool_is_called(ai: openai.OpenAI) -> None:
    reply = ask(ai, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_output_tokens=200)
    call = reply.output[0]
    assert call.type == "function_call"
    assert (call.name, call.status) == ("get_weather", "completed")
    assert set(json.loads(call.arguments)) == {"city"}
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    items = [{"role": "user", "content": "How is the weather?"}, call.model_dump(exclude_none=True), output]
    assert ask(ai, items, tools=[TOOL], tool_choice="none", max_output_tokens=4).output_text


def test_the_events_of_a_call(ai: openai.OpenAI) -> None:
    choice = {"type": "function", "name": "get_weather"}
    events = stream(ai, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False, max_output_tokens=200)
    assert without_repeats([event.type for event in events]) == CALL_EVENTS
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    done = next(event for event in events if event.type == "response.function_call_arguments.done")
    assert "".join(deltas) == done.arguments
    assert done.name == "get_weather"


def test_text_of_a_schema(ai: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"good": {"type": "boolean"}},
        "required": ["good"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "name": "verdict", "schema": schema, "strict": True}
    reply = ask(ai, text={"format": wanted}, temperature=1, max_output_tokens=100)
    assert set(json.loads(reply.output_text)) == {"good"}
    assert reply.text is not None
    assert reply.text.format is not None
    assert reply.text.format.type == "json_schema"


def test_the_parse_method_of_the_client_works(ai: openai.OpenAI) -> None:
    import pydantic

    class Verdict(pydantic.BaseModel):
        good: bool

    reply = ai.responses.parse(model="demo", input=MESSAGES, text_format=Verdict, temperature=1)
    assert isinstance(reply.output_parsed, Verdict)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [TOOL, {"type": "custom"}]}, "tools[1].name"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "auto"}, "tools[0].type"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "nobody"}, "tools": [TOOL]}, "tool_choice"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id"),
        ({"input": [{"type": "computer_call", "id": "cc_1"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].image_url"),
        ({"input": []}, "input"),
        ({"max_output_tokens": -3}, "max_output_tokens"),
        ({"metadata": {"a": 1}}, "metadata.a"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(ai: openai.OpenAI, options: dict[str, object], field: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ai.responses.create(**{"model": "demo", "input": MESSAGES, **options})  # type: ignore[call-overload]
    assert refused.value.param == field
