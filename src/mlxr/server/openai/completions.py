"""The route `POST /v1/completions`: the continuation of a text."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from mlxr.server.finishes import check_events, write_frames
from mlxr.server.generation import Generation, borrow
from mlxr.server.model_defaults import fill_text
from mlxr.server.naming import spell_fields
from mlxr.server.openai.completion_reply import CompletionChunks, CompletionFold, TextCompletion
from mlxr.server.openai.completion_request import CompletionRequest
from mlxr.server.openai.replies import RunningTimings
from mlxr.server.openai.route import STREAMED, Head, error_frame, token_bytes_if
from mlxr.server.openai.several import merge, read_in_turn, start_all
from mlxr.server.routes import Router, reply_json
from mlxr.server.streaming import DONE, SSE, EventStream, sse, until_disconnected
from mlxr.service.infill import make_infill
from mlxr.service.model_pool import ModelLease
from mlxr.service.prompt import Prompt

router = Router()
# The service's names of what may be wrong, and ours.
FIELDS: dict[str, str] = {}


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
    with spell_fields(FIELDS):
        generations = await start_all(request, lease, [fill_text(one, lease.record, body) for one in wanted])
    prompt_tokens = sum(len(generation.prompt_ids) for generation in generations)
    answers = wanted[0].params.n
    if body.stream:
        chunks = CompletionChunks(
            head.to_chunk("text_completion"),
            prompt_tokens=prompt_tokens,
            answers=answers,
            includes_usage=body.includes_usage,
            token_bytes=token_bytes,
            running=RunningTimings(prompt_tokens) if body.timings_per_token else None,
        )
        frames = _write_frames(generations, answers, chunks)
        return EventStream(request, frames, media_type=SSE, on_error=error_frame)
    fold = CompletionFold(prompt_tokens, answers, len(wanted) * answers, token_bytes)
    for event in check_events(await until_disconnected(request, read_in_turn(generations, answers))):
        fold.add(event)
    return reply_json(fold.to_reply(head.id, head.created, head.model, head.fingerprint))


def _echo(lease: ModelLease, prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else lease.session.decode(prompt)


async def _write_frames(
    generations: Sequence[Generation], answers: int, chunks: CompletionChunks
) -> AsyncGenerator[bytes, None]:
    async for frames in write_frames(merge(generations, answers), lambda event: map(sse, chunks.push(event))):
        yield frames
    yield b"".join([*map(sse, chunks.end()), DONE])
