"""The routes below `/v1/chat/completions`: the next message of a conversation, and how many tokens it has."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from starlette.requests import Request
from starlette.responses import Response

from mlxr.server.activity import in_flight
from mlxr.server.finishes import check_events, take_batches, write_frames
from mlxr.server.generation import Generation, borrow, start
from mlxr.server.ignored import note_ignored
from mlxr.server.json_models import JsonObject
from mlxr.server.model_defaults import fill_chat
from mlxr.server.naming import spell_fields
from mlxr.server.openai.chat_reply import ChatCompletion, ChatFold, ChatInputTokens, ControlReply, VerboseReply
from mlxr.server.openai.chat_request import FIELDS, ChatCompletionRequest, ControlRequest
from mlxr.server.openai.chat_stream import ChatChunks
from mlxr.server.openai.replies import RunningTimings
from mlxr.server.openai.route import ERRORS, STREAMED, Head, error_frame, fit_effort, token_bytes_if
from mlxr.server.routes import Router, reply_json
from mlxr.server.streaming import DONE, SSE, EventStream, sse, until_disconnected

router = Router()
# What streams without /v1 begin with, and those that tell of the prompt before anything is known of the answer.
LLAMACPP_OPENING: JsonObject = {"role": "assistant", "content": None}


@router.post("/v1/chat/completions", response_model=ChatCompletion, responses=STREAMED)
async def create_chat_completion(request: Request, body: ChatCompletionRequest) -> Response:
    """Answer a conversation: one or more messages of the assistant, whole or as a stream of chunks."""
    wanted = body.to_request()
    lease = await borrow(request, body.model, lora=body.shares)
    head = Head.make("chatcmpl-", lease, body.model)
    if body.prediction is not None and not lease.session.drafts:
        note_ignored(request, ["prediction"])
    token_bytes = token_bytes_if(bool(body.logprobs), lease)
    wanted = fill_chat(fit_effort(request, lease, wanted, "reasoning_effort"), lease.record, body)
    in_flight(request).reply_id = head.id
    with spell_fields(FIELDS):
        generation = await start(request, lease, wanted)
    prompt_tokens, answers = len(generation.prompt_ids), wanted.params.n
    if body.stream:
        chunks = ChatChunks(
            head.to_chunk("chat.completion.chunk"),
            prompt_tokens=prompt_tokens,
            answers=answers,
            includes_usage=body.includes_usage,
            token_bytes=token_bytes,
            opening=LLAMACPP_OPENING if body.return_progress or not request.url.path.startswith("/v1/") else None,
            running=RunningTimings(prompt_tokens) if body.timings_per_token else None,
        )
        return EventStream(request, _write_frames(generation, chunks), media_type=SSE, on_error=error_frame)
    fold = ChatFold(prompt_tokens, answers, token_bytes)
    for event in check_events(await until_disconnected(request, generation.read_all())):
        fold.add(event)
    reply = fold.to_reply(head.id, head.created, head.model, head.fingerprint)
    if body.verbose:
        prompt = lease.session.tokenizer.decode(generation.prompt_ids, skip_special=False)
        reply = reply.model_copy(update={"verbose": VerboseReply(prompt=prompt)})
    return reply_json(reply)


@router.post("/v1/chat/completions/control", response_model=ControlReply, responses=ERRORS)
async def control_chat_completion(request: Request, body: ControlRequest) -> Response:
    """Let a model that thinks answer now, as llama.cpp's server has it."""
    request.app.state.activity.end_thoughts(body.id, in_flight(request).key_id, "id")
    return reply_json(ControlReply())


@router.post("/v1/chat/completions/input_tokens", response_model=ChatInputTokens, responses=ERRORS)
async def count_input_tokens(request: Request, body: ChatCompletionRequest) -> Response:
    """How many tokens a conversation has, as `/v1/chat/completions` would read it."""
    lease = await borrow(request, body.model, lora=body.shares)
    wanted = fill_chat(fit_effort(request, lease, body.to_request(), "reasoning_effort"), lease.record, body)
    with spell_fields(FIELDS):
        ids = await lease.session.run(lease.session.encode_chat, wanted, reads=wanted)
    return reply_json(ChatInputTokens(input_tokens=len(ids)))


async def _write_frames(generation: Generation, chunks: ChatChunks) -> AsyncGenerator[bytes, None]:
    async for frames in write_frames(take_batches(generation), lambda event: map(sse, chunks.push(event))):
        yield frames
    yield b"".join([*map(sse, chunks.end()), DONE])
