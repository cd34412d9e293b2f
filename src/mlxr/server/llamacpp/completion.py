"""Replies of llama.cpp's server: errors, and an answer, whole or as chunks of which the last one holds all counts.

Errors have OpenAI's frame with the HTTP status as `code` and words of their own. `Probabilities` describes the
probability of each token, before or after the rules that narrow the choice.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, RootModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlxr.core.errors import InvalidRequest
from mlxr.core.frozen import frozen
from mlxr.core.sampling import read_params
from mlxr.core.types import (
    MAX_TOP_LOGPROBS,
    PARAMETERS,
    DraftOptions,
    Event,
    Finish,
    FinishReason,
    Grammar,
    PromptProgress,
    SamplingParams,
    TextDelta,
    TokenInfo,
    TokenLogprob,
)
from mlxr.registry import ModelRecord
from mlxr.registry.modelfile import read_draft_tokens
from mlxr.server.errors import ServerError, spell_fields
from mlxr.server.generation import Generation, borrow, read_all, start_all, write_frames
from mlxr.server.openai.fields import AdapterFields, Answers, DraftFields
from mlxr.server.openai.replies import TokenBytes, describe_progress, describe_timings, time_growth
from mlxr.server.request_fields import (
    RULES,
    GrammarFields,
    LlamacppParameters,
    Prompts,
    SamplerFields,
    read_media,
    read_prompt,
    read_samplers,
    split_prompts,
)
from mlxr.server.routes import JsonObject, ReplyModel, RequestModel, Router, describe_errors, describe_stream
from mlxr.server.streaming import SSE, EventStream, sse
from mlxr.service.infill import Snippet, encode_infill, find_infill_tokens
from mlxr.service.model_pool import ModelLease
from mlxr.service.requests import Prompt, TextRequest
from mlxr.service.session import Session
from mlxr.service.streams import AnswerFold, ReplyFold

ErrorType = Literal[
    "invalid_request_error",
    "exceed_context_size_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "not_supported_error",
    "unavailable_error",
    "server_error",
]
_TYPES: dict[int, ErrorType] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    501: "not_supported_error",
    503: "unavailable_error",
}


class ErrorDetail(ReplyModel):
    """An error. `field` and `request_id` are additions: the part at fault, and the id in the log."""

    code: int
    message: str
    type: ErrorType
    n_prompt_tokens: int | None = None
    n_ctx: int | None = None
    field: str | None = None
    request_id: str | None = None


class ErrorReply(ReplyModel):
    """The body of every error on llama.cpp's routes."""

    error: ErrorDetail


ERRORS = describe_errors(ErrorReply, "`field` names")
STREAMED = describe_stream(
    "The whole answer, or, with `stream`, server-sent events that it is the sum of.", "text/event-stream", ERRORS
)


def render_error(error: ServerError, request_id: str = "") -> JsonObject:
    """Return the body of an error."""
    fallback: ErrorType = "server_error" if error.status >= 500 else "invalid_request_error"
    detail: JsonObject = {"code": error.status, "message": error.message, "type": _TYPES.get(error.status, fallback)}
    if error.code == "context_length_exceeded":
        detail["type"] = "exceed_context_size_error"
        detail["message"] = f"the request exceeds the available context size: {error.message}"
        detail |= error.counts
    if error.field is not None:
        detail["field"] = error.field
    if request_id:
        detail["request_id"] = request_id
    return {"error": detail}


def error_frame(error: ServerError) -> bytes:
    """Return the last event of a stream that fails."""
    return sse(render_error(error))


@frozen
class Probabilities:
    """Describes tokens with the `count` likeliest in their places.

    With `is_final` the shares are those that the token was drawn with: after temperature, top_k, top_p and min_p of
    `params`, whose top_k must not exceed the number of reported tokens.
    """

    token_bytes: TokenBytes
    count: int
    params: SamplingParams
    is_final: bool

    def describe(self, token: TokenInfo) -> JsonObject:
        """Describe one token of an answer."""
        if not self.is_final:
            top = [self._spell(one, {"logprob": one.logprob}) for one in token.possible[: self.count]]
            return {**self._spell(token.chosen, {"logprob": token.chosen.logprob}), "top_logprobs": top}
        shares = find_shares(token.top, self.params)
        top = [
            self._spell(one, {"prob": share})
            for one, share in zip(token.top[: self.count], shares, strict=False)
            if share > 0
        ]
        chosen = next((share for one, share in zip(token.top, shares, strict=False) if self._is(one, token)), 0.0)
        return {**self._spell(token.chosen, {"prob": chosen}), "top_probs": top}

    def _is(self, one: TokenLogprob, token: TokenInfo) -> bool:
        return one.token_id == token.chosen.token_id

    def _spell(self, token: TokenLogprob, measure: JsonObject) -> JsonObject:
        spelt = self.token_bytes(token.token_id)
        return {"id": token.token_id, "token": spelt.decode("utf-8", "replace"), "bytes": list(spelt), **measure}


