"""What generate and chat have in common: the request's common fields, loading, and the answer whole or in pieces."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Annotated

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from mlxr.core.errors import InvalidRequest
from mlxr.core.events import Event
from mlxr.server.activity import in_flight
from mlxr.server.finishes import check_events, take_batches, write_frames
from mlxr.server.generation import Generation, borrow, start
from mlxr.server.json_models import JsonObject, RequestModel, Text
from mlxr.server.naming import spell_fields
from mlxr.server.ollama.options import Format, KeepAlive, Options, read_keep_alive
from mlxr.server.ollama.reply import Part, Parts, make_piece, merge
from mlxr.server.ollama.route import error_frame, now
from mlxr.server.streaming import NDJSON, EventStream, dump_json, ndjson, until_disconnected
from mlxr.service.model_pool import ModelLease
from mlxr.service.requests import ChatRequest, TextRequest

Body = Callable[[Part, Parts], JsonObject]
THINK_LEVELS = ("low", "medium", "high", "max")
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
        await until_disconnected(request, request.app.state.pool.unload(body.model))
    else:
        await borrow(request, body.model, keep_alive_s=keep_alive_s, exact=True)
    reason = "unload" if keep_alive_s == 0 else "load"
    whole = {"model": body.model, "created_at": now(), **reply, "done": True, "done_reason": reason}
    return Response(dump_json(whole), media_type="application/json")


def check_think(lease: ModelLease, think: bool | str | None) -> bool | str | None:
    """What the model makes of `think`; raises InvalidRequest for one that does not think."""
    if think and "thinking" not in lease.session.capabilities:
        raise InvalidRequest("think", f"{lease.record.short_name!r} does not support thinking")
    if not think and "thinking" not in lease.session.capabilities:
        return None
    return lease.session.fit_think("high" if think == "max" else think)


async def answer(
    request: Request, body: AnswerRequest, lease: ModelLease, wanted: TextRequest | ChatRequest, render: Body
) -> Response:
    """Start the answer and send it, whole or piece by piece; `render` is what a piece has besides the common fields."""
    names = {"logprobs": "top_logprobs", "max_tokens": "options.num_predict"}
    with spell_fields(names):
        generation = await start(request, lease, wanted)
    token_bytes = lease.session.tokenizer.token_bytes if body.logprobs else None
    arrived_s = in_flight(request).arrived_s
    parts = Parts(generation.prompt_ids, token_bytes, arrived_s=arrived_s, load_s=lease.load_s)
    if body.stream is not False:
        frames = _write_frames(generation, parts, body.model, render)
        return EventStream(request, frames, media_type=NDJSON, on_error=error_frame)
    events = check_events(await until_disconnected(request, generation.read_all()))
    whole = merge([part for event in events for part in parts.push(event)])
    return Response(dump_json(make_piece(body.model, whole, render(whole, parts))), media_type="application/json")


async def _write_frames(generation: Generation, parts: Parts, model: str, render: Body) -> AsyncGenerator[bytes, None]:
    def write(event: Event) -> Iterator[bytes]:
        for part in parts.push(event):
            if part.end is not None and part.calls:  # clients look for calls before the end
                before = Part(calls=part.calls)
                yield ndjson(make_piece(model, before, render(before, parts)))
                part.calls = []
            yield ndjson(make_piece(model, part, render(part, parts)))

    async for frames in write_frames(take_batches(generation), write):
        yield frames
