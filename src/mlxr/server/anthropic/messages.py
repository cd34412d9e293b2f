"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from mlxr.server.activity import in_flight
from mlxr.server.anthropic.reply import ErrorReply, MessageEvents, MessageReply, TokenCount, render_error
from mlxr.server.anthropic.request import ConversationFields, CountRequest, MessageRequest
from mlxr.server.errors import ServerError, spell_fields
from mlxr.server.generation import borrow, fill_chat, read_all, start, write_frames
from mlxr.server.json_models import JsonObject, make_id
from mlxr.server.routes import Router, describe_errors, describe_stream, reply_json
from mlxr.server.streaming import SSE, EventStream, sse
from mlxr.service.completion import ReplyFold
from mlxr.service.model_pool import ModelLease
from mlxr.service.requests import ChatRequest

router = Router(tags=["Anthropic"])
FIELDS = {
    "prompt": "messages",
    "stop": "stop_sequences",
    "think": "thinking",
}  # the service's words for what may be wrong
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
    """Return how many tokens a conversation has, as `/v1/messages` would read it."""
    wanted = body.to_request()
    lease = await borrow(request, body.model)
    with spell_fields(FIELDS):
        fitting = _fit_model(lease, body, wanted)
        ids = await lease.session.run(lease.session.encode_chat, fitting, reads=fitting)
    return reply_json(TokenCount(input_tokens=len(ids)))


def _fit_model(lease: ModelLease, body: ConversationFields, wanted: ChatRequest) -> ChatRequest:
    """The request with what the model brings along, and thinking as it knows it: off by default where it can be.

    A model that does not think answers without, since clients ask for thoughts whatever the model.
    """
    wanted = fill_chat(wanted, lease.record, body)
    if "thinking" not in lease.session.capabilities:
        return replace(wanted, think=None)
    if body.thinking is not None and not isinstance(wanted.think, str):
        return wanted
    return replace(wanted, think=lease.session.fit_think(wanted.think))


def _frame(event: JsonObject) -> bytes:
    return sse(event, event=str(event["type"]))