def find_shares(top: Sequence[TokenLogprob], params: SamplingParams) -> list[float]:
    """Return the probabilities with which the best tokens are sampled, best first; they add up to 1.

    `top` must hold at least the params.top_k best tokens, so that no other one matters.
    """
    logprobs = [one.logprob for one in top[: params.top_k]]
    if not logprobs or logprobs[0] == -math.inf:
        return []
    if params.temperature == 0:
        return [1.0]
    distances = np.array(logprobs) - logprobs[0]
    seen = np.exp(distances / (1.0 if params.temperature_last else params.temperature))  # by top_p and min_p
    if params.top_p < 1:
        reached = np.cumsum(seen) >= params.top_p * seen.sum()
        seen = seen[: int(np.argmax(reached)) + 1]
    kept = np.count_nonzero(seen >= params.min_p)
    weights = np.exp(distances[:kept] / params.temperature)
    shares: list[float] = (weights / weights.sum()).tolist()
    return shares


@frozen
class Frame:
    """The data that all answers of a request share."""

    model: str
    prompts: Sequence[str]  # the texts that the model read, one for each answer
    settings: JsonObject  # the parameters of the answers, for the reply
    most_tokens: int | None
    probabilities: Probabilities | None = None
    returns_tokens: bool = False
    times_tokens: bool = False
    is_silent: bool = False  # no token was wanted
    fields: Sequence[str] = ()  # the wanted fields of a whole reply; empty for all


class AnswerReply:
    """Renders one answer: as chunks while it grows, or whole."""

    def __init__(self, frame: Frame, index: int, fold: AnswerFold) -> None:
        self._frame, self._index, self._fold = frame, index, fold

    def push(self, event: Event) -> Iterator[JsonObject]:
        """Put an event into the fold; make its chunks. If probabilities were asked for, each token has its own."""
        self._fold.add(event)
        if isinstance(event, Finish):
            yield {**self._describe_end(), "content": "", "tokens": []}
            return
        if isinstance(event, PromptProgress):
            yield {**self._make_chunk("", (), ()), **describe_progress(event)}
            return
        if self._frame.is_silent:
            return
        text = event.text if isinstance(event, TextDelta) else ""
        described = self._describe_tokens(event.tokens)
        if len(described) != len(event.token_ids):
            yield self._make_chunk(text, event.token_ids, described)
            return
        for place, token_id in enumerate(event.token_ids, 1):
            part = text if place == len(event.token_ids) else ""
            yield self._make_chunk(part, [token_id], described[place - 1 : place])

    def make_whole(self) -> JsonObject:
        """Return the whole reply, after the last event."""
        reply = self._describe_end()
        described = [] if self._frame.is_silent else self._describe_tokens(self._fold.tokens)
        if described:
            reply["completion_probabilities"] = described
        return pick_fields(reply, self._frame.fields)

    def _describe_tokens(self, tokens: Sequence[TokenInfo]) -> list[JsonObject]:
        probabilities = self._frame.probabilities
        return [] if probabilities is None else [*map(probabilities.describe, tokens)]

    def _make_chunk(self, text: str, token_ids: Sequence[int], described: Sequence[JsonObject]) -> JsonObject:
        chunk: JsonObject = {
            "index": self._index,
            "content": text,
            "tokens": list(token_ids),
            "stop": False,
            "id_slot": self._index,
            "tokens_predicted": self._fold.generated_tokens,
            "tokens_evaluated": self._fold.prompt_tokens,
        }
        if self._frame.times_tokens:
            chunk |= time_growth(self._fold)
        if described:
            chunk["completion_probabilities"] = list(described)
        return chunk

    def _describe_end(self) -> JsonObject:
        frame, finish = self._frame, self._fold.ended
        text = "" if frame.is_silent else self._fold.text
        predicted = 0 if frame.is_silent else finish.usage.completion_tokens
        cut = finish.reason is FinishReason.LENGTH
        reply: JsonObject = {
            "index": self._index,
            "content": text,
            "tokens": self._fold.token_ids if frame.returns_tokens and not frame.is_silent else [],
            "id_slot": self._index,
            "stop": True,
            "model": frame.model,
            "tokens_predicted": predicted,
            "tokens_evaluated": finish.usage.prompt_tokens,
            "generation_settings": frame.settings,
            "prompt": frame.prompts[self._index],
            "has_new_line": "\n" in text,
            "truncated": cut and (frame.most_tokens is None or finish.usage.completion_tokens < frame.most_tokens),
            "stop_type": "limit" if cut else "eos" if finish.stop is None else "word",
            "stopping_word": finish.stop or "",
            "tokens_cached": finish.usage.cached_tokens,
        }
        if finish.timings is not None:
            cached = finish.usage.cached_tokens
            computed = finish.usage.prompt_tokens - cached
            reply["timings"] = describe_timings(finish.timings, cached, computed, predicted).model_dump()
        return reply


