"""The body of a chat completion, its translation to the service's request, and its reply.

One model serves the messages of all roles, so that a wrong one is refused with one error that names the field. The
fields of each role are checked here, the conversation as a whole by the service.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from mlxr.core.errors import InvalidRequest
from mlxr.core.types import (
    Event,
    Finish,
    FinishReason,
    PromptProgress,
    ReasoningDelta,
    TextDelta,
    TokenInfo,
    ToolCallDelta,
)
from mlxr.server.activity import in_flight
from mlxr.server.errors import spell_fields
from mlxr.server.generation import borrow, fill_chat, read_all, start
from mlxr.server.openai.fields import (
    Effort,
    FunctionTool,
    Mode,
    ObjectChoice,
    PenaltyFields,
    ReasoningOptions,
    read_offer,
)
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
    spell_tokens,
    stream_chunks,
    token_bytes_if,
)
from mlxr.server.parts import parts_of
from mlxr.server.request_fields import ResponseFormat
from mlxr.server.routes import (
    Arguments,
    JsonObject,
    ReplyModel,
    RequestModel,
    Router,
    Text,
    Unsupported,
    describe_call,
    dump_json,
    note_ignored,
    optional,
    reply_json,
)
from mlxr.service.requests import ChatRequest, Ending, Message, is_unfinished
from mlxr.service.sight import DETAILS, make_document, make_part, make_sound, read_base64, read_url
from mlxr.service.streams import AnswerFold, Change, ReplyFold

FILES = ("image_url", "input_audio", "file")  # parts other than text
PART_KEYS = {
    **{kind: kind for kind in FILES},
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
MAX_MESSAGE_CHARACTERS = 4096
FIELDS = {
    "prompt": "messages",
    "think": "reasoning_effort",
    "extra": "chat_template_kwargs",
}  # the service's names of fields that may be wrong, and this dialect's


Role = Literal["system", "developer", "user", "assistant", "tool"]


class ImageUrl(RequestModel):
    """A picture as a data: URL, or at an address of an origin that the setting image_origins names.

    With detail low it takes fewer tokens.
    """

    url: str
    detail: Literal[DETAILS] | None = None  # type: ignore[valid-type]


class AudioData(RequestModel):
    """A sound in base64; its first bytes tell its kind."""

    data: Text
    format: str | None = None


class FileData(RequestModel):
    """A PDF, or a text in UTF-8, as a data: URL."""

    file_data: str
    filename: str | None = None
    file_id: Unsupported = None


class ContentPart(RequestModel):
    """A piece of text under the key that its type has, a picture, a sound or a document."""

    type: Literal["text", "input_text", "output_text", "refusal", "thinking", "image_url", "input_audio", "file"]
    image_url: ImageUrl | str | None = None
    input_audio: AudioData | None = None
    file: FileData | None = None
    text: str | None = None
    refusal: str | None = None
    thinking: str | None = None


class CalledFunction(RequestModel):
    """A call's function and its arguments as JSON text, or as the JSON itself."""

    name: Text
    arguments: Arguments = ""


class ToolCallPart(RequestModel):
    """A call that the assistant made earlier."""

    id: Text
    type: Literal["function"] = "function"
    function: CalledFunction


class ThoughtPart(RequestModel):
    """A piece of an earlier thought, as LiteLLM (`thinking`) or OpenRouter (`text`, `summary`) keep it; encrypted ones
    have no use here.
    """

    thinking: str | None = None
    text: str | None = None
    summary: str | None = None


