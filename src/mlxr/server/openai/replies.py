"""The common parts of OpenAI replies: errors, token counts, times, log-probabilities, heads and streams.

A reply begins with its `Head`. A plain one takes its counts from the fold of its events; for a stream, `Chunks` turns
the events into chunks, one by one. llama.cpp's dialect takes its counts and times from here too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

from starlette.requests import Request

from mlxr.core.frozen import frozen
from mlxr.core.types import Event, PromptProgress, TextDelta, Timings, TokenInfo, TokenLogprob
from mlxr.server.errors import ServerError
from mlxr.server.generation import Generation, write_frames
from mlxr.server.routes import JsonObject, ReplyModel, describe_errors, describe_stream, make_id, note_ignored, optional
from mlxr.server.streaming import DONE, SSE, EventStream, encode_json, sse
from mlxr.service.identity import read_clock
from mlxr.service.model_pool import ModelLease
from mlxr.service.requests import ChatRequest
from mlxr.service.streams import AnswerFold, ReplyFold

ErrorType = Literal[
    "invalid_request_error", "authentication_error", "rate_limit_error", "server_error", "exceed_context_size_error"
]
_CODES = {
    "unauthorized": "invalid_api_key",
    "rate_limited": "rate_limit_exceeded",
    "queue_full": "rate_limit_exceeded",
    "internal": "server_error",
}


class ErrorDetail(ReplyModel):
    """An error; `param` names the field at fault. If a prompt is too long, llama.cpp's clients read `type`,
    `n_prompt_tokens` and `n_ctx`.
    """

    message: str
    type: ErrorType
    param: str | None
    code: str | None
    n_prompt_tokens: int | None = optional()
    n_ctx: int | None = optional()


class ErrorReply(ReplyModel):
    """The body of every error on OpenAI's routes."""

    error: ErrorDetail


def render_error(error: ServerError, _request_id: str = "") -> JsonObject:
    """Return the body of an error; the id of the request is only in the header `x-request-id`."""
    return {
        "error": {
            "message": error.message,
            "type": name_type(error),
            "param": error.field,
            "code": name_code(error),
            **error.counts,
        }
    }


def name_type(error: ServerError) -> ErrorType:
    """Return OpenAI's word for a kind of error, or llama.cpp's for the one that its clients look for."""
    if error.code == "context_length_exceeded":
        return "exceed_context_size_error"
    if error.status == 401:
        return "authentication_error"
    if error.status == 429:
        return "rate_limit_error"
    return "server_error" if error.status >= 500 else "invalid_request_error"


def name_code(error: ServerError) -> str:
    """Return OpenAI's word for an error if it has one, otherwise ours."""
    if error.code == "not_found" and error.field == "model":
        return "model_not_found"
    return _CODES.get(error.code, error.code)


TokenBytes = Callable[[int], bytes]


class PromptTokensDetails(ReplyModel):
    """The number of the prompt's tokens that came from the cache."""

    cached_tokens: int


class CompletionTokensDetails(ReplyModel):
    """The numbers of the answer's tokens that are reasoning, of those that the request's `prediction` got right, and of
    the prediction's tokens that are not in the answer.
    """

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class UsageReply(ReplyModel):
    """Tokens of a reply, all answers together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TimingsReply(ReplyModel):
    """The times of a reply (an addition to the dialect). `cache_n` prompt tokens came from the cache.

    Of `draft_n` drafted tokens that were computed, `draft_n_accepted` were right.
    """

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float | None
    prompt_per_second: float | None
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float | None
    predicted_per_second: float | None
    queue_ms: float
    draft_n: int
    draft_n_accepted: int


class TopLogprob(ReplyModel):
    """A token that could have been chosen."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprobReply(TopLogprob):
    """A token of the answer, and the most likely ones in its place."""

    top_logprobs: list[TopLogprob]


class LogprobsReply(ReplyModel):
    """Log-probabilities of the answer's text."""

    content: list[TokenLogprobReply] | None
    refusal: None = None


def count_usage(fold: ReplyFold) -> UsageReply:
    """Return the token counts of the answers that have ended."""
    timings = fold.timings
    return UsageReply(
        prompt_tokens=fold.prompt_tokens,
        completion_tokens=fold.ended_tokens,
        total_tokens=fold.prompt_tokens + fold.ended_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=fold.cached_tokens),
        completion_tokens_details=CompletionTokensDetails(
            reasoning_tokens=fold.thought_tokens,
            accepted_prediction_tokens=0 if timings is None else timings.expected_tokens,
            rejected_prediction_tokens=0 if timings is None else timings.missed_tokens,
        ),
    )


