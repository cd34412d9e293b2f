"""POST /completion (and /completions, the same here: OpenAI's lies below /v1) and /infill: the continuation of prompts.

`CompletionFields` are what both take. A value is the request's, else the model's own, else the default that llama.cpp's
server documents: https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md
`answer` starts the answers, then writes them whole or as a stream.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from pydantic import Field, RootModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlxr.core.errors import InvalidRequest
from mlxr.core.events import Event
from mlxr.core.sampling import read_params
from mlxr.core.types import MAX_TOP_LOGPROBS, PARAMETERS, Grammar, SamplingParams
from mlxr.registry import ModelRecord
from mlxr.registry.options import read_draft_tokens
from mlxr.server.errors import ServerError, spell_fields
from mlxr.server.generation import Generation, borrow, read_all, start_all, write_frames
from mlxr.server.json_models import JsonObject, RequestModel
from mlxr.server.llamacpp.reply import STREAMED, AnswerReply, Frame, Probabilities, error_frame
from mlxr.server.openai.fields import AdapterFields, Answers, DraftFields
from mlxr.server.request_fields import (
    RULES,
    GrammarFields,
    LlamacppParameters,
    Prompts,
    SamplerFields,
    read_prompt,
    read_samplers,
    split_prompts,
)
from mlxr.server.routes import Router
from mlxr.server.streaming import SSE, EventStream, sse
from mlxr.service.completion import ReplyFold
from mlxr.service.infill import Snippet, encode_infill, find_infill_tokens
from mlxr.service.model_pool import ModelLease
from mlxr.service.prompt import Prompt
from mlxr.service.requests import TextRequest
from mlxr.service.session import Session

DRAWN_SEED = 0xFFFFFFFF  # what llama.cpp's server calls a seed that it draws
# The service's names of what may be wrong, and llama.cpp's.
FIELDS = {
    "max_tokens": "n_predict",
    "repetition_penalty": "repeat_penalty",
    "logprobs": "n_probs",
    "n": "n_cmpl",
}
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
# What the engine's log-probabilities have in them already, what ends answers, and what `probabilities` works out.
_KNOWN_SHARES = frozenset(
    {"repetition_penalty", "presence_penalty", "frequency_penalty", "repeat_last_n", "seed", "max_tokens", "stop"}
    | {"temperature", "temperature_last", "top_k", "top_p", "min_p"}
)
Bias = list[list[int | float | str | bool]] | dict[str, float | bool]


class CompletionFields(GrammarFields, SamplerFields, LlamacppParameters, DraftFields, AdapterFields):
    """Says how tokens are chosen and what the reply holds. `n_predict` 0 only reads the prompt into the cache."""

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
        """Tell whether no token is wanted."""
        return self._wanted_tokens == 0

    @property
    def top_probs(self) -> int:
        """Return how many tokens are to be told with their probabilities in each place; 0: none."""
        return self.n_probs or self.logprobs or 0

    @property
    def most_tokens(self) -> float:
        """Return how many tokens the answer may have."""
        wanted = self._wanted_tokens
        return math.inf if wanted is None or wanted < 0 else wanted

    @property
    def _wanted_tokens(self) -> int | None:
        given = self.list_given()
        wanted = given.get("n_predict", given.get("max_tokens"))
        return wanted if isinstance(wanted, int) else None

    def make_params(self, record: ModelRecord, session: Session) -> SamplingParams:
        """Parameters for the engine; raises InvalidRequest naming the field."""
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
            reports_progress=bool(self.stream and self.return_progress),
            draft_tokens=read_draft_tokens(record.parameters) if self.draft_tokens is None else self.draft_tokens,
        )

    def _count_logprobs(self, fields: Mapping[str, Any]) -> int | None:
        """Return how many tokens the engine is to report; all that can be drawn where their final shares are wanted."""
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
    """The parameters that an answer was made with, under llama.cpp's names; what does not exist here is off."""
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
    """Token id to what is added to its logit: a text counts for each of its tokens, several entries add up."""
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
) -> Response:
    """The reply to all prompts: one object, a list of them, or events. The tokens `ends` end an answer."""
    with spell_fields(FIELDS):
        params = replace(body.make_params(lease.record, lease.session), stop_token_ids=ends)
        wanted = [
            TextRequest(prompt, params, grammar, cache_prompt=body.cache_prompt is not False) for prompt in prompts
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
    """The answer to one prompt in the words of llama.cpp's server, or a list of them; fields may have been picked."""


@router.post("/completion", response_model=CompletionReply, responses=STREAMED)
@router.post("/completions", response_model=CompletionReply, responses=STREAMED)
async def create_completion(request: Request, body: CompletionBody) -> Response:
    """Continue one prompt, or each of several."""
    given, as_list = split_prompts(body.prompt, "prompt")
    lease = await borrow(request, body.model, lora=body.shares)
    prompts = await lease.session.run(lambda: [read_prompt(lease.session, one, "prompt") for one in given], reads=given)
    return await answer(request, body, lease, prompts, as_list=as_list, grammar=body.make_grammar())


class ExtraInput(RequestModel):
    """Another file, or a part of one."""

    text: str
    filename: str | None = None


class InfillBody(CompletionFields):
    """A gap. `prompt` is what stands between the prefix and the cursor already."""

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
