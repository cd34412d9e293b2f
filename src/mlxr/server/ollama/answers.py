"""POST /api/chat and /api/generate: the next message of a conversation, and the answer to a prompt.

Both read the same options, only load the model if there is nothing to answer, and send the answer whole or in pieces
(`answer`); they differ in the service's request, and in the fields of a piece besides the common ones. POST /api/embed
and its older form /api/embeddings make vectors.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from mlxr.core.errors import InvalidRequest
from mlxr.core.sampling import read_params
from mlxr.core.types import DraftOptions, Event, Grammar, SamplingParams
from mlxr.registry import ModelRecord
from mlxr.registry.modelfile import BY_NAME, check_options, find_idle, read_draft_tokens
from mlxr.server.activity import in_flight
from mlxr.server.errors import spell_fields
from mlxr.server.generation import borrow, embed_all, read_all, start, write_frames
from mlxr.server.ollama.reply import (
    ERRORS,
    STREAMED,
    ChatReply,
    GenerateReply,
    Part,
    Parts,
    error_frame,
    make_piece,
    now,
    to_ns,
)
from mlxr.server.openai.fields import PromptFields
from mlxr.server.parts import parts_of
from mlxr.server.request_fields import drop_oldest, make_schema_grammar
from mlxr.server.routes import Arguments, JsonObject, ReplyModel, RequestModel, Router, Text, note_ignored, reply_json
from mlxr.server.streaming import NDJSON, EventStream, encode_json, ndjson, until_disconnected
from mlxr.service.embedding import check_dimensions, scale_vector
from mlxr.service.infill import make_infill
from mlxr.service.model_pool import ModelLease
from mlxr.service.requests import ChatRequest, TextRequest, Tool, Window, is_unfinished
from mlxr.service.sight import make_part, read_base64

MAX_TOP_LOGPROBS = 20
NUM_KEEP = 4  # Ollama's default
_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
THINK_LEVELS = ("low", "medium", "high", "max")
router = Router()
KeepAlive = Annotated[
    float | str | None, Field(description="Seconds, or a duration such as 5m; 0: unload after use, negative: for ever.")
]
Format = Annotated[str | JsonObject | None, Field(description='"json" or a JSON schema.')]
Options = Annotated[dict[str, object] | None, Field(description=f"Of {', '.join(BY_NAME)}.")]
_DEFAULTS: Mapping[str, object] = {
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.9,
    "repeat_last_n": 64,
    "num_predict": -1,
}
_PART = re.compile(r"([0-9.]+)(ns|us|µs|μs|ms|s|m|h)")


def note_options(request: Request, options: Mapping[str, object] | None, field: str = "options") -> None:
    """Let the response name the options that have no effect here."""
    note_ignored(request, (f"{field}.{name}" for name in find_idle(options or {})))


def make_params(
    record: ModelRecord, options: Mapping[str, object] | None, *, logprobs: bool | None, top_logprobs: int | None
) -> SamplingParams:
    """Return the sampling parameters: the request's options override the model's, and these Ollama's defaults.

    Raises InvalidRequest naming the option.
    """
    given = check_options(options or {})
    fields = read_params(_DEFAULTS, record.parameters, given, prefix="options.")
    return SamplingParams(**fields, logprobs=_count_logprobs(logprobs, top_logprobs))


def make_window(
    record: ModelRecord, options: Mapping[str, object] | None, truncate: bool | None, room_tokens: int
) -> Window:
    """Return the part of the context that a request may take: `num_ctx`, as far as the model and its cache allow.

    Unless `truncate` is false, a prompt that is too long for it is cut behind its first `num_keep` tokens; -1 keeps as
    much of the beginning as there is room for.
    """
    chosen: dict[str, Any] = {"num_ctx": room_tokens, "num_keep": NUM_KEEP, **record.parameters}
    chosen |= check_options(options or {})
    kept_tokens = room_tokens if chosen["num_keep"] < 0 else chosen["num_keep"]
    return Window(min(chosen["num_ctx"], room_tokens), None if truncate is False else kept_tokens)


def read_grammar(wanted: str | JsonObject | None) -> Grammar | None:
    """Return the grammar of the answer; None for any text."""
    if wanted is None or wanted == "":
        return None
    if isinstance(wanted, Mapping):
        return make_schema_grammar(wanted, "format")
    if wanted != "json":
        raise InvalidRequest("format", f'must be "json" or a JSON schema, got {wanted[:80]!r}')
    return Grammar("json_object", field="format")


def read_keep_alive(wanted: float | str | None) -> float | None:
    """Return the seconds, negative for ever; None if the request does not say. Raises InvalidRequest."""
    if wanted is None or isinstance(wanted, int | float):
        return wanted
    text = wanted.strip()
    try:
        seconds = float(text)  # a number in quotes
    except ValueError:
        seconds = _read_duration(text)
    if math.isnan(seconds):
        raise InvalidRequest("keep_alive", f"must be seconds or a duration such as 5m or 1h30m, got {wanted[:40]!r}")
    return seconds


def _read_duration(text: str) -> float:
    """Return the seconds of a duration such as 1h30m; not-a-number if it is none."""
    sign, rest = (-1.0, text[1:]) if text.startswith("-") else (1.0, text.removeprefix("+"))
    parts = _PART.findall(rest)
    if not parts or "".join(number + unit for number, unit in parts) != rest:
        return math.nan
    try:
        return sign * sum(float(number) * _UNITS_S[unit] for number, unit in parts)
    except ValueError:
        return math.nan


def _count_logprobs(logprobs: bool | None, top_logprobs: int | None) -> int | None:
    if top_logprobs is not None and not 0 <= top_logprobs <= MAX_TOP_LOGPROBS:
        raise InvalidRequest("top_logprobs", f"must be from 0 to {MAX_TOP_LOGPROBS}, got {top_logprobs}")
    return (top_logprobs or 0) if logprobs else None


Body = Callable[[Part, Parts], JsonObject]
Think = Annotated[bool | str | None, Field(description=f"Whether to think, or how much: {', '.join(THINK_LEVELS)}.")]


class AnswerRequest(RequestModel):
    """Fields that generate and chat share."""

    model: Text
    stream: bool | None = None
    format: Format = None
    keep_alive: KeepAlive = None
    options: Options = None
    think: Think = None
    truncate: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def check(self) -> None:
        """Raise InvalidRequest for values that name something that is not supported."""
        if isinstance(self.think, str) and self.think not in THINK_LEVELS:
            raise InvalidRequest("think", f"must be true, false or one of {', '.join(THINK_LEVELS)}")


async def load_only(request: Request, body: AnswerRequest, reply: JsonObject) -> Response:
    """Answer a request without a prompt: load the model, or with `keep_alive` 0 unload it."""
    keep_alive_s = read_keep_alive(body.keep_alive)
    if keep_alive_s == 0:
        await until_disconnected(request, parts_of(request).pool.unload(body.model))
    else:
        await borrow(request, body.model, keep_alive_s=keep_alive_s, exact=True)
    reason = "unload" if keep_alive_s == 0 else "load"
    whole = {"model": body.model, "created_at": now(), **reply, "done": True, "done_reason": reason}
    return Response(encode_json(whole), media_type="application/json")


def check_think(lease: ModelLease, think: bool | str | None) -> bool | str | None:
    """Return the model's setting nearest to `think`; raises InvalidRequest if it does not think."""
    if think and "thinking" not in lease.session.capabilities:
        raise InvalidRequest("think", f"{lease.record.short_name!r} does not support thinking")
    if not think and "thinking" not in lease.session.capabilities:
        return None
    return lease.session.fit_think("high" if think == "max" else think)