def describe_end(fold: ReplyFold) -> TimingsReply | None:
    """Return the times of the answers that have ended; None if the engine measured none."""
    timings, cached = fold.timings, fold.cached_tokens
    if timings is None:
        return None
    return describe_timings(timings, cached, fold.prompt_tokens - cached, fold.ended_tokens)


def time_end(fold: ReplyFold) -> JsonObject:
    """Return the field `timings` of a chunk that ends an answer; empty if the engine measured none."""
    timings = describe_end(fold)
    return {} if timings is None else {"timings": timings.model_dump()}


def time_growth(fold: ReplyFold | AnswerFold) -> JsonObject:
    """Return the field `timings` of a chunk in the middle of an answer."""
    cached = fold.cached_tokens
    timings = describe_timings(fold.read_clock(), cached, fold.prompt_tokens - cached, fold.generated_tokens)
    return {"timings": timings.model_dump()}


def describe_progress(event: PromptProgress) -> JsonObject:
    """Return the field `prompt_progress` of a chunk, as in llama.cpp's server."""
    return {
        "prompt_progress": {
            "total": event.prompt_tokens,
            "cache": event.cached_tokens,
            "processed": event.read_tokens,
            "time_ms": round(event.seconds * 1000),
        }
    }


def describe_timings(timings: Timings, cache_n: int, prompt_n: int, predicted_n: int) -> TimingsReply:
    """Return durations and the tokens that took them: `prompt_n` computed ones of the prompt, `predicted_n` of the
    answer.
    """
    return TimingsReply(
        cache_n=cache_n,
        prompt_n=prompt_n,
        prompt_ms=timings.prompt_s * 1000,
        prompt_per_token_ms=timings.prompt_s * 1000 / prompt_n if prompt_n else None,
        prompt_per_second=prompt_n / timings.prompt_s if timings.prompt_s else None,
        predicted_n=predicted_n,
        predicted_ms=timings.generate_s * 1000,
        predicted_per_token_ms=timings.generate_s * 1000 / predicted_n if predicted_n else None,
        predicted_per_second=predicted_n / timings.generate_s if timings.generate_s else None,
        queue_ms=timings.queue_s * 1000,
        draft_n=timings.drafted_tokens,
        draft_n_accepted=timings.accepted_tokens,
    )


def spell_tokens(tokens: Sequence[TokenInfo], token_bytes: TokenBytes) -> list[JsonObject]:
    """Return log-probabilities in the form of chat completions and Responses, for chunks of a stream."""
    spelt = []
    for token in tokens:
        top = [_spell_token(other, token_bytes) for other in token.possible]
        spelt.append({**_spell_token(token.chosen, token_bytes), "top_logprobs": top})
    return spelt


def describe_tokens(tokens: Sequence[TokenInfo], token_bytes: TokenBytes) -> list[TokenLogprobReply]:
    """Return the same for a whole reply."""
    return [TokenLogprobReply.model_validate(token) for token in spell_tokens(tokens, token_bytes)]


def _spell_token(token: TokenLogprob, token_bytes: TokenBytes) -> JsonObject:
    spelt = token_bytes(token.token_id)
    return {"token": spelt.decode("utf-8", "replace"), "logprob": token.logprob, "bytes": list(spelt)}


ERRORS = describe_errors(ErrorReply, "`param` names")
STREAMED = describe_stream(
    "The whole answer, or, with `stream`, server-sent events that it is the sum of.", "text/event-stream", ERRORS
)