def pick_fields(reply: JsonObject, fields: Sequence[str]) -> JsonObject:
    """Return the wanted fields of a reply, all if none are named; `a/b` is `b` of `a`. Unknown ones are left out."""
    if not fields:
        return reply
    picked: JsonObject = {}
    for name in fields:
        value: object = reply
        for part in name.split("/"):
            value = value[part] if isinstance(value, Mapping) and part in value else None
        if value is not None:
            picked[name] = value
    return picked


DRAWN_SEED = 0xFFFFFFFF  # llama.cpp's value for a random seed
# The service's names of fields that may be wrong, and llama.cpp's.
FIELDS = {"max_tokens": "n_predict", "repetition_penalty": "repeat_penalty", "logprobs": "n_probs", "n": "n_cmpl"}
router = Router()
DEFAULTS: Mapping[str, Any] = {
    "temperature": 0.8,
    "temperature_last": True,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.05,
    "repeat_last_n": 64,
    "n_predict": -1,
}
# Parameters that the engine's log-probabilities include, those that end answers, and those that `find_shares` applies.
_KNOWN_SHARES = frozenset(
    {"repetition_penalty", "presence_penalty", "frequency_penalty", "repeat_last_n", "seed", "max_tokens", "stop"}
    | {"temperature", "temperature_last", "top_k", "top_p", "min_p"}
)
Bias = list[list[int | float | str | bool]] | dict[str, float | bool]


class CompletionFields(GrammarFields, SamplerFields, LlamacppParameters, DraftFields, AdapterFields):
    """The fields for sampling and for the reply's contents. `n_predict` 0 only reads the prompt into the cache."""

    model: str | None = Field(None, description="Name of the model; absent: the server's default model.")
    stream: bool | None = None
    n_cmpl: Answers | None = Field(None, description="Answers to each prompt.")
    n: Answers | None = Field(None, description="The same as n_cmpl.")
    ignore_eos: bool | None = None
    logit_bias: Bias | None = Field(
        None, description="Pairs of a token id or a text and what is added to its logits; false: never."
    )
    n_probs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = Field(None, description="The same as n_probs.")
    post_sampling_probs: bool | None = Field(None, description="Probabilities as they were drawn from.")
    return_tokens: bool | None = None
    cache_prompt: bool | None = None
    timings_per_token: bool | None = None
    return_progress: bool | None = Field(None, description="Tell in a stream how much of the prompt has been read.")
    response_fields: Annotated[list[str], Field(max_length=256)] | None = None
    id_slot: int | None = Field(None, description="A hint; answers are placed where there is room.")

    @property
    def only_reads(self) -> bool:
        """True if no token is wanted."""
        return self._wanted_tokens == 0

    @property
    def top_probs(self) -> int:
        """The number of tokens to report with their probabilities in each place; 0 for none."""
        return self.n_probs or self.logprobs or 0

    @property
    def most_tokens(self) -> float:
        """The most tokens that the answer may have."""
        wanted = self._wanted_tokens
        return math.inf if wanted is None or wanted < 0 else wanted

    @property
    def _wanted_tokens(self) -> int | None:
        given = self.list_given()
        wanted = given.get("n_predict", given.get("max_tokens"))
        return wanted if isinstance(wanted, int) else None

    def make_params(self, record: ModelRecord, session: Session) -> SamplingParams:
        """Make the parameters for the engine; raises InvalidRequest naming the field."""
        given = self.list_given()
        if self.only_reads:
            given |= {"n_predict": 1, "max_tokens": 1}
        if given.get("seed") == DRAWN_SEED:
            given["seed"] = -1
        fields = read_params(DEFAULTS, record.parameters, given)
        return SamplingParams(
            **fields,
            ignore_eos=bool(self.ignore_eos),
            logit_bias=_read_bias(self.logit_bias, session),
            logprobs=self._count_logprobs(fields),
            n=self.n_cmpl or self.n or 1,
        )

    def _count_logprobs(self, fields: Mapping[str, Any]) -> int | None:
        """Return the number of tokens that the engine reports: all that can be sampled if final shares are wanted."""
        if not self.top_probs:
            return None
        if not self.post_sampling_probs:
            return self.top_probs
        for row in PARAMETERS:
            if row.name not in _KNOWN_SHARES and fields.get(row.name, row.default) != row.default:
                raise InvalidRequest("post_sampling_probs", f"cannot be told together with {row.name}")
        top_k = fields["top_k"]
        if not 0 < top_k <= MAX_TOP_LOGPROBS:
            raise InvalidRequest("post_sampling_probs", f"needs a top_k from 1 to {MAX_TOP_LOGPROBS}, got {top_k}")
        return max(self.top_probs, int(top_k))


