"""Routes of our own: what a text is in tokens, what a conversation is in the template, health, metrics.

Below `/v1/admin` see `admin`. Errors have one form: `{"error": {"code", "message", "field", "request_id"}}`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sized
from functools import partial
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlxr.core.errors import InvalidRequest
from mlxr.core.types import SamplingParams
from mlxr.server import admin
from mlxr.server.admin import collect_stats
from mlxr.server.dialect import Dialect
from mlxr.server.errors import ServerError
from mlxr.server.generation import borrow
from mlxr.server.json_models import RequestModel
from mlxr.server.naming import spell_fields
from mlxr.server.routes import Router
from mlxr.service.requests import ChatRequest

router = Router(tags=["own"])
INLINE_LENGTH = 4096  # characters or tokens
S = TypeVar("S", bound=Sized)
T = TypeVar("T")
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _Body(BaseModel):
    model_config = ConfigDict(defer_build=True, extra="forbid", strict=True)


class TokenizeBody(RequestModel):
    """A text. `parse_special` lets spellings of special tokens in it count as such."""

    content: str
    model: str | None = None
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class Piece(_Body):
    """A token and its bytes: text, or a list of numbers where they are no text by themselves."""

    id: int
    piece: str | list[int]


class Tokens(_Body):
    """The tokens of a text."""

    tokens: list[int] | list[Piece]


class DetokenizeBody(RequestModel):
    """Tokens."""

    tokens: list[Annotated[int, Field(ge=0)]]
    model: str | None = None


class Content(_Body):
    """A text."""

    content: str


class ApplyTemplateBody(RequestModel):
    """A conversation, its messages as in chat completions."""

    messages: list[dict[str, object]]
    model: str | None = None


class Rendered(_Body):
    """The text that the model would read."""

    prompt: str


class Health(_Body):
    """Whether the server is ready; `reason` says why not."""

    status: str
    reason: str | None = None


@router.post("/tokenize")
async def tokenize(request: Request, body: TokenizeBody) -> Tokens:
    """The token ids of a text."""
    lease = await borrow(request, body.model)
    session = lease.session
    encode = partial(session.encode_prompt, add_special=body.add_special, parse_special=body.parse_special)
    with spell_fields({"prompt": "content"}):
        ids = await beside_the_loop(encode, body.content)
    if not body.with_pieces:
        return Tokens(tokens=ids)
    return Tokens(tokens=[Piece(id=token, piece=_show(session.tokenizer.token_bytes(token))) for token in ids])


@router.post("/detokenize")
async def detokenize(request: Request, body: DetokenizeBody) -> Content:
    """The text of token ids."""
    lease = await borrow(request, body.model)
    size = lease.session.config.vocab_size
    if any(token >= size for token in body.tokens):
        raise InvalidRequest("tokens", f"the vocabulary has {size} tokens, got {max(body.tokens)}")
    return Content(content=await beside_the_loop(lease.session.decode, body.tokens))


@router.post("/apply-template")
async def apply_template(request: Request, body: ApplyTemplateBody) -> Rendered:
    """The text that the chat template makes of a conversation."""
    lease = await borrow(request, body.model)
    wanted = ChatRequest(messages=body.messages, params=SamplingParams())
    return Rendered(prompt=await asyncio.to_thread(lease.session.render_chat, wanted))


@router.get("/health/live")
async def live(_: Request) -> Health:
    """Whether the process runs."""
    return Health(status="ok")


@router.get("/health", responses={503: {"model": Health}})
@router.get("/health/ready", responses={503: {"model": Health}})
async def ready(request: Request) -> Response:
    """Whether requests are answered now; 503 while the first models are loaded and once the server is ending."""
    lifecycle = request.app.state.lifecycle
    if lifecycle.is_ready:
        return JSONResponse({"status": "ok"})
    reason = "the server is being stopped" if lifecycle.is_draining else lifecycle.problem
    return JSONResponse({"status": "not ready", "reason": reason}, 503)


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """Counters for Prometheus."""
    state = request.app.state
    stats = await collect_stats(state.pool)
    stored_bytes = await asyncio.to_thread(state.registry.store_bytes)
    return Response(state.metrics.render(len(state.activity), stored_bytes, stats), media_type=METRICS_TYPE)


async def beside_the_loop(work: Callable[[S], T], given: S) -> T:
    """`work(given)`, on another thread where there is so much that other requests would feel it."""
    return work(given) if len(given) <= INLINE_LENGTH else await asyncio.to_thread(work, given)


def _show(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


def render_own_error(error: ServerError, request_id: str) -> Mapping[str, object]:
    """The body of an error outside the dialects."""
    fields = {"code": error.code, "message": error.message, "field": error.field, "request_id": request_id}
    return {"error": {name: value for name, value in fields.items() if value is not None}}


router.include(admin.router)
DIALECT = Dialect("own", ("", "/v1/admin"), router, render_own_error)
