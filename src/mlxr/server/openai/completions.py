"""The route `POST /v1/completions`: continues a text, or several.

A reply is rendered from the fold of its events: whole (`render_completion`), or in chunks while it grows
(`CompletionChunks`). A chunk is a completion whose choice holds the next piece.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, cast

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from mlxr.core.errors import InvalidRequest
from mlxr.core.types import Event, Finish, FinishReason, PromptProgress, SamplingParams, TextDelta, TokenInfo
from mlxr.server.generation import borrow, fill_text, read_all, start_all
from mlxr.server.openai.fields import Answers, PenaltyFields, TokenId
from mlxr.server.openai.replies import (
    STREAMED,
    Chunks,
    Head,
    StreamExtras,
    TimingsReply,
    TokenBytes,
    UsageReply,
    count_usage,
    describe_end,
    describe_progress,
    stream_chunks,
    token_bytes_if,
)
from mlxr.server.request_fields import ResponseFormat
from mlxr.server.routes import JsonObject, ReplyModel, Router, optional, reply_json
from mlxr.service.infill import make_infill
from mlxr.service.model_pool import ModelLease
from mlxr.service.requests import Prompt, TextRequest
from mlxr.service.streams import ReplyFold

MAX_PROMPTS = 2048
DEFAULT_MAX_TOKENS = 16
router = Router()
TokenIds = Annotated[list[TokenId], Field(min_length=1)]
Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
TokenLists = Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]
Prompts = str | TokenIds | Texts | TokenLists


class CompletionRequest(PenaltyFields):
    """Continue one text, or each of several."""

    prompt: Prompts | None = Field(None, description="Text or token ids, one or several. Absent: the empty text.")
    best_of: Answers | None = None
    echo: bool | None = Field(None, description="Begin the answer with the prompt.")
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    suffix: str | None = Field(None, description="What comes after the answer; for models with infill tokens.")
    response_format: ResponseFormat | None = Field(None, description="An addition to the dialect.")

    @property
    def includes_usage(self) -> bool:
        """True if a stream ends with a chunk of token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts one by one: text, or token ids."""
        given = self.prompt or ""
        if isinstance(given, str) or isinstance(given[0], int):  # all items have one type, as the model has checked
            return [cast("Prompt", given)]
        return cast("list[Prompt]", given)

    def to_request(self, prompt: Prompt) -> TextRequest:
        """Return the service's request for one of the prompts; raises InvalidRequest naming the field."""
        if self.echo and self.suffix and self.logprobs is not None:
            raise InvalidRequest("logprobs", "cannot be had with echo and suffix: the model reads another prompt then")
        wanted = TextRequest(
            prompt=prompt,
            params=self._make_params(),
            grammar=self.make_grammar(self.response_format, "response_format"),
        )
        return self.add_options(wanted)

    def _make_params(self) -> SamplingParams:
        if self.stream and self.best_of is not None and self.best_of > (self.n or 1):
            raise InvalidRequest("best_of", "cannot be streamed: the best is known when all answers have ended")
        return self.make_params(
            max_tokens=DEFAULT_MAX_TOKENS,
            logit_bias=self.logit_bias,
            logprobs=self.logprobs,
            n=self.n,
            best_of=self.best_of,
        )


TextFinish = Literal["stop", "length"]


class TextLogprobs(ReplyModel):
    """Log-probabilities by token, in four lists of the same length; null for the first token of an echoed prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(ReplyModel):
    """One answer to one prompt."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: TextFinish


class TextCompletion(ReplyModel):
    """All answers to all prompts; those to prompt i have the indices from i * n on."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: UsageReply
    system_fingerprint: str | None
    timings: TimingsReply | None = optional()


def name_text_finish(reason: FinishReason) -> TextFinish:
    """Return OpenAI's word for an answer's end."""
    return "stop" if reason is FinishReason.STOP else "length"


@dataclass(slots=True)
class TokenOffsets:
    """Finds where each token begins in the text, in characters; a split character counts with its last token."""

    offset: int = 0
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )

    def describe(self, tokens: Sequence[TokenInfo], token_bytes: TokenBytes) -> TextLogprobs:
        """Return the next tokens in the dialect's four lists."""
        described = TextLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for token in tokens:
            spelt = token_bytes(token.chosen.token_id)
            described.tokens.append(spelt.decode("utf-8", "replace"))
            described.text_offset.append(self.offset)
            is_known = not math.isnan(token.chosen.logprob)
            described.token_logprobs.append(token.chosen.logprob if is_known else None)
            described.top_logprobs.append(_spell_top(token, token_bytes) if is_known else None)
            self.offset += len(self._decoder.decode(spelt))
        return described