def describe_settings(params: SamplingParams, body: CompletionFields) -> JsonObject:
    """Return the parameters of an answer, under llama.cpp's names; those that do not exist here are off."""
    named = {name: getattr(params, row.name) for row in PARAMETERS for name in row.list_names("llamacpp")}
    most_tokens = 0 if body.only_reads else -1 if params.max_tokens is None else params.max_tokens
    biases = params.logit_bias.items()
    return {
        **named,
        "seed": DRAWN_SEED if params.seed is None else params.seed,
        "stop": list(params.stop),
        "n_predict": most_tokens,
        "max_tokens": most_tokens,
        "adaptive_target": -1.0,
        "adaptive_decay": 0.0,
        "n_keep": 0,
        "n_discard": 0,
        "ignore_eos": params.ignore_eos,
        "logit_bias": [{"token": token, "bias": bias if math.isfinite(bias) else None} for token, bias in biases],
        "stream": bool(body.stream),
        "n_probs": body.top_probs,
        "post_sampling_probs": bool(body.post_sampling_probs),
        "timings_per_token": bool(body.timings_per_token),
        "samplers": [*RULES] if body.samplers is None else read_samplers(body.samplers),
        "lora": [{"id": index, "scale": scale} for index, scale in body.shares or ()],
    }


def _read_bias(given: Bias | None, session: Session) -> dict[int, float]:
    """Return the bias of each token's logit: a text counts for each of its tokens, several entries add up."""
    pairs = list(given.items()) if isinstance(given, dict) else given or []
    biases: dict[int, float] = {}
    for place, pair in enumerate(pairs):
        if len(pair) != 2 or isinstance(pair[1], str):
            raise InvalidRequest(f"logit_bias[{place}]", "must be a token id or a text, and a number or false")
        key, value = pair
        bias = -math.inf if value is False else float(value)
        for token_id in _find_tokens(key, session, f"logit_bias[{place}]"):
            biases[token_id] = biases.get(token_id, 0.0) + bias
    return biases


def _find_tokens(key: object, session: Session, field: str) -> list[int]:
    if isinstance(key, str):
        if not (key.isascii() and key.isdecimal() and len(key) <= 9):
            return session.tokenizer.encode(key, add_special=False)
        key = int(key)
    if not isinstance(key, int) or isinstance(key, bool) or not 0 <= key < session.config.vocab_size:
        raise InvalidRequest(field, f"must name one of the {session.config.vocab_size} tokens, or a text")
    return [key]


