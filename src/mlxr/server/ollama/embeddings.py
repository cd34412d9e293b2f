"""POST /api/embed, and its older form /api/embeddings."""

from __future__ import annotations

from time import monotonic
from typing import Annotated

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from mlxr.core.errors import ContextFull, InvalidRequest
from mlxr.registry.modelfile import check_options
from mlxr.server.activity import in_flight
from mlxr.server.generation import borrow, embed_all
from mlxr.server.ollama.answers import KeepAlive, Options, note_options, read_keep_alive
from mlxr.server.ollama.reply import ERRORS, to_ns
from mlxr.server.routes import ReplyModel, RequestModel, Router, Text, reply_json
from mlxr.service.embedding import scale_vector
from mlxr.service.model_pool import ModelLease

MAX_INPUTS = 2048
router = Router()


class EmbedBody(RequestModel):
    """The body of a request to `/api/embed`: texts that become vectors."""

    model: Text
    input: Annotated[list[str], Field(max_length=MAX_INPUTS)] | str
    truncate: bool | None = None
    dimensions: Annotated[int | None, Field(ge=0)] = None
    keep_alive: KeepAlive = None
    options: Options = None


class EmbedReply(ReplyModel):
    """One vector of length 1 for each text."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class EmbeddingsBody(RequestModel):
    """One text to embed."""

    model: Text
    prompt: str | None = None
    keep_alive: KeepAlive = None
    options: Options = None


class EmbeddingsReply(ReplyModel):
    """The reply of `/api/embeddings`: the text's vector, of any length."""

    embedding: list[float]


@router.post("/api/embed", response_model=EmbedReply, responses=ERRORS)
async def embed(request: Request, body: EmbedBody) -> Response:
    """Vectors of texts, pooled as the model's files state. Without any text only load the model."""
    check_options(body.options or {})
    note_options(request, body.options)
    texts = [body.input] if isinstance(body.input, str) else body.input
    texts = [] if texts == [""] else texts
    lease = await borrow(request, body.model, keep_alive_s=read_keep_alive(body.keep_alive), exact=True)
    size = lease.session.config.vector_size
    if body.dimensions is not None and body.dimensions > size:
        raise InvalidRequest("dimensions", f"must be at most {size}, the model's own; got {body.dimensions}")
    prompts = [_encode(lease, text, f"input[{index}]", body.truncate) for index, text in enumerate(texts)]
    vectors, headers = await embed_all(request, lease, prompts, None)
    return reply_json(
        EmbedReply(
            model=body.model,
            embeddings=[scale_vector(vector, body.dimensions or None).tolist() for vector in vectors],
            total_duration=to_ns(monotonic() - in_flight(request).arrived_s),
            load_duration=to_ns(lease.load_s),
            prompt_eval_count=sum(len(prompt) for prompt in prompts),
        ),
        headers=headers,
    )


@router.post("/api/embeddings", response_model=EmbeddingsReply, responses=ERRORS, deprecated=True)
async def embeddings(request: Request, body: EmbeddingsBody) -> Response:
    """The vector of one text, not scaled."""
    check_options(body.options or {})
    note_options(request, body.options)
    lease = await borrow(request, body.model, keep_alive_s=read_keep_alive(body.keep_alive), exact=True)
    prompts = [_encode(lease, body.prompt, "prompt", True)] if body.prompt else []
    vectors, headers = await embed_all(request, lease, prompts, None, "prompt")
    return reply_json(EmbeddingsReply(embedding=vectors[0].tolist() if vectors else []), headers=headers)


def _encode(lease: ModelLease, text: str, field: str, truncate: bool | None) -> list[int]:
    """Token ids of a text, cut at the end of the context unless the request forbids that."""
    try:
        ids = lease.session.encode_prompt(text, parse_special=False)
    except InvalidRequest as error:
        raise InvalidRequest(field, error.reason) from error
    limit = lease.session.context_tokens
    if len(ids) > limit and truncate is False:
        raise ContextFull(field, f"has {len(ids)} tokens, more than the context of {limit}", len(ids), limit)
    return lease.session.cut_text(ids)
