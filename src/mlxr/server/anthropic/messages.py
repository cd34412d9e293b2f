"""Replies of the Anthropic dialect: errors, a message, and the events of its stream while it grows.

The plain reply is the message that the events add up to, so both are made by one path. The sections of an answer (a
thought, then text, then calls) become blocks of content; each is opened, grows and is closed before the next.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from mlxr.core.types import Event, Finish, FinishReason, Usage
from mlxr.server.activity import in_flight
from mlxr.server.anthropic.request import ConversationFields, CountRequest, MessageRequest
from mlxr.server.errors import ServerError, spell_fields
from mlxr.server.generation import borrow, fill_chat, read_all, start, write_frames
from mlxr.server.routes import (
    JsonObject,
    ReplyModel,
    Router,
    describe_errors,
    describe_stream,
    make_id,
    optional,
    reply_json,
)
from mlxr.server.streaming import SSE, EventStream, sse
from mlxr.service.model_pool import ModelLease
from mlxr.service.requests import ChatRequest
from mlxr.service.streams import ReplyFold, Section

ErrorType = Literal[
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "request_too_large",
    "rate_limit_error",
    "timeout_error",
    "overloaded_error",
    "api_error",
]
_TYPES: dict[int, ErrorType] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ErrorDetail(ReplyModel):
    """An error; the message begins with the field at fault. `details` holds a code that clients act upon."""

    type: ErrorType
    message: str
    details: JsonObject | None = optional()


class ErrorReply(ReplyModel):
    """The body of every error on Anthropic's routes."""

    type: Literal["error"] = "error"
    error: ErrorDetail
    request_id: str


def render_error(error: ServerError, request_id: str) -> JsonObject:
    """Return the body of an error."""
    message = error.message
    if {
        "n_prompt_tokens",
        "n_ctx",
    } <= error.counts.keys():  # Anthropic's clients shorten the conversation at these words
        message = f"prompt is too long: {error.counts['n_prompt_tokens']} tokens > {error.counts['n_ctx']} maximum"
    if error.field is not None and not message.startswith(error.field):
        message = f"{error.field}: {message}"
    details: JsonObject | None = {"error_code": "thread_unsupported_request"} if error.field == "thread" else None
    detail = ErrorDetail(type=name_type(error.status), message=message, details=details)
    return ErrorReply(error=detail, request_id=request_id).model_dump()


def name_type(status: int) -> ErrorType:
    """Return Anthropic's word for a kind of error."""
    return _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class TextReply(ReplyModel):
    """A block of text in an answer. It cites nothing: an empty list, as some clients refuse null."""

    type: Literal["text"] = "text"
    text: str
    citations: list[JsonObject] = Field(max_length=0, default_factory=list)


class ThinkingReply(ReplyModel):
    """A thought. The signature is a checksum of it, for clients that expect one; it is not checked when sent back."""

    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str


class CallerReply(ReplyModel):
    """The caller of a tool: always the model itself, not a program of its own."""

    type: Literal["direct"] = "direct"


class ToolUseReply(ReplyModel):
    """A block of an answer that is a call of a tool."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    caller: CallerReply = CallerReply()
    name: str
    input: JsonObject


BlockReply = TextReply | ThinkingReply | ToolUseReply


class OutputDetails(ReplyModel):
    """The number of the output's tokens that are thoughts."""

    thinking_tokens: int


class UsageReply(ReplyModel):
    """Token counts; `input_tokens` are those that had to be computed, since the cache did not have them.

    Fields that are null belong only to Anthropic's service: caches with a lifetime, regions, and tools that it runs.
    """

    input_tokens: int
    cache_creation: None = None
    cache_creation_input_tokens: Literal[0] = 0
    cache_read_input_tokens: int
    inference_geo: None = None
    output_tokens: int
    output_tokens_details: OutputDetails
    server_tool_use: None = None
    service_tier: Literal["standard"] = "standard"


