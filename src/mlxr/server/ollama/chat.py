"""The route `POST /api/chat`: the next message of a conversation."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from mlxr.core.errors import InvalidRequest
from mlxr.server.generation import borrow
from mlxr.server.json_models import Arguments, JsonObject, RequestModel, Text
from mlxr.server.ollama.answering import AnswerRequest, answer, check_think, load_only
from mlxr.server.ollama.options import make_params, make_window, note_options, read_grammar, read_keep_alive
from mlxr.server.ollama.reply import ChatReply, Part, Parts
from mlxr.server.ollama.route import STREAMED
from mlxr.server.routes import Router
from mlxr.server.truncation import drop_oldest
from mlxr.service.continuation import is_unfinished
from mlxr.service.requests import ChatRequest, Tool

router = Router()


class CalledFunction(RequestModel):
    """The function of an earlier call; its arguments may be JSON text, and are none where they are left out."""

    name: Text
    arguments: Arguments = ""


class ToolCall(RequestModel):
    """An earlier call of a tool."""

    function: CalledFunction
    id: str | None = None


class ChatMessage(RequestModel):
    """A message; a result of a tool says by `tool_name` or `tool_call_id` whose it is."""

    role: Text
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class ToolFunction(RequestModel):
    """A function that the model may call."""

    name: Text
    description: str | None = None
    parameters: JsonObject | None = None


class ToolDefinition(RequestModel):
    """A tool; only functions are supported."""

    function: ToolFunction
    type: str | None = None


class ChatBody(AnswerRequest):
    """A conversation to answer."""

    messages: list[ChatMessage] | None = None
    tools: list[ToolDefinition] | None = None


@router.post("/api/chat", response_model=ChatReply, responses=STREAMED)
async def chat(request: Request, body: ChatBody) -> Response:
    """Answer a conversation; without messages only load or unload the model."""
    body.check()
    note_options(request, body.options)
    messages = list_messages(body.messages or [])
    if not messages:
        return await load_only(request, body, {"message": {"role": "assistant", "content": ""}})
    grammar = read_grammar(body.format)
    lease = await borrow(request, body.model, keep_alive_s=read_keep_alive(body.keep_alive), exact=True)
    wanted = ChatRequest(
        messages=[*lease.record.messages, *messages],
        params=make_params(lease.record, body.options, logprobs=body.logprobs, top_logprobs=body.top_logprobs),
        tools=[_read_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or [])],
        grammar=grammar,
        think=check_think(lease, body.think),
        ending="continued" if is_unfinished(messages) else "new turn",
        window=make_window(lease.record, body.options, body.truncate, lease.session.room_tokens),
    )
    if body.truncate is not False:
        wanted = await lease.session.run(drop_oldest, lease.session, wanted, reads=wanted)
    return await answer(request, body, lease, wanted, _render)


def list_messages(messages: Sequence[ChatMessage]) -> list[JsonObject]:
    """The messages as the service takes them. Calls without an id get one, results without one that of their call."""
    listed: list[JsonObject] = []
    waiting: deque[tuple[str, str]] = deque()  # ids and names of calls that have no result yet
    for index, message in enumerate(messages):
        if message.images:
            raise InvalidRequest(f"messages[{index}].images", "is not supported: models read text only")
        plain: JsonObject = {"role": message.role, "content": message.content or ""}
        if message.thinking and message.role == "assistant":
            plain["reasoning"] = message.thinking
        if message.tool_calls:
            calls = [(call.id or f"call_{index}_{at}", call.function) for at, call in enumerate(message.tool_calls)]
            plain["tool_calls"] = [
                {
                    "id": call_id,
                    "type": "function",
                    "function": {"name": function.name, "arguments": function.arguments},
                }
                for call_id, function in calls
            ]
            waiting.extend((call_id, function.name) for call_id, function in calls)
        if message.role == "tool":
            plain |= _find_call(message, waiting)
        listed.append(plain)
    return listed


def _find_call(message: ChatMessage, waiting: deque[tuple[str, str]]) -> JsonObject:
    """Whose result a message is: what it says itself, else the first call that waits for one of that name."""
    fitting = (call for call in waiting if message.tool_name in (None, call[1]))
    if message.tool_call_id is not None:
        fitting = (call for call in waiting if call[0] == message.tool_call_id)
    call = next(fitting, None)
    if call is not None:
        waiting.remove(call)
    call_id = message.tool_call_id or (call[0] if call is not None else None)
    name = message.tool_name or (call[1] if call is not None else None)
    return {key: value for key, value in (("tool_call_id", call_id), ("name", name)) if value}


def _read_tool(tool: ToolDefinition, field: str) -> Tool:
    if tool.type not in (None, "function"):
        raise InvalidRequest(f"{field}.type", f"must be 'function', got {tool.type[:40]!r}")
    function = tool.function
    return Tool(function.name, function.description or "", function.parameters or {"type": "object", "properties": {}})


def _render(part: Part, _parts: Parts) -> JsonObject:
    message: JsonObject = {"role": "assistant", "content": part.text}
    if part.thinking:
        message["thinking"] = part.thinking
    if part.calls:
        message["tool_calls"] = part.calls
    return {"message": message}