async def answer(
    request: Request, body: AnswerRequest, lease: ModelLease, wanted: TextRequest | ChatRequest, render: Body
) -> Response:
    """Start the answer and send it, whole or piece by piece; `render` makes the route's own fields of a piece."""
    names = {"logprobs": "top_logprobs", "max_tokens": "options.num_predict"}
    drafts = DraftOptions(read_draft_tokens(lease.record.parameters, check_options(body.options or {})))
    with spell_fields(names):
        generation = await start(request, lease, replace(wanted, drafts=drafts))
    token_bytes = lease.session.tokenizer.token_bytes if body.logprobs else None
    arrived_s = in_flight(request).arrived_s
    parts = Parts(generation.prompt_ids, token_bytes, arrived_s=arrived_s, load_s=lease.load_s)
    if body.stream is not False:
        frames = write_frames([generation], partial(_write, parts, body.model, render))
        return EventStream(request, frames, media_type=NDJSON, on_error=error_frame)
    for event in await read_all(request, [generation]):
        parts.fold.add(event)
    whole = parts.make_whole()
    return Response(encode_json(make_piece(body.model, whole, render(whole, parts))), media_type="application/json")


def _write(parts: Parts, model: str, render: Body, event: Event) -> Iterator[bytes]:
    """Yield the lines that follow from an event."""
    for part in parts.push(event):
        if part.end is not None and part.calls:  # clients look for calls before the end
            before = Part(calls=part.calls)
            yield ndjson(make_piece(model, before, render(before, parts)))
            part.calls = []
        yield ndjson(make_piece(model, part, render(part, parts)))


