"""The routes below `/v1/chat/completions`: the next message of a conversation, and how many tokens it has.

A reply is rendered from the fold of its events: whole (`render_chat`), or in chunks while it grows (`ChatChunks`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from starlette.requests import Request
from starlette.responses import Response

from mlxr.core.events import Event, Finish, PromptProgress, ReasoningDelta, TextDelta, TokenInfo, ToolCallDelta
from mlxr.core.types import FinishReason
from mlxr.server.activity import in_flight
from mlxr.server.errors import spell_fields
from mlxr.server.generation import borrow, fill_chat, read_all, start
from mlxr.server.json_models import JsonObject, ReplyModel, optional
from mlxr.server.openai.chat_request import FIELDS, ChatCompletionRequest, ControlRequest
from mlxr.server.openai.replies import (
    ERRORS,
    STREAMED,
    Chunks,
    Head,
    LogprobsReply,
    StreamExtras,
    TimingsReply,
    TokenBytes,
    UsageReply,
    count_usage,
    describe_end,
    describe_progress,
    describe_tokens,
    fit_effort,
    stream_chunks,
    token_bytes_if,
)
from mlxr.server.parts import parts_of
from mlxr.server.routes import Router, note_ignored, reply_json
from mlxr.service.completion import AnswerFold, Change, ReplyFold

router = Router()
ChatFinish = Literal["stop", "length", "tool_calls"]


class CalledFunctionReply(ReplyModel):
    """A call's function and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCallReply(ReplyModel):
    """A call of a tool."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunctionReply


class MessageReply(ReplyModel):
    """The assistant's message, whole."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | None = optional()
    tool_calls: list[ToolCallReply] | None = optional()


class ChatChoice(ReplyModel):
    """One of the answers in a reply that is not streamed."""

    index: int
    message: MessageReply
    logprobs: LogprobsReply | None
    finish_reason: ChatFinish


class VerboseReply(ReplyModel):
    """Holds the prompt as the model read it."""

    prompt: str


class ChatCompletion(ReplyModel):
    """All answers to a conversation."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageReply
    system_fingerprint: str | None
    timings: TimingsReply | None = optional()
    verbose: VerboseReply | None = optional("__verbose")


class ChatInputTokens(ReplyModel):
    """Says how many tokens a conversation has."""

    input_tokens: int


class ControlReply(ReplyModel):
    """Confirms that what was asked of a growing answer has been done."""

    success: Literal[True] = True


def name_finish(reason: FinishReason) -> ChatFinish:
    """OpenAI's word for how an answer ended; a cancelled one counts as cut short. Failed ones never get here."""
    if reason is FinishReason.TOOL_CALLS:
        return "tool_calls"
    return "stop" if reason is FinishReason.STOP else "length"


def render_chat(head: Head, fold: ReplyFold, token_bytes: TokenBytes | None) -> ChatCompletion:
    """Return the reply with all answers; `token_bytes` is given where log-probabilities were asked for."""
    return ChatCompletion(
        id=head.id,
        created=head.created,
        model=head.model,
        choices=[_render_choice(index, answer, token_bytes) for index, answer in enumerate(fold.answers)],
        usage=count_usage(fold),
        system_fingerprint=head.fingerprint,
        timings=describe_end(fold),
    )


def _render_choice(index: int, answer: AnswerFold, token_bytes: TokenBytes | None) -> ChatChoice:
    calls = [
        ToolCallReply(id=call.id, function=CalledFunctionReply(name=call.name, arguments=call.text))
        for call in answer.calls
    ]
    message = MessageReply(
        content=None if calls and not answer.text else answer.text,
        reasoning_content=answer.thought or None,
        tool_calls=calls or None,
    )
    logprobs = None
    if token_bytes is not None:
        logprobs = LogprobsReply(content=describe_tokens(answer.text_tokens, token_bytes))
    return ChatChoice(index=index, message=message, logprobs=logprobs, finish_reason=name_finish(answer.ended.reason))