@frozen
class Head:
    """The head of a reply, which identifies it. `model` is the requested name, as clients expect to see it."""

    id: str
    created: int
    model: str
    fingerprint: str

    @classmethod
    def make(cls, prefix: str, lease: ModelLease, model: str | None) -> Head:
        """Make the head of a new reply."""
        created = int(read_clock())
        name = model or lease.record.short_name
        return cls(make_id(prefix), created, name, f"fp_{lease.record.digest[:12]}")

    def to_chunk(self, kind: str) -> JsonObject:
        """Return the fields with which the chunks of a stream begin."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


def token_bytes_if(wanted: bool, lease: ModelLease) -> TokenBytes | None:
    """Return the function that spells tokens, if log-probabilities are `wanted`."""
    return lease.session.tokenizer.token_bytes if wanted else None


def fit_effort(request: Request, lease: ModelLease, wanted: ChatRequest, field: str) -> ChatRequest:
    """Return the request with an effort that the model knows; if it has no levels, the effort stands for a budget.

    A model that does not think answers without thoughts; the effort's `field` then counts as without effect. If a
    model has levels and always thinks, "off" becomes the lowest level. A request with its own template is unchanged.
    """
    if wanted.chat_template is not None:
        return wanted
    if wanted.think is False:
        return replace(wanted, think=lease.session.fit_think(False) or False)
    if wanted.think is None:
        return wanted
    if "thinking" not in lease.session.capabilities:
        note_ignored(request, [field])
        return replace(wanted, think=None)
    return replace(wanted, think=lease.session.fit_think(wanted.think))


def error_frame(error: ServerError) -> bytes:
    """Return the last event of a stream that fails."""
    return sse(render_error(error))


@frozen
class StreamExtras:
    """The contents of a stream besides the answer."""

    includes_usage: bool = False  # token counts at the end
    times_tokens: bool = False  # timings with every token
    token_bytes: TokenBytes | None = None  # spells tokens, if log-probabilities were asked for


MARK = "\0text\0"  # in place of the text in a template; texts of clients come only before it


class Template:
    """A server-sent event in which only a text changes: the last value that is MARK."""

    __slots__ = ("_after", "_before")

    def __init__(self, value: JsonObject) -> None:
        self._before, _, self._after = sse(value).rpartition(encode_json(MARK))

    def fill(self, text: str) -> bytes:
        """Return the event with `text`."""
        return self._before + encode_json(text) + self._after


class Chunks(ABC):
    """Makes the chunks of a stream: plain dictionaries, since there is one for every token."""

    def __init__(self, head: JsonObject, fold: ReplyFold, extras: StreamExtras) -> None:
        """`head` has the first fields of all chunks: id, object, created, model, system_fingerprint."""
        self.fold, self.token_bytes = fold, extras.token_bytes
        self._head = {**head, "usage": None} if extras.includes_usage else head
        self._extras = extras
        self._texts: dict[int, Template] = {}  # of answers whose text has begun

    def render(self, event: Event) -> Iterable[bytes]:
        """Put an event into the fold, and write its chunks as server-sent events.

        Those of plain text differ only in the text, so all but the first of an answer are written by a template.
        """
        if not isinstance(event, TextDelta) or self.token_bytes is not None or self._extras.times_tokens:
            return map(sse, self.push(event))
        template = self._texts.get(event.index)
        if template is None:
            self._texts[event.index] = Template(self.make_text(event.index, MARK))
            return map(sse, self.push(event))
        self.fold.add(event)
        return (template.fill(event.text),)

    @abstractmethod
    def make_text(self, index: int, text: str, logprobs: JsonObject | None = None) -> JsonObject:
        """Make a chunk with more text of an answer."""

    @abstractmethod
    def push(self, event: Event) -> Iterator[JsonObject]:
        """Put an event into the fold, and make its chunks."""

    def end(self) -> Iterator[JsonObject]:
        """Make the chunk of token counts, if it was asked for."""
        if self._extras.includes_usage:
            usage = count_usage(self.fold).model_dump()
            yield {**self._head, "choices": [], "usage": usage, **time_end(self.fold)}

    def make_chunk(self, choice: JsonObject, *, says_tokens: bool = True) -> JsonObject:
        """Make a chunk in the middle of an answer."""
        timings = time_growth(self.fold) if self._extras.times_tokens and says_tokens else {}
        return {**self._head, "choices": [choice], **timings}

    def make_last_chunk(self, choice: JsonObject) -> JsonObject:
        """Make the chunk with which an answer ends."""
        return {**self._head, "choices": [choice], **({} if self._extras.includes_usage else time_end(self.fold))}


def stream_chunks(request: Request, generations: Sequence[Generation], chunks: Chunks) -> EventStream:
    """Return the reply as a stream of chunks, with the mark of the end behind the last one."""

    def end() -> bytes:
        return b"".join([*map(sse, chunks.end()), DONE])

    frames = write_frames(generations, chunks.render, answers_each=chunks.fold.answers_each, end=end)
    return EventStream(request, frames, media_type=SSE, on_error=error_frame)