class CalledFunction(RequestModel):
    """The function of an earlier call; its arguments may be JSON text, or left out if there are none."""

    name: Text
    arguments: Arguments = ""


class ToolCall(RequestModel):
    """An earlier call of a tool."""

    function: CalledFunction
    id: str | None = None


class ChatMessage(RequestModel):
    """A message; a result of a tool names its call by `tool_name` or `tool_call_id`."""

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
    """Return the messages for the service. Calls without an id get one, results without one that of their call."""
    listed: list[JsonObject] = []
    waiting: deque[tuple[str, str]] = deque()  # ids and names of calls that have no result yet
    for index, message in enumerate(messages):
        shown = show_pictures(message.images, message.content or "", f"messages[{index}].images")
        plain: JsonObject = {"role": message.role, "content": shown}
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


def show_pictures(images: Sequence[str] | None, text: str, field: str) -> str | list[JsonObject]:
    """Return a text with its pictures before it."""
    if not images:
        return text
    named = [(image, f"{field}[{index}]") for index, image in enumerate(images)]
    pictures = [make_part(read_base64(image, name), field=name) for image, name in named]
    return [*pictures, {"type": "text", "text": text}]


def _find_call(message: ChatMessage, waiting: deque[tuple[str, str]]) -> JsonObject:
    """Return id and name of the call whose result a message is: its own, else those of the first fitting call that
    waits.
    """
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


class GenerateBody(AnswerRequest):
    """A prompt to answer; `raw` continues it without a template. `context` is that of an earlier reply, `template` one
    to use instead of the model's.
    """

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    context: list[int] | None = None
    raw: bool | None = None
    images: list[str] | None = None

    def check(self) -> None:
        """Raise InvalidRequest for fields that are not supported, or that contradict each other."""
        super().check()
        if self.images and (self.raw or self.suffix or self.context):
            raise InvalidRequest("images", "go with prompt, system and template alone")
        if self.raw and (self.system or self.context or self.template):
            field = "system" if self.system else "context" if self.context else "template"
            raise InvalidRequest(field, "cannot be used with raw, which sends the prompt as it is")
        if self.suffix and (self.raw or self.system or self.context or self.format or self.template):
            raise InvalidRequest("suffix", "goes with prompt alone: not with raw, system, context, format or template")


@router.post("/api/generate", response_model=GenerateReply, responses=STREAMED)
async def generate(request: Request, body: GenerateBody) -> Response:
    """Answer one prompt; without a prompt only load or unload the model."""
    body.check()
    note_options(request, body.options)
    if not body.prompt and not body.suffix:
        return await load_only(request, body, {"response": ""})
    grammar = read_grammar(body.format)
    lease = await borrow(request, body.model, keep_alive_s=read_keep_alive(body.keep_alive), exact=True)
    params = make_params(lease.record, body.options, logprobs=body.logprobs, top_logprobs=body.top_logprobs)
    window = make_window(lease.record, body.options, body.truncate, lease.session.room_tokens)

    def render(part: Part, parts: Parts) -> JsonObject:
        piece: JsonObject = {"response": part.text}
        if part.thinking:
            piece["thinking"] = part.thinking
        if part.end is not None and not body.raw:
            piece["context"] = [*parts.prompt_ids, *parts.fold.token_ids]
        return piece

    with spell_fields({"messages": "prompt", "chat_template": "template"}):
        if body.context:  # the template runs at once
            wanted = await lease.session.run(make_request, body, lease, params, grammar, reads=body.prompt)
        else:
            wanted = make_request(body, lease, params, grammar)
        wanted = replace(wanted, window=window)
        return await answer(request, body, lease, wanted, render)