class ChatMessage(RequestModel):
    """One message. The assistant's thoughts may be in any of the fields in which clients send them back."""

    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = Field(None, description="Of the participant, or of the tool.")
    tool_calls: list[ToolCallPart] | None = None
    tool_call_id: Text | None = None
    reasoning_content: str | None = Field(None, description="What the assistant thought before.")
    reasoning: str | None = Field(None, description="The same in another spelling.")
    thinking_blocks: list[ThoughtPart] | None = Field(None, description="The same in pieces.")
    reasoning_details: list[ThoughtPart] | None = Field(None, description="The same in pieces.")
    refusal: str | None = Field(None, description="What the assistant said in place of content.")
    audio: Unsupported = None
    function_call: Unsupported = None

    @property
    def thought(self) -> str:
        """The assistant's thoughts, "" for none, from whichever field has them."""
        pieces = self.thinking_blocks or self.reasoning_details or ()
        joined = "".join(piece.thinking or piece.text or piece.summary or "" for piece in pieces)
        return self.reasoning_content or self.reasoning or joined or _join(self.content, thoughts=True)

    @property
    def hides_all(self) -> bool:
        """True if there are only hidden thoughts, which make no turn."""
        has_more = isinstance(self.content, list) and any(part.type in FILES for part in self.content)
        says_something = self.thought or join_text(self.content) or self.refusal or self.tool_calls or has_more
        return bool(self.thinking_blocks or self.reasoning_details) and not says_something