class ChatChunks(Chunks):
    """The chunks of a chat completion.

    `opening` is the first delta of each answer. Without it that depends on what comes first: only where that is text,
    `content` is an empty one, which some clients take for the beginning of a text; before thoughts and calls it is
    null.
    """

    def __init__(
        self, head: JsonObject, fold: ReplyFold, extras: StreamExtras, opening: JsonObject | None = None
    ) -> None:
        super().__init__(head, fold, extras)
        self._opening = opening
        self._opened: set[int] = set()

    def push(self, event: Event) -> Iterator[JsonObject]:
        """Put an event into the fold, and make its chunks; the first of an answer says whose turn it is."""
        change = self.fold.add(event)
        if event.index not in self._opened:
            self._opened.add(event.index)
            yield self.make_chunk(_make_choice(event.index, self._opening or _open_with(event)), says_tokens=False)
        match event:
            case PromptProgress():
                yield {**self.make_chunk(_make_choice(event.index, {})), **describe_progress(event)}
            case TextDelta():
                logprobs = self._describe_tokens(event.tokens)
                yield self.make_chunk(_make_choice(event.index, {"content": event.text}, logprobs))
            case ReasoningDelta():
                yield self.make_chunk(_make_choice(event.index, {"reasoning_content": event.text}))
            case ToolCallDelta():
                yield self.make_chunk(_make_choice(event.index, {"tool_calls": [_describe_call(change)]}))
            case Finish():
                yield self.make_last_chunk(_make_choice(event.index, {}, None, name_finish(event.reason)))

    def _describe_tokens(self, tokens: Sequence[TokenInfo]) -> JsonObject | None:
        if self.token_bytes is None or not tokens:
            return None
        described = describe_tokens(tokens, self.token_bytes)
        return {"content": [token.model_dump() for token in described], "refusal": None}


def _make_choice(
    index: int, delta: JsonObject, logprobs: JsonObject | None = None, reason: ChatFinish | None = None
) -> JsonObject:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def _open_with(event: Event) -> JsonObject:
    """The first delta of an answer that begins with `event`."""
    content = "" if isinstance(event, TextDelta | Finish) else None
    return {"role": "assistant", "content": content, "refusal": None}


def _describe_call(change: Change) -> JsonObject:
    section = change.grown
    assert section is not None
    if not change.opens:
        return {"index": section.call, "function": {"arguments": change.text}}
    function = {"name": section.name, "arguments": change.text}
    return {"index": section.call, "id": section.id, "type": "function", "function": function}


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
    fold = ReplyFold([len(generation.prompt_ids)], wanted.params.n)
    if body.stream:
        extras = StreamExtras(body.includes_usage, bool(body.timings_per_token), token_bytes)
        is_llamacpp = body.return_progress or not request.url.path.startswith("/v1/")
        opening = LLAMACPP_OPENING if is_llamacpp else None
        chunks = ChatChunks(head.to_chunk("chat.completion.chunk"), fold, extras, opening)
        return stream_chunks(request, [generation], chunks)
    fold.add_all(await read_all(request, [generation]))
    reply = render_chat(head, fold, token_bytes)
    if body.verbose:
        prompt = lease.session.tokenizer.decode(generation.prompt_ids, skip_special=False)
        reply = reply.model_copy(update={"verbose": VerboseReply(prompt=prompt)})
    return reply_json(reply)


@router.post("/v1/chat/completions/control", response_model=ControlReply, responses=ERRORS)
async def control_chat_completion(request: Request, body: ControlRequest) -> Response:
    """Let a model that thinks answer now, as llama.cpp's server has it."""
    parts_of(request).activity.end_thoughts(body.id, in_flight(request).key_id, "id")
    return reply_json(ControlReply())


@router.post("/v1/chat/completions/input_tokens", response_model=ChatInputTokens, responses=ERRORS)
async def count_input_tokens(request: Request, body: ChatCompletionRequest) -> Response:
    """Return how many tokens a conversation has, as `/v1/chat/completions` would read it."""
    lease = await borrow(request, body.model, lora=body.shares)
    wanted = fill_chat(fit_effort(request, lease, body.to_request(), "reasoning_effort"), lease.record, body)
    with spell_fields(FIELDS):
        ids = await lease.session.run(lease.session.encode_chat, wanted, reads=wanted)
    return reply_json(ChatInputTokens(input_tokens=len(ids)))