def make_request(
    body: GenerateBody, lease: ModelLease, params: SamplingParams, grammar: Grammar | None
) -> TextRequest | ChatRequest:
    """Make a turn of a conversation if the model has a chat template, otherwise a text to continue."""
    session, prompt = lease.session, body.prompt or ""
    if body.suffix:
        return make_infill(session.tokenizer, TextRequest(prompt, params), body.suffix)
    if body.raw or not (session.can_chat or body.template):
        check_think(lease, body.think)
        for field in ("context", "images"):
            if getattr(body, field):
                raise InvalidRequest(field, "is not supported: the model has no chat template")
        text = prompt if body.raw or not body.system else f"{body.system}\n\n{prompt}"
        return TextRequest(text, params, grammar=grammar)
    system = [{"role": "system", "content": body.system}] if body.system else []
    shown = [] if body.context else lease.record.messages  # a context holds them already
    messages = [*system, *shown, {"role": "user", "content": show_pictures(body.images, prompt, "images")}]
    think = body.think if body.template else check_think(lease, body.think)
    chat = ChatRequest(messages, params, grammar=grammar, think=think, chat_template=body.template or None)
    if not body.context:
        return chat
    turn = session.encode_chat(chat)
    bos_id = session.tokenizer.bos_id
    return TextRequest([*body.context, *(turn[1:] if turn[:1] == [bos_id] else turn)], params, grammar=grammar)


MAX_INPUTS = 2048


class EmbedBody(PromptFields):
    """The body of a request to `/api/embed`: texts that become vectors."""

    model: Text
    input: Annotated[list[str], Field(max_length=MAX_INPUTS)] | str
    truncate: bool | None = None
    dimensions: Annotated[int | None, Field(ge=0)] = None
    keep_alive: KeepAlive = None
    options: Options = None


class EmbedReply(ReplyModel):
    """One vector of length 1 for each text."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class EmbeddingsBody(RequestModel):
    """One text to embed."""

    model: Text
    prompt: str | None = None
    keep_alive: KeepAlive = None
    options: Options = None


class EmbeddingsReply(ReplyModel):
    """The reply of `/api/embeddings`: the text's vector, of any length."""

    embedding: list[float]


@router.post("/api/embed", response_model=EmbedReply, responses=ERRORS)
async def embed(request: Request, body: EmbedBody) -> Response:
    """Turn texts into vectors, pooled as the model's files state. Without any text only load the model."""
    check_options(body.options or {})
    note_options(request, body.options)
    texts = [body.input] if isinstance(body.input, str) else body.input
    texts = [] if texts == [""] else texts
    lease = await borrow(request, body.model, keep_alive_s=read_keep_alive(body.keep_alive), exact=True)
    check_dimensions(body.dimensions, lease.session.config.vector_size)
    vectors, tokens, headers = await embed_all(
        request, lease, texts, None, body.prompt_choice, truncates=body.truncate is not False
    )
    return reply_json(
        EmbedReply(
            model=body.model,
            embeddings=[scale_vector(vector, body.dimensions or None).tolist() for vector in vectors],
            total_duration=to_ns(monotonic() - in_flight(request).arrived_s),
            load_duration=to_ns(lease.load_s),
            prompt_eval_count=tokens,
        ),
        headers=headers,
    )


@router.post("/api/embeddings", response_model=EmbeddingsReply, responses=ERRORS, deprecated=True)
async def embeddings(request: Request, body: EmbeddingsBody) -> Response:
    """Turn one text into a vector, not scaled."""
    check_options(body.options or {})
    note_options(request, body.options)
    lease = await borrow(request, body.model, keep_alive_s=read_keep_alive(body.keep_alive), exact=True)
    texts = [body.prompt] if body.prompt else []
    vectors, _, headers = await embed_all(request, lease, texts, field="prompt", truncates=True)
    return reply_json(EmbeddingsReply(embedding=vectors[0].tolist() if vectors else []), headers=headers)
