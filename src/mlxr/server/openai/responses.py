"""POST /v1/responses."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from starlette.requests import Request
from starlette.responses import Response

from mlxr.server.errors import ServerError
from mlxr.server.finishes import check_events, take_batches, write_frames
from mlxr.server.generation import Generation, borrow, start
from mlxr.server.json_models import JsonObject
from mlxr.server.model_defaults import fill_chat
from mlxr.server.naming import spell_fields
from mlxr.server.openai.errors import name_code
from mlxr.server.openai.response_events import ResponseEvents
from mlxr.server.openai.response_reply import ResponseReply
from mlxr.server.openai.response_request import ResponseRequest
from mlxr.server.openai.route import STREAMED, Head, fit_effort, token_bytes_if
from mlxr.server.routes import Router, reply_json
from mlxr.server.streaming import SSE, EventStream, sse, until_disconnected

router = Router()
FIELDS = {
    "grammar": "text.format",
    "prompt": "input",
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "think": "reasoning",
}  # the service's words for what may be wrong


@router.post("/v1/responses", response_model=ResponseReply, responses=STREAMED)
async def create_response(request: Request, body: ResponseRequest) -> Response:
    """Answer an input. Nothing is kept between two calls."""
    wanted = body.to_request()
    lease = await borrow(request, body.model)
    head = Head.make("resp_", lease, body.model)
    token_bytes = token_bytes_if(body.wants_logprobs, lease)
    with spell_fields(FIELDS):
        generation = await start(request, lease, fill_chat(fit_effort(lease, wanted), lease.record, body))
    events = ResponseEvents(begin_response(body, head), len(generation.prompt_ids), token_bytes)
    if body.stream:

        def fail(error: ServerError) -> bytes:
            return _frame(events.fail(name_code(error), error.message))

        return EventStream(request, _write_frames(generation, events), media_type=SSE, on_error=fail)
    for event in check_events(await until_disconnected(request, generation.read_all())):
        for _ in events.push(event):
            pass
    return reply_json(events.response)


def begin_response(body: ResponseRequest, head: Head) -> ResponseReply:
    """The response before there is an answer: what was asked for, with defaults filled in."""
    text: JsonObject = {"format": {"type": "text"}, "verbosity": "medium"}
    if body.text is not None and body.text.format is not None:
        text["format"] = body.text.format.model_dump(by_alias=True, exclude_none=True)
    reasoning: JsonObject = {"effort": body.reasoning.effort if body.reasoning else None, "summary": None}
    choice = body.tool_choice or "auto"
    return ResponseReply(
        id=head.id,
        created_at=head.created,
        status="in_progress",
        model=head.model,
        output=[],
        instructions=body.instructions,
        max_output_tokens=body.read("max_output_tokens", None),
        metadata=body.metadata or {},
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning=reasoning,
        temperature=body.read("temperature", 1.0),
        text=text,
        tool_choice=choice if isinstance(choice, str) else choice.model_dump(),
        tools=[tool.model_dump() for tool in body.tools or ()],
        top_logprobs=body.top_logprobs or 0,
        top_p=body.read("top_p", 1.0),
        user=body.user,
        safety_identifier=body.safety_identifier,
        prompt_cache_key=body.prompt_cache_key,
    )


async def _write_frames(generation: Generation, events: ResponseEvents) -> AsyncGenerator[bytes, None]:
    yield b"".join(map(_frame, events.start()))
    async for frames in write_frames(take_batches(generation), lambda event: map(_frame, events.push(event))):
        yield frames


def _frame(event: JsonObject) -> bytes:
    return sse(event, event=str(event["type"]))
