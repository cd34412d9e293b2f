"""POST /api/embed, and its older form /api/embeddings."""

from __future__ import annotations

from time import monotonic
from typing import Annotated

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from mlxr.registry.modelfile import check_options
from mlxr.server.activity import in_flight
from mlxr.server.generation import borrow, embed_all
from mlxr.server.ollama.answers import KeepAlive, Options, note_options, read_keep_alive
from mlxr.server.ollama.reply import ERRORS, to_ns
from mlxr.server.openai.fields import PromptFields
from mlxr.server.routes import ReplyModel, RequestModel, Router, Text, reply_json
from mlxr.service.embedding import check_dimensions, scale_vector

MAX_INPUTS = 2048
router = Router()


class EmbedBody(PromptFields):
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
    check_dimensions(body.dimensions, lease.session.config.vector_size)
    vectors, tokens, headers = await embed_all(
        request, lease, texts, None, body.prompt_choice, truncates=body.truncate is not False
    )
    return reply_json(
        EmbedReply(
            model=body.model,
            embeddings=[scale_vector(vector, body.dimensions or None).tolist() for vector in vectors],
            total_duration=to_ns(monotonic() - in_flight(request).arrived_s),
            load_duration=to_ns(lease.load_s),
            prompt_eval_count=tokens,
        ),
        headers=headers,
    )


@router.post("/api/embeddings", response_model=EmbeddingsReply, responses=ERRORS, deprecated=True)
async def embeddings(request: Request, body: EmbeddingsBody) -> Response:
    """The vector of one text, not scaled."""
    check_options(body.options or {})
    note_options(request, body.options)
    lease = await borrow(request, body.model, keep_alive_s=read_keep_alive(body.keep_alive), exact=True)
    texts = [body.prompt] if body.prompt else []
    vectors, _, headers = await embed_all(request, lease, texts, field="prompt", truncates=True)
    return reply_json(EmbeddingsReply(embedding=vectors[0].tolist() if vectors else []), headers=headers)