class MessageReply(ReplyModel):
    """The assistant's message, whole: the reply to a request that is not streamed.

    Fields that are null are never set here: the reason of a refusal, and a container in which the service runs code.
    """

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[BlockReply]
    stop_reason: StopReason | None
    stop_sequence: str | None
    stop_details: None = None
    container: None = None
    usage: UsageReply


class TokenCount(ReplyModel):
    """The number of tokens of a conversation."""

    input_tokens: int


class MessageEvents:
    """Makes the events of one message; afterwards `message` is the whole of it."""

    def __init__(
        self, message_id: str, model: str, fold: ReplyFold, max_tokens: int, *, hides_thoughts: bool = False
    ) -> None:
        """With `hides_thoughts` a thought's block has only its signature."""
        self._fold, self._max_tokens, self._hides_thoughts = fold, max_tokens, hides_thoughts
        self._blocks: list[BlockReply] = []
        self.message = MessageReply(
            id=message_id,
            model=model,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=self._count(Usage(fold.prompt_tokens, 0)),
        )

    def start(self) -> Iterator[JsonObject]:
        """Write the events with which a stream begins."""
        yield {"type": "message_start", "message": self.message.model_dump()}
        yield {"type": "ping"}

    def push(self, event: Event) -> Iterator[JsonObject]:
        """Put an event of the service into the fold; make those that follow from it."""
        change = self._fold.add(event)
        if change.closed is not None:
            yield from self._close(change.closed)
        section = change.grown
        if section is not None:
            if change.opens:
                yield {"type": "content_block_start", "index": section.place, "content_block": _open_block(section)}
            if change.text and not (section.kind == "thought" and self._hides_thoughts):
                yield _make_delta(section, _describe_growth(section, change.text))
        if isinstance(event, Finish):
            yield from self._finish(event)

    def _close(self, section: Section) -> Iterator[JsonObject]:
        """Make the events of a block that ends."""
        reply = _make_block(section)
        if isinstance(reply, ThinkingReply):
            yield _make_delta(section, {"type": "signature_delta", "signature": reply.signature})
            if self._hides_thoughts:
                reply = reply.model_copy(update={"thinking": ""})
        yield {"type": "content_block_stop", "index": section.place}
        self._blocks.append(reply)

    def _finish(self, event: Finish) -> Iterator[JsonObject]:
        stop_reason = self._name_reason(event)
        self.message = self.message.model_copy(
            update={
                "content": self._blocks,
                "stop_reason": stop_reason,
                "stop_sequence": event.stop if stop_reason == "stop_sequence" else None,
                "usage": self._count(event.usage),
            }
        )
        delta = self.message.model_dump(include={"stop_reason", "stop_sequence", "stop_details", "container"})
        counts = self.message.usage.model_dump(exclude={"service_tier", "cache_creation", "inference_geo"})
        yield {"type": "message_delta", "delta": delta, "usage": counts}
        yield {"type": "message_stop"}

    def _name_reason(self, event: Finish) -> StopReason:
        if event.reason is FinishReason.TOOL_CALLS:
            return "tool_use"
        if event.reason is FinishReason.STOP:
            return "end_turn" if event.stop is None else "stop_sequence"
        is_own_limit = event.usage.completion_tokens >= self._max_tokens
        return "max_tokens" if is_own_limit else "model_context_window_exceeded"

    def _count(self, usage: Usage) -> UsageReply:
        return UsageReply(
            input_tokens=usage.prompt_tokens - usage.cached_tokens,
            cache_read_input_tokens=usage.cached_tokens,
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputDetails(thinking_tokens=self._fold.thought_tokens),
        )


def _make_delta(section: Section, delta: JsonObject) -> JsonObject:
    return {"type": "content_block_delta", "index": section.place, "delta": delta}