def read_messages(messages: Sequence[ChatMessage]) -> list[Message]:
    """Return messages for the service; raises InvalidRequest naming the field that a role lacks or cannot have."""
    read = [_read_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    return [plain for message, plain in zip(messages, read, strict=True) if not message.hides_all]


def join_text(content: str | Sequence[ContentPart] | None) -> str:
    """Return the text of a content, without thoughts in it."""
    return (content or "") if content is None or isinstance(content, str) else _join(content, thoughts=False)


def _join(content: str | Sequence[ContentPart] | None, *, thoughts: bool) -> str:
    """Join the parts of a content that are thoughts, or those that are not."""
    if content is None or isinstance(content, str):
        return ""
    pieces = (part for part in content if part.type not in FILES and (part.type == "thinking") is thoughts)
    return "".join(getattr(part, PART_KEYS[part.type]) or "" for part in pieces)


def _show_files(content: Sequence[ContentPart], field: str) -> list[JsonObject]:
    """Return texts, pictures, sounds and documents in their order."""
    parts: list[JsonObject] = []
    for index, part in enumerate(content):
        if part.file is not None and part.type == "file":
            place = f"{field}[{index}].file"
            parts.append(make_document(read_url(part.file.file_data, f"{place}.file_data"), part.file.filename, place))
        elif part.type == "input_audio" and part.input_audio is not None:
            place = f"{field}[{index}].input_audio.data"
            parts.append(make_sound(read_base64(part.input_audio.data, place), place))
        elif part.type == "image_url":
            place = f"{field}[{index}].image_url"
            given = part.image_url if isinstance(part.image_url, ImageUrl) else ImageUrl(url=part.image_url or "")
            parts.append(make_part(read_url(given.url, f"{place}.url"), given.detail))
        elif part.type != "thinking":
            parts.append({"type": "text", "text": getattr(part, PART_KEYS[part.type]) or ""})
    return parts


def _read_message(message: ChatMessage, field: str) -> Message:
    _check_role(message, field)
    read: dict[str, object] = {"role": message.role, "content": join_text(message.content) or message.refusal or ""}
    if isinstance(message.content, list) and any(part.type in FILES for part in message.content):
        read["content"] = _show_files(message.content, f"{field}.content")
    if message.name is not None:
        read["name"] = message.name
    if message.tool_call_id is not None:
        read["tool_call_id"] = message.tool_call_id
    if message.thought:
        read["reasoning"] = message.thought
    if message.tool_calls:
        read["tool_calls"] = [
            _read_call(call, f"{field}.tool_calls[{index}]") for index, call in enumerate(message.tool_calls)
        ]
    return read


def _read_call(call: ToolCallPart, field: str) -> JsonObject:
    arguments = call.function.arguments
    text = arguments if isinstance(arguments, str) else dump_json(arguments, f"{field}.function.arguments")
    return describe_call(call.id, call.function.name, text)


def _check_role(message: ChatMessage, field: str) -> None:
    is_assistant = message.role == "assistant"
    if message.content is None and message.role not in ("assistant", "tool"):
        raise InvalidRequest(f"{field}.content", "is missing")
    for index, part in enumerate(message.content or () if not isinstance(message.content, str) else ()):
        if getattr(part, PART_KEYS[part.type]) is None:
            raise InvalidRequest(f"{field}.content[{index}].{PART_KEYS[part.type]}", "is missing")
    if message.tool_calls and not is_assistant:
        raise InvalidRequest(f"{field}.tool_calls", "only the assistant calls tools")
    if message.thought and not is_assistant:
        raise InvalidRequest(f"{field}.reasoning_content", "only the assistant thinks aloud")
    if message.role == "tool" and message.tool_call_id is None:
        raise InvalidRequest(f"{field}.tool_call_id", "is missing; it names the call that this answers")
    if message.tool_call_id is not None and message.role != "tool":
        raise InvalidRequest(f"{field}.tool_call_id", "belongs to messages of the role 'tool'")


class PredictedContent(RequestModel):
    """A text that the answer is likely to repeat in long parts."""

    type: Literal["content"] = "content"
    content: str | list[ContentPart]


class ChatCompletionRequest(PenaltyFields):
    """The body of a request to `/v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Mode | ObjectChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    reasoning: ReasoningOptions | None = Field(None, description="Another place of these: OpenRouter's.")
    reasoning_budget_message: Annotated[str, Field(max_length=MAX_MESSAGE_CHARACTERS)] | None = Field(
        None, description="What a thought ends with when its budget is used up. Absent: the setting thinking_message."
    )
    reasoning_control: bool | None = Field(
        None, description="Thoughts can always be ended by POST /v1/chat/completions/control, whatever this says."
    )
    modalities: list[Literal["text"]] | None = None
    functions: Unsupported = None
    function_call: Unsupported = None
    audio: Unsupported = None
    web_search_options: Unsupported = None
    prediction: PredictedContent | None = Field(
        None, description="What the answer is likely to repeat, which makes it faster; the answer is the same."
    )
    continue_final_message: bool | None = Field(
        None, description="Go on with the assistant's last message, which happens unless this is false."
    )
    add_generation_prompt: bool | None = Field(
        None, description="True: the answer is a new message even behind one of the assistant; false: nothing is added."
    )
    verbose: bool | None = Field(None, description="Tell the prompt as the model read it, in `__verbose`.")
    chat_template: str | None = Field(
        None, description="A template to use instead of the model's, in Jinja, or the name of one that mlxr brings."
    )
    chat_template_kwargs: JsonObject | None = Field(None, description="Further variables of the chat template.")

    @property
    def includes_usage(self) -> bool:
        """True if a stream ends with a chunk of token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def list_given(self) -> dict[str, object]:
        """Return the values that the request sets; a budget in `reasoning` is one of them."""
        nested = None if self.reasoning is None else self.reasoning.max_tokens
        given = super().list_given()
        return given if nested is None else {"thinking_budget": nested, **given}

    def to_request(self) -> ChatRequest:
        """Return the service's request; raises InvalidRequest naming the field."""
        offer = read_offer(self.tools, self.tool_choice)
        effort = self.reasoning_effort or (self.reasoning.think if self.reasoning else None)
        messages = read_messages(self.messages)
        wanted = ChatRequest(
            messages=messages,
            ending=self._find_ending(messages),
            params=self.make_params(logit_bias=self.logit_bias, logprobs=self._count_logprobs(), n=self.n),
            tools=offer.tools,
            tool_choice=offer.choice,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            grammar=self.make_grammar(self.response_format, "response_format"),
            think=False if effort == "none" else effort,
            chat_template=self.chat_template or None,
            template_values=self.chat_template_kwargs or {},
            thinking_message=self.reasoning_budget_message,
        )
        return self.add_options(wanted, "" if self.prediction is None else join_text(self.prediction.content))

    def _find_ending(self, messages: Sequence[Message]) -> Ending:
        """Return the kind of the prompt's end: by default inside a last message of the assistant, as in llama.cpp."""
        adds, continues = self.add_generation_prompt, self.continue_final_message
        if adds and continues:
            raise InvalidRequest("continue_final_message", "and add_generation_prompt cannot both be true")
        if continues or (is_unfinished(messages) and continues is None and adds is None):
            return "continued"
        return "closed" if adds is False else "new turn"

    def _count_logprobs(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs", "needs logprobs to be true")
        return (self.top_logprobs or 0) if self.logprobs else None


class ControlRequest(RequestModel):
    """A command for a growing answer; `id` is that of the completion, or of its request."""

    id: Text
    action: Literal["reasoning_end"]


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
    """The prompt as the model read it."""

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
    """The number of tokens of a conversation."""

    input_tokens: int


class ControlReply(ReplyModel):
    """A confirmation that the command for a growing answer was carried out."""

    success: Literal[True] = True


def name_finish(reason: FinishReason) -> ChatFinish:
    """Return OpenAI's word for an answer's end; a cancelled one counts as cut short. Failed ones never get here."""
    if reason is FinishReason.TOOL_CALLS:
        return "tool_calls"
    return "stop" if reason is FinishReason.STOP else "length"


def render_chat(head: Head, fold: ReplyFold, token_bytes: TokenBytes | None) -> ChatCompletion:
    """Return the reply with all answers; `token_bytes` is given if log-probabilities were asked for."""
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

    `opening` is the first delta of each answer. Without it, the first delta depends on the first event: `content` is ""
    before text and null before thoughts and calls, since some clients take "" for the beginning of a text.
    """

    def __init__(
        self, head: JsonObject, fold: ReplyFold, extras: StreamExtras, opening: JsonObject | None = None
    ) -> None:
        super().__init__(head, fold, extras)
        self._opening = opening
        self._opened: set[int] = set()

    def push(self, event: Event) -> Iterator[JsonObject]:
        """Put an event into the fold, and make its chunks; the first one of an answer names the role."""
        change = self.fold.add(event)
        if event.index not in self._opened:
            self._opened.add(event.index)
            yield self.make_chunk(_make_choice(event.index, self._opening or _open_with(event)), says_tokens=False)
        match event:
            case PromptProgress():
                yield {**self.make_chunk(_make_choice(event.index, {})), **describe_progress(event)}
            case TextDelta():
                yield self.make_text(event.index, event.text, self._describe_tokens(event.tokens))
            case ReasoningDelta():
                yield self.make_chunk(_make_choice(event.index, {"reasoning_content": event.text}))
            case ToolCallDelta():
                yield self.make_chunk(_make_choice(event.index, {"tool_calls": [_describe_call(change)]}))
            case Finish():
                yield self.make_last_chunk(_make_choice(event.index, {}, None, name_finish(event.reason)))

    def make_text(self, index: int, text: str, logprobs: JsonObject | None = None) -> JsonObject:
        """Make a chunk with more text of an answer."""
        return self.make_chunk(_make_choice(index, {"content": text}, logprobs))

    def _describe_tokens(self, tokens: Sequence[TokenInfo]) -> JsonObject | None:
        if self.token_bytes is None or not tokens:
            return None
        return {"content": spell_tokens(tokens, self.token_bytes), "refusal": None}


def _make_choice(
    index: int, delta: JsonObject, logprobs: JsonObject | None = None, reason: ChatFinish | None = None
) -> JsonObject:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def _open_with(event: Event) -> JsonObject:
    """Return the first delta of an answer that begins with `event`."""
    content = "" if isinstance(event, TextDelta | Finish) else None
    return {"role": "assistant", "content": content, "refusal": None}


def _describe_call(change: Change) -> JsonObject:
    section = change.grown
    assert section is not None
    if not change.opens:
        return {"index": section.call, "function": {"arguments": change.text}}
    function = {"name": section.name, "arguments": change.text}
    return {"index": section.call, "id": section.id, "type": "function", "function": function}


# The first delta of streams without /v1, and of those that report the prompt's progress before the answer begins.
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
    """End a model's thinking so that it answers now, as in llama.cpp's server."""
    parts_of(request).activity.end_thoughts(body.id, in_flight(request).key_id, "id")
    return reply_json(ControlReply())


@router.post("/v1/chat/completions/input_tokens", response_model=ChatInputTokens, responses=ERRORS)
async def count_input_tokens(request: Request, body: ChatCompletionRequest) -> Response:
    """Return the number of tokens of a conversation, as `/v1/chat/completions` would read it."""
    lease = await borrow(request, body.model, lora=body.shares)
    wanted = fill_chat(fit_effort(request, lease, body.to_request(), "reasoning_effort"), lease.record, body)
    with spell_fields(FIELDS):
        ids = await lease.session.run(lease.session.encode_chat, wanted, reads=wanted)
    return reply_json(ChatInputTokens(input_tokens=len(ids)))
