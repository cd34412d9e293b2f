"""The renderers of the OpenAI and Anthropic dialects by themselves: from events of the service to JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from mlxr.core.types import (
    Event,
    Finish,
    FinishReason,
    ReasoningDelta,
    TextDelta,
    Timings,
    TokenInfo,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)
from mlxr.server.anthropic.messages import MessageEvents
from mlxr.server.openai.chat import ChatChunks, render_chat
from mlxr.server.openai.completions import TextChoice, render_completion
from mlxr.server.openai.replies import Head, StreamExtras
from mlxr.server.openai.response_reply import ResponseEvents
from mlxr.server.openai.response_request import ResponseRequest, read_tools
from mlxr.server.openai.responses import begin_response
from mlxr.service.streams import ReplyFold

HEAD = Head("id-1", 1_700_000_000, "some-model", "fp_1")
USAGE = Usage(prompt_tokens=10, completion_tokens=7, cached_tokens=4)


def token_bytes(token_id: int) -> bytes:
    """Token 300 and 301 are the two halves of é."""
    return {300: b"\xc3", 301: b"\xa9"}.get(token_id) or chr(token_id).encode()


def info(token_id: int, *others: int) -> TokenInfo:
    return TokenInfo(TokenLogprob(token_id, -0.5), tuple(TokenLogprob(other, -1.5) for other in others))


def finish(reason: FinishReason, index: int = 0, **values: object) -> Finish:
    return Finish(reason, USAGE, index=index, timings=Timings(0.01, 0.1, 0.5), **values)  # type: ignore[arg-type]


THOUGHTFUL: list[Event] = [
    ReasoningDelta("Let me ", (1, 2)),
    ReasoningDelta("think.", (3,)),
    TextDelta("I will ", (4,)),
    TextDelta("look.", (5,)),
    ToolCallDelta(0, "", "call_a", "get_weather"),
    ToolCallDelta(0, '{"city": ', token_ids=(6,)),
    ToolCallDelta(0, '"Rome"}'),
    ToolCallDelta(1, "{}", "call_b", "get_time", token_ids=(7,)),
    finish(FinishReason.TOOL_CALLS),
]
EMPTY: list[Event] = [finish(FinishReason.STOP)]


def fold_chat(events: Sequence[Event], answers: int = 1, *, logprobs: bool = False) -> ChatCompletion:
    fold = ReplyFold([10], answers)
    fold.add_all(events)
    reply = render_chat(HEAD, fold, token_bytes if logprobs else None)
    return ChatCompletion.model_validate(json.loads(reply.model_dump_json()))


def stream_chat(events: Sequence[Event], answers: int = 1, *, logprobs: bool = False) -> list[ChatCompletionChunk]:
    extras = StreamExtras(includes_usage=True, token_bytes=token_bytes if logprobs else None)
    chunks = ChatChunks(HEAD.to_chunk("chat.completion.chunk"), ReplyFold([10], answers), extras)
    made = [chunk for event in events for chunk in chunks.push(event)]
    return [ChatCompletionChunk.model_validate(chunk) for chunk in [*made, *chunks.end()]]


def complete_text(events: Sequence[Event], prompt_tokens: int) -> TextChoice:
    fold = ReplyFold([prompt_tokens])
    fold.add_all(events)
    return render_completion(HEAD, fold, token_bytes).choices[0]


def respond(events: Sequence[Event], **options: object) -> tuple[list[ResponseStreamEvent], Response]:
    body = ResponseRequest.model_validate({"input": "Hi", **options})
    callees = read_tools(body.tools).callees
    made = ResponseEvents(
        begin_response(body, HEAD), ReplyFold([10]), token_bytes if body.wants_logprobs else None, callees
    )
    plain = [*made.start(), *(one for event in events for one in made.push(event))]
    adapter: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
    reply = Response.model_validate(json.loads(made.response.model_dump_json(by_alias=True)))
    return [adapter.validate_python(one) for one in plain], reply


def write_message(events: Sequence[Event], **options: object) -> tuple[list[RawMessageStreamEvent], Message]:
    made = MessageEvents("msg_1", "some-model", ReplyFold([10]), 7, **options)  # type: ignore[arg-type]
    plain = [*made.start(), *(one for event in events for one in made.push(event))]
    adapter: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)
    reply = Message.model_validate(json.loads(made.message.model_dump_json()))
    return [adapter.validate_python(one) for one in plain if one["type"] != "ping"], reply


def test_a_chat_with_everything() -> None:
    choice = fold_chat(THOUGHTFUL).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I will look."
    assert (choice.message.model_extra or {})["reasoning_content"] == "Let me think."
    calls = [(call.id, call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]  # type: ignore[union-attr]
    assert calls == [("call_a", "get_weather", '{"city": "Rome"}'), ("call_b", "get_time", "{}")]


def test_counts_of_a_chat() -> None:
    reply = fold_chat(THOUGHTFUL)
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (10, 7, 17)
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == 4
    assert reply.usage.completion_tokens_details is not None
    assert reply.usage.completion_tokens_details.reasoning_tokens == 3
    timings = (reply.model_extra or {})["timings"]
    assert timings["prompt_n"] == 6
    assert timings["predicted_per_second"] == pytest.approx(14)


def test_the_chunks_of_a_chat_add_up() -> None:
    chunks = stream_chat(THOUGHTFUL)
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    assert "".join(delta.content or "" for delta in deltas) == "I will look."
    thoughts = [(delta.model_extra or {}).get("reasoning_content", "") for delta in deltas]
    assert "".join(thoughts) == "Let me think."
    parts = [part for delta in deltas for part in delta.tool_calls or []]
    assert [part.id for part in parts] == ["call_a", None, None, "call_b"]
    assert [part.index for part in parts] == [0, 0, 0, 1]
    assert chunks[-2].choices[0].finish_reason == "tool_calls"
    assert chunks[-1].usage == fold_chat(THOUGHTFUL).usage


def test_answers_keep_apart_in_a_chat() -> None:
    events: list[Event] = [
        TextDelta("a", index=1),
        TextDelta("b", index=0),
        finish(FinishReason.STOP, 1),
        TextDelta("c", index=0),
        finish(FinishReason.LENGTH, 0),
    ]
    reply = fold_chat(events, 2)
    ends = [(choice.message.content, choice.finish_reason) for choice in reply.choices]
    assert ends == [("bc", "length"), ("a", "stop")]
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (10, 14)
    firsts = [chunk.choices[0].index for chunk in stream_chat(events, 2)[:-1] if chunk.choices[0].delta.role]
    assert firsts == [1, 0]


def test_a_chat_that_says_nothing() -> None:
    assert fold_chat(EMPTY).choices[0].message.content == ""
    assert [len(chunk.choices) for chunk in stream_chat(EMPTY)] == [1, 1, 0]


def test_an_answer_without_an_end_is_no_reply() -> None:
    with pytest.raises(ValueError, match="Finish"):
        fold_chat([TextDelta("a")])


def test_logprobs_of_half_characters() -> None:
    events: list[Event] = [
        TextDelta("aé", (97, 300, 301), (info(97, 98), info(300), info(301))),
        finish(FinishReason.STOP),
    ]
    logprobs = fold_chat(events, logprobs=True).choices[0].logprobs
    assert logprobs is not None
    assert [token.bytes for token in logprobs.content or []] == [[97], [0xC3], [0xA9]]
    streamed = stream_chat(events, logprobs=True)[1].choices[0].logprobs
    assert streamed is not None
    assert streamed.model_dump() == logprobs.model_dump()
    text = complete_text(events, 10).logprobs
    assert text is not None
    assert text.text_offset == [0, 1, 1]
    assert text.top_logprobs[0] == {"b": -1.5, "a": -0.5}


def test_logprobs_of_an_echo() -> None:
    """The first token of a prompt has no log-probability; of alternatives that read alike the likeliest counts."""
    unknown = TokenInfo(TokenLogprob(97, float("nan")))
    half = TokenInfo(TokenLogprob(301, -4.0), (TokenLogprob(300, -0.25),))
    events: list[Event] = [
        TextDelta("aé", (), (unknown, info(300), half)),
        TextDelta("b", (98,), (info(98),)),
        finish(FinishReason.STOP),
    ]
    choice = complete_text(events, 3)
    assert choice.text == "aéb"
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == [None, -0.5, -4.0, -0.5]
    assert choice.logprobs.top_logprobs[0] is None
    assert choice.logprobs.top_logprobs[2] == {"�": -0.25}
    assert choice.logprobs.text_offset == [0, 1, 1, 2]


def test_tokens_that_a_grammar_rules_out_have_no_logprob() -> None:
    ruled_out = TokenInfo(TokenLogprob(97, -0.1), (TokenLogprob(97, -0.1), TokenLogprob(98, float("-inf"))))
    events: list[Event] = [TextDelta("a", (97,), (ruled_out,)), finish(FinishReason.STOP)]
    logprobs = fold_chat(events, logprobs=True).choices[0].logprobs
    assert logprobs is not None
    assert [top.token for top in (logprobs.content or [])[0].top_logprobs] == ["a"]


def test_a_response_with_everything() -> None:
    events, reply = respond(THOUGHTFUL)
    assert reply.status == "completed"
    assert [item.type for item in reply.output] == ["reasoning", "message", "function_call", "function_call"]
    assert reply.output[0].content[0].text == "Let me think."  # type: ignore[union-attr, index]
    assert reply.output_text == "I will look."
    assert [item.arguments for item in reply.output[2:]] == ['{"city": "Rome"}', "{}"]  # type: ignore[union-attr]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert reply.usage is not None
    assert reply.usage.input_tokens_details.cached_tokens == 4
    assert reply.usage.output_tokens_details.reasoning_tokens == 3


def test_the_events_of_a_response_open_and_close_each_item() -> None:
    events, reply = respond(THOUGHTFUL)
    opened = [event for event in events if event.type == "response.output_item.added"]
    closed = [event for event in events if event.type == "response.output_item.done"]
    assert [event.output_index for event in opened] == [event.output_index for event in closed] == [0, 1, 2, 3]
    assert [event.item.id for event in opened] == [item.id for item in reply.output]
    assert [event.item for event in closed] == reply.output
    kinds = [event.type for event in events]
    assert kinds.count("response.reasoning_text.delta") == 2
    assert kinds.count("response.function_call_arguments.done") == 2
    assert kinds[-1] == "response.completed"


def test_calls_of_codex_tools() -> None:
    tools = [
        {"type": "custom", "name": "patch"},
        {"type": "local_shell"},
        {"type": "tool_search", "execution": "client", "description": "Finds tools.", "parameters": {}},
        {"type": "namespace", "name": "docs", "tools": [{"type": "function", "name": "find"}]},
    ]
    called = [
        ToolCallDelta(0, "", "call_a", "patch"),
        ToolCallDelta(0, '{"input": "*** ', token_ids=(1,)),
        ToolCallDelta(0, 'Begin\\n"}'),
        ToolCallDelta(1, '{"command": ["ls"], "timeout_ms": 5}', "call_b", "local_shell"),
        ToolCallDelta(2, "{}", "call_c", "docs__find"),
        ToolCallDelta(3, '{"query": "x"}', "call_d", "tool_search"),
        finish(FinishReason.TOOL_CALLS),
    ]
    events, reply = respond(called, tools=tools)
    patch, shell, find, search = reply.output
    assert (search.type, search.execution, search.arguments) == ("tool_search_call", "client", {"query": "x"})  # type: ignore[union-attr]
    assert (patch.type, patch.name, patch.input) == ("custom_tool_call", "patch", "*** Begin\n")  # type: ignore[union-attr]
    assert (shell.type, shell.call_id, shell.action.command) == ("local_shell_call", "call_b", ["ls"])  # type: ignore[union-attr]
    assert (find.type, find.name, find.namespace) == ("function_call", "find", "docs")  # type: ignore[union-attr]
    kinds = [event.type.removeprefix("response.") for event in events[2:-1]]
    assert kinds == [
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
        "output_item.added",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        "output_item.done",
    ]


def test_a_response_that_says_nothing() -> None:
    events, reply = respond(EMPTY)
    assert reply.output_text == ""
    assert [item.type for item in reply.output] == ["message"]
    assert events[-1].type == "response.completed"


def test_a_response_that_fails_keeps_what_it_has() -> None:
    body = ResponseRequest.model_validate({"input": "Hi"})
    made = ResponseEvents(begin_response(body, HEAD), ReplyFold([10]), None, {})
    for event in THOUGHTFUL[:5]:
        list(made.push(event))
    failed = made.fail("server_error", "it broke")
    assert failed["type"] == "response.failed"
    reply = Response.model_validate(failed["response"])
    assert reply.status == "failed"
    assert reply.error is not None
    assert reply.error.message == "it broke"
    assert [item.type for item in reply.output] == ["reasoning", "message"]


def test_a_message_with_everything() -> None:
    events, message = write_message(THOUGHTFUL)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert message.content[0].thinking == "Let me think."  # type: ignore[union-attr]
    assert message.content[0].signature  # type: ignore[union-attr]
    assert [block.input for block in message.content[2:]] == [{"city": "Rome"}, {}]  # type: ignore[union-attr]
    assert message.stop_reason == "tool_use"
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens, message.usage.output_tokens) == (6, 4, 7)
    assert message.usage.output_tokens_details is not None
    assert message.usage.output_tokens_details.thinking_tokens == 3
    starts = [event.index for event in events if event.type == "content_block_start"]
    stops = [event.index for event in events if event.type == "content_block_stop"]
    assert starts == stops == [0, 1, 2, 3]
    signed = [event.delta for event in events if event.type == "content_block_delta" and event.index == 0]
    assert [delta.type for delta in signed] == ["thinking_delta", "thinking_delta", "signature_delta"]


def test_thoughts_can_be_left_out_of_a_message() -> None:
    events, message = write_message(THOUGHTFUL, hides_thoughts=True)
    assert message.content[0].thinking == ""  # type: ignore[union-attr]
    assert message.content[0].signature  # type: ignore[union-attr]
    kinds = [event.delta.type for event in events if event.type == "content_block_delta" and event.index == 0]
    assert kinds == ["signature_delta"]


def test_a_message_that_says_nothing() -> None:
    events, message = write_message(EMPTY)
    assert message.content == []
    assert [event.type for event in events] == ["message_start", "message_delta", "message_stop"]


@pytest.mark.parametrize(
    ("end", "reason", "sequence"),
    [
        (finish(FinishReason.STOP), "end_turn", None),
        (finish(FinishReason.STOP, stop="END"), "stop_sequence", "END"),
        (finish(FinishReason.LENGTH), "max_tokens", None),
        (Finish(FinishReason.LENGTH, Usage(10, 3)), "model_context_window_exceeded", None),
        (finish(FinishReason.TOOL_CALLS), "tool_use", None),
    ],
)
def test_why_a_message_ends(end: Finish, reason: str, sequence: str | None) -> None:
    _, message = write_message([TextDelta("a"), end])
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)


def test_a_call_that_is_cut_short_has_no_input() -> None:
    events: list[Event] = [ToolCallDelta(0, '{"ci', "call_a", "get_weather"), finish(FinishReason.LENGTH)]
    _, message = write_message(events)
    assert message.content[0].input == {}  # type: ignore[union-attr]
