"""Replies have the fields that published schemas require: Anthropic's, and those of Open Responses.

The clients' own types let most of them be missing, so the lists stand here, as the two documents have them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from test_dialect_events import EMPTY, HEAD, THOUGHTFUL, finish

from mlxr.core.types import Event, FinishReason, PromptProgress, ReasoningDelta, TextDelta, ToolCallDelta
from mlxr.server.anthropic.messages import MessageEvents
from mlxr.server.openai.chat import ChatChunks
from mlxr.server.openai.replies import StreamExtras
from mlxr.server.openai.response_reply import ResponseEvents
from mlxr.server.openai.response_request import ResponseRequest
from mlxr.server.openai.responses import begin_response
from mlxr.server.routes import JsonObject
from mlxr.service.streams import ReplyFold

MESSAGE = "id type role content model stop_reason stop_sequence stop_details usage container"
USAGE = (
    "cache_creation cache_creation_input_tokens cache_read_input_tokens inference_geo input_tokens output_tokens "
    "output_tokens_details server_tool_use service_tier"
)
BLOCKS = {"text": "citations text", "thinking": "signature thinking", "tool_use": "caller id input name"}
DELTA = "container stop_details stop_reason stop_sequence"
DELTA_USAGE = (
    "cache_creation_input_tokens cache_read_input_tokens input_tokens output_tokens output_tokens_details "
    "server_tool_use"
)
RESPONSE = (
    "id object created_at completed_at status incomplete_details model previous_response_id instructions output error "
    "tools tool_choice truncation parallel_tool_calls text top_p presence_penalty frequency_penalty top_logprobs "
    "temperature reasoning usage max_output_tokens max_tool_calls store background service_tier metadata "
    "safety_identifier prompt_cache_key"
)
CALLS: list[Event] = [ToolCallDelta(0, "{}", "call_a", "get_time"), finish(FinishReason.TOOL_CALLS)]


def missing(value: JsonObject, wanted: str) -> set[str]:
    return set(wanted.split()) - set(value)


def as_json(value: object) -> JsonObject:
    loaded = json.loads(json.dumps(value))
    assert isinstance(loaded, dict)
    return loaded


def write_message(events: list[Event]) -> tuple[list[JsonObject], JsonObject]:
    made = MessageEvents("msg_1", "some-model", ReplyFold([10]), 7)
    plain = [*made.start(), *(one for event in events for one in made.push(event))]
    return list(map(as_json, plain)), json.loads(made.message.model_dump_json(by_alias=True))


def check_block(block: JsonObject) -> None:
    assert not missing(block, BLOCKS[str(block["type"])]), block
    assert block.get("citations", []) == [], "null is refused by clients that want a list"
    assert block.get("caller", {"type": "direct"}) == {"type": "direct"}


def test_a_message_has_all_fields_whole_and_as_a_stream() -> None:
    events, message = write_message(THOUGHTFUL)
    by_type = {str(event["type"]): event for event in events}
    for whole in (message, by_type["message_start"]["message"]):
        assert isinstance(whole, dict)
        assert not missing(whole, MESSAGE)
        assert not missing(whole["usage"], USAGE)
    blocks = message["content"]
    assert isinstance(blocks, list)
    assert {block["type"] for block in blocks} == set(BLOCKS)
    started = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    for block in [*blocks, *started]:
        check_block(block)
    end = by_type["message_delta"]
    assert set(end["delta"]) == set(DELTA.split())  # type: ignore[call-overload]
    assert set(end["usage"]) == set(DELTA_USAGE.split())  # type: ignore[call-overload]


def test_a_response_has_all_fields_whole_and_as_a_stream() -> None:
    asked = {"input": "Hi", "presence_penalty": 0.5, "frequency_penalty": -0.25, "max_tool_calls": 3}
    for body, told in (({"input": "Hi"}, (0.0, 0.0, None)), (asked, (0.5, -0.25, 3))):
        made = ResponseEvents(begin_response(ResponseRequest.model_validate(body), HEAD), ReplyFold([10]), None, {})
        events = [*made.start(), *(one for event in THOUGHTFUL for one in made.push(event))]
        whole = json.loads(made.response.model_dump_json(by_alias=True))
        carried = [event["response"] for event in events if "response" in event]
        assert len(carried) == 3
        for response in [whole, *carried]:
            assert not missing(response, RESPONSE)
            assert (response["presence_penalty"], response["frequency_penalty"], response["max_tool_calls"]) == told


def open_chat(events: list[Event]) -> Iterator[JsonObject]:
    """The deltas of a chat's stream."""
    made = ChatChunks(HEAD.to_chunk("chunk"), ReplyFold([10]), StreamExtras())
    for event in events:
        for chunk in made.push(event):
            yield chunk["choices"][0]["delta"]  # type: ignore[index]


def test_only_a_chat_that_begins_with_text_opens_one() -> None:
    opening = {"role": "assistant", "refusal": None}
    assert next(open_chat(CALLS)) == {**opening, "content": None}
    assert next(open_chat([ReasoningDelta("Hm.", (1,)), *CALLS])) == {**opening, "content": None}
    assert next(open_chat([TextDelta("Hm.", (1,)), *CALLS])) == {**opening, "content": ""}
    assert next(open_chat(EMPTY)) == {**opening, "content": ""}
    for events in (CALLS, [ReasoningDelta("Hm.", (1,)), *CALLS]):
        assert [delta for delta in open_chat(events) if delta.get("content") is not None] == []


def test_progress_tells_no_content() -> None:
    progress = PromptProgress(prompt_tokens=10, cached_tokens=0, read_tokens=4)
    assert next(open_chat([progress, *CALLS]))["content"] is None
