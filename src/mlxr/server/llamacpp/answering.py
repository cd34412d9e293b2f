"""Answers the prompts of `/completion` and `/infill`: starts the answers, then writes them whole or as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlxr.core.types import Grammar, SamplingParams
from mlxr.server.finishes import check_events, write_frames
from mlxr.server.generation import Generation
from mlxr.server.json_models import JsonObject
from mlxr.server.llamacpp.errors import error_frame
from mlxr.server.llamacpp.fields import CompletionFields, describe_settings
from mlxr.server.llamacpp.probabilities import Probabilities
from mlxr.server.llamacpp.reply import Frame, Growing
from mlxr.server.naming import spell_fields
from mlxr.server.openai.replies import RunningTimings
from mlxr.server.openai.several import merge, read_in_turn, start_all
from mlxr.server.streaming import SSE, EventStream, sse, until_disconnected
from mlxr.service.model_pool import ModelLease
from mlxr.service.prompt import Prompt
from mlxr.service.requests import TextRequest

# The service's names of what may be wrong, and llama.cpp's.
FIELDS = {
    "max_tokens": "n_predict",
    "repetition_penalty": "repeat_penalty",
    "logprobs": "n_probs",
    "n": "n_cmpl",
}


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
    growing = [Growing(frame, index, RunningTimings(tokens)) for index, tokens in enumerate(frame.prompt_tokens)]
    if body.stream:
        return EventStream(request, _write_frames(generations, growing), media_type=SSE, on_error=error_frame)
    events = check_events(await until_disconnected(request, read_in_turn(generations, params.n)))
    replies = [reply for event in events if (reply := growing[event.index].add(event)) is not None]
    return JSONResponse(replies if as_list or len(replies) > 1 else replies[0])


def _make_frame(
    body: CompletionFields, lease: ModelLease, params: SamplingParams, generations: Sequence[Generation]
) -> Frame:
    tokenizer = lease.session.tokenizer
    probabilities = None
    if body.top_probs:
        probabilities = Probabilities(tokenizer.token_bytes, body.top_probs, params, bool(body.post_sampling_probs))
    texts = [tokenizer.decode(generation.prompt_ids, skip_special=False) for generation in generations]
    counts = [len(generation.prompt_ids) for generation in generations]
    return Frame(
        model=body.model or lease.record.short_name,
        prompts=[text for text in texts for _ in range(params.n)],
        prompt_tokens=[count for count in counts for _ in range(params.n)],
        settings=describe_settings(params, body),
        most_tokens=params.max_tokens,
        probabilities=probabilities,
        returns_tokens=bool(body.return_tokens),
        times_tokens=bool(body.timings_per_token),
        is_silent=body.only_reads,
        fields=body.response_fields or (),
    )


async def _write_frames(generations: Sequence[Generation], growing: Sequence[Growing]) -> AsyncGenerator[bytes, None]:
    answers = len(growing) // len(generations)

    def chunks_of(events: Sequence[JsonObject]) -> list[bytes]:
        return [sse(event) for event in events]

    batches = merge(generations, answers)
    async for frames in write_frames(batches, lambda event: chunks_of([*growing[event.index].push(event)])):
        yield frames