async def answer(
    request: Request,
    body: CompletionFields,
    lease: ModelLease,
    prompts: Sequence[Prompt],
    *,
    as_list: bool = False,
    grammar: Grammar | None = None,
    ends: frozenset[int] = frozenset(),
    media: Sequence[Sequence[bytes]] = (),
) -> Response:
    """Reply to all prompts: with one object, a list of them, or events. The tokens `ends` end an answer.

    `media` has the pictures of each prompt.
    """
    with spell_fields(FIELDS):
        params = replace(body.make_params(lease.record, lease.session), stop_token_ids=ends)
        given = body.draft_tokens
        drafts = DraftOptions(read_draft_tokens(lease.record.parameters) if given is None else given)
        wanted = [
            TextRequest(
                prompt,
                params,
                grammar=grammar,
                cache_prompt=body.cache_prompt is not False,
                drafts=drafts,
                reports_progress=bool(body.stream and body.return_progress),
                pictures=shown,
                pictures_field="prompt.multimodal_data",
            )
            for prompt, shown in zip(prompts, media or [()] * len(prompts), strict=True)
        ]
        generations = await start_all(request, lease, wanted)
    frame = await asyncio.to_thread(_make_frame, body, lease, params, generations)
    fold = ReplyFold([len(generation.prompt_ids) for generation in generations], params.n)
    replies = [AnswerReply(frame, index, one) for index, one in enumerate(fold.answers)]
    if body.stream:

        def write(event: Event) -> list[bytes]:
            return [sse(chunk) for chunk in replies[event.index].push(event)]

        frames = write_frames(generations, write, answers_each=params.n)
        return EventStream(request, frames, media_type=SSE, on_error=error_frame)
    fold.add_all(await read_all(request, generations, params.n))
    wholes = [reply.make_whole() for reply in replies]
    return JSONResponse(wholes if as_list or len(wholes) > 1 else wholes[0])


def _make_frame(
    body: CompletionFields, lease: ModelLease, params: SamplingParams, generations: Sequence[Generation]
) -> Frame:
    tokenizer = lease.session.tokenizer
    probabilities = None
    if body.top_probs:
        probabilities = Probabilities(tokenizer.token_bytes, body.top_probs, params, bool(body.post_sampling_probs))
    texts = [tokenizer.decode(generation.prompt_ids, skip_special=False) for generation in generations]
    return Frame(
        model=body.model or lease.record.short_name,
        prompts=[text for text in texts for _ in range(params.n)],
        settings=describe_settings(params, body),
        most_tokens=params.max_tokens,
        probabilities=probabilities,
        returns_tokens=bool(body.return_tokens),
        times_tokens=bool(body.timings_per_token),
        is_silent=body.only_reads,
        fields=body.response_fields or (),
    )


class CompletionBody(CompletionFields):
    """Continue one prompt, or each of several."""

    prompt: Prompts


class CompletionReply(RootModel[JsonObject | list[JsonObject]]):
    """The answer to one prompt in the form of llama.cpp's server, or a list of them; perhaps only some fields."""


@router.post("/completion", response_model=CompletionReply, responses=STREAMED)
@router.post("/completions", response_model=CompletionReply, responses=STREAMED)
async def create_completion(request: Request, body: CompletionBody) -> Response:
    """Continue one prompt, or each of several."""
    given, as_list = split_prompts(body.prompt, "prompt")
    lease = await borrow(request, body.model, lora=body.shares)

    def read() -> list[tuple[Prompt, list[bytes]]]:
        session = lease.session
        return [(read_prompt(session, one, "prompt", takes_pictures=True), read_media(one, "prompt")) for one in given]

    prompts, media = zip(*await lease.session.run(read, reads=given), strict=True)
    return await answer(request, body, lease, prompts, as_list=as_list, grammar=body.make_grammar(), media=media)


class ExtraInput(RequestModel):
    """Another file, or a part of one."""

    text: str
    filename: str | None = None


class InfillBody(CompletionFields):
    """A gap in a text. `prompt` is the text between the prefix and the cursor."""

    input_prefix: str
    input_suffix: str
    input_extra: list[ExtraInput] | None = None
    prompt: str | None = None


@router.post("/infill", response_model=CompletionReply, responses=STREAMED)
async def create_infill(request: Request, body: InfillBody) -> Response:
    """Fill a gap in code, for models with infill tokens."""
    lease = await borrow(request, body.model, lora=body.shares)
    session = lease.session
    tokens = find_infill_tokens(session.tokenizer)
    if tokens is None:
        raise ServerError(501, "not_supported", "infill is not supported by this model: it has no infill tokens")
    encode = partial(
        encode_infill,
        session.tokenizer,
        body.input_prefix + (body.prompt or ""),
        body.input_suffix,
        [Snippet(extra.text, extra.filename or "tmp") for extra in body.input_extra or ()],
        max_tokens=session.context_tokens - int(min(body.most_tokens, session.context_tokens // 4)),
    )
    try:
        prompt = await session.run(encode, reads=[body.input_prefix, body.input_suffix])
    except InvalidRequest as error:
        raise InvalidRequest("input_prefix", error.reason) from None
    return await answer(request, body, lease, [prompt], grammar=body.make_grammar(), ends=tokens.ends)