def _spell_top(token: TokenInfo, token_bytes: TokenBytes) -> dict[str, float]:
    """Return log-probabilities by text; of tokens with equal text, as parts of characters, the likeliest counts."""
    spelt: dict[str, float] = {}
    for other in (*token.possible, token.chosen):
        text = token_bytes(other.token_id).decode("utf-8", "replace")
        spelt[text] = max(other.logprob, spelt.get(text, other.logprob))
    return spelt


def render_completion(head: Head, fold: ReplyFold, token_bytes: TokenBytes | None) -> TextCompletion:
    """Return the reply with all answers; `token_bytes` is given if log-probabilities were asked for."""
    return TextCompletion(
        id=head.id,
        created=head.created,
        model=head.model,
        choices=[
            TextChoice(
                index=index,
                text=answer.text,
                logprobs=None if token_bytes is None else TokenOffsets().describe(answer.text_tokens, token_bytes),
                finish_reason=name_text_finish(answer.ended.reason),
            )
            for index, answer in enumerate(fold.answers)
        ],
        usage=count_usage(fold),
        system_fingerprint=head.fingerprint,
        timings=describe_end(fold),
    )


class CompletionChunks(Chunks):
    """The chunks of a text completion."""

    def __init__(self, head: JsonObject, fold: ReplyFold, extras: StreamExtras) -> None:
        super().__init__(head, fold, extras)
        self._offsets = [TokenOffsets() for _ in fold.answers]

    def push(self, event: Event) -> Iterator[JsonObject]:
        """Put an event into the fold, and make its chunks."""
        self.fold.add(event)
        if isinstance(event, PromptProgress):
            yield {**self.make_chunk(_make_choice(event.index, "")), **describe_progress(event)}
        elif isinstance(event, TextDelta):
            logprobs = None
            if self.token_bytes is not None and event.tokens:
                logprobs = self._offsets[event.index].describe(event.tokens, self.token_bytes).model_dump()
            yield self.make_text(event.index, event.text, logprobs)
        elif isinstance(event, Finish):
            yield self.make_last_chunk(_make_choice(event.index, "", None, name_text_finish(event.reason)))

    def make_text(self, index: int, text: str, logprobs: JsonObject | None = None) -> JsonObject:
        """Make a chunk with more text of an answer."""
        return self.make_chunk(_make_choice(index, text, logprobs))


def _make_choice(
    index: int, text: str, logprobs: JsonObject | None = None, reason: TextFinish | None = None
) -> JsonObject:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


@router.post("/v1/completions", response_model=TextCompletion, responses=STREAMED)
async def create_completion(request: Request, body: CompletionRequest) -> Response:
    """Continue one text, or each of several."""
    wanted = [body.to_request(prompt) for prompt in body.prompts]
    lease = await borrow(request, body.model, lora=body.shares)
    if body.suffix:
        wanted = [make_infill(lease.session.tokenizer, one, body.suffix) for one in wanted]
    head = Head.make("cmpl-", lease, body.model)
    token_bytes = token_bytes_if(body.logprobs is not None, lease)
    if body.echo:
        wanted = [replace(one, echo=_echo(lease, prompt)) for one, prompt in zip(wanted, body.prompts, strict=True)]
    generations = await start_all(request, lease, [fill_text(one, lease.record, body) for one in wanted])
    fold = ReplyFold([len(generation.prompt_ids) for generation in generations], wanted[0].params.n)
    if body.stream:
        extras = StreamExtras(body.includes_usage, bool(body.timings_per_token), token_bytes)
        chunks = CompletionChunks(head.to_chunk("text_completion"), fold, extras)
        return stream_chunks(request, generations, chunks)
    fold.add_all(await read_all(request, generations, fold.answers_each))
    return reply_json(render_completion(head, fold, token_bytes))


def _echo(lease: ModelLease, prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else lease.session.decode(prompt)