def _describe_growth(section: Section, text: str) -> JsonObject:
    if section.kind == "text":
        return {"type": "text_delta", "text": text}
    if section.kind == "thought":
        return {"type": "thinking_delta", "thinking": text}
    return {"type": "input_json_delta", "partial_json": text}


def _open_block(section: Section) -> JsonObject:
    """Return the block when it is opened, empty."""
    if section.kind == "text":
        return TextReply(text="").model_dump()
    if section.kind == "thought":
        return ThinkingReply(thinking="", signature="").model_dump()
    return ToolUseReply(id=section.id, name=section.name, input={}).model_dump()


def _make_block(section: Section) -> BlockReply:
    if section.kind == "text":
        return TextReply(text=section.text)
    if section.kind == "thought":
        return ThinkingReply(thinking=section.text, signature=_sign(section.text))
    return ToolUseReply(id=section.id, name=section.name, input=_read_object(section.text))


def _sign(thought: str) -> str:
    return base64.b64encode(hashlib.sha256(thought.encode("utf-8", "replace")).digest()).decode()


def _read_object(text: str) -> JsonObject:
    """Return the input of a call; empty if the answer ended within the call."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


router = Router(tags=["Anthropic"])
FIELDS = {
    "prompt": "messages",
    "stop": "stop_sequences",
    "think": "thinking",
}  # the service's names of fields that may be wrong, and this dialect's
ERRORS = describe_errors(ErrorReply, "the message names")
STREAMED = describe_stream(
    "The message, or, with `stream`, server-sent events that it is the sum of.", "text/event-stream", ERRORS
)


@router.post("/v1/messages", response_model=MessageReply, responses=STREAMED)
async def create_message(request: Request, body: MessageRequest) -> Response:
    """Answer a conversation: the next message of the assistant, whole or as a stream of events."""
    wanted = body.to_request()
    lease = await borrow(request, body.model)
    with spell_fields(FIELDS):
        generation = await start(request, lease, _fit_model(lease, body, wanted))
    reply_id = in_flight(request).reply_id = make_id("msg_")
    events = MessageEvents(
        reply_id,
        body.model,
        ReplyFold([len(generation.prompt_ids)]),
        body.max_tokens,
        hides_thoughts=body.hides_thoughts,
    )
    if body.stream:
        request_id = in_flight(request).id

        def fail(error: ServerError) -> bytes:
            return sse(render_error(error, request_id), event="error")

        opening = b"".join(map(_frame, events.start()))
        frames = write_frames([generation], lambda event: map(_frame, events.push(event)), opening=opening)
        return EventStream(request, frames, media_type=SSE, on_error=fail)
    for event in await read_all(request, [generation]):
        for _ in events.push(event):
            pass
    return reply_json(events.message)


@router.post("/v1/messages/count_tokens", response_model=TokenCount, responses=ERRORS)
async def count_tokens(request: Request, body: CountRequest) -> Response:
    """Return the number of tokens of a conversation, as `/v1/messages` would read it."""
    wanted = body.to_request()
    lease = await borrow(request, body.model)
    with spell_fields(FIELDS):
        fitting = _fit_model(lease, body, wanted)
        ids = await lease.session.run(lease.session.encode_chat, fitting, reads=fitting)
    return reply_json(TokenCount(input_tokens=len(ids)))


def _fit_model(lease: ModelLease, body: ConversationFields, wanted: ChatRequest) -> ChatRequest:
    """Return the request with the model's own parameters, and a setting of thinking that it knows, off by default if
    possible.

    A model that does not think answers without thoughts, since clients ask any model for them.
    """
    wanted = fill_chat(wanted, lease.record, body)
    if "thinking" not in lease.session.capabilities:
        return replace(wanted, think=None)
    if body.thinking is not None and not isinstance(wanted.think, str):
        return wanted
    return replace(wanted, think=lease.session.fit_think(wanted.think))


def _frame(event: JsonObject) -> bytes:
    return sse(event, event=str(event["type"]))
