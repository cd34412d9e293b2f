"""POST /embedding and /embeddings: vectors in llama.cpp's own shape. OpenAI's shape is that of /v1/embeddings."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlxr.core.errors import InvalidRequest
from mlxr.server.embedding import embed_all
from mlxr.server.generation import borrow
from mlxr.server.json_models import ReplyModel, RequestModel
from mlxr.server.llamacpp.errors import ERRORS
from mlxr.server.prompts import Prompts, read_prompt, split_prompts
from mlxr.server.routes import Router
from mlxr.service.embedding import Pooling, Vector, scale_vector

router = Router()


class EmbeddingBody(RequestModel):
    """Texts to turn into vectors; `content` and `input` are two names of the same."""

    model: str | None = None
    content: Prompts | None = None
    input: Prompts | None = None
    pooling: Pooling | None = Field(
        None, description="An addition: which tokens count. Absent: what the model's files state, else all."
    )
    embd_normalize: Annotated[int, Field(ge=-1, le=64)] | None = Field(
        None, description="-1: as it is, 0: largest number 32760, 1: sum 1, 2 (absent): length 1, p: p-norm 1."
    )


class EmbeddingReply(ReplyModel):
    """The vectors of one text: one of them, as tokens are pooled."""

    index: int
    embedding: list[list[float]]


@router.post("/embedding", response_model=list[EmbeddingReply], responses=ERRORS)
@router.post("/embeddings", response_model=list[EmbeddingReply], responses=ERRORS)
async def create_embedding(request: Request, body: EmbeddingBody) -> Response:
    """Turn texts into vectors; special tokens spelt in texts count as such, as in prompts."""
    field = "content" if body.input is None else "input"
    given = body.content if body.input is None else body.input
    if given is None:
        raise InvalidRequest("content", "is missing")
    texts, _ = split_prompts(given, field)
    lease = await borrow(request, body.model)
    session = lease.session
    prompts = await session.run(
        lambda: [session.encode_prompt(read_prompt(session, one, field)) for one in texts], reads=texts
    )
    vectors, headers = await embed_all(request, lease, prompts, body.pooling, field)
    norm = 2 if body.embd_normalize is None else body.embd_normalize
    return JSONResponse(
        [{"index": index, "embedding": [_normalise(one, norm).tolist()]} for index, one in enumerate(vectors)],
        headers=headers,
    )


def _normalise(vector: Vector, norm: int) -> Vector:
    """The vector with its `norm` brought to 1; see `embd_normalize`."""
    if norm == 2:
        return scale_vector(vector)
    if norm < 0:
        return vector
    sizes = np.abs(vector.astype(np.float64))
    size = float(sizes.max()) / 32760.0 if norm == 0 else float((sizes**norm).sum() ** (1.0 / norm))
    scaled: Vector = (vector / size if size else vector).astype(np.float32)
    return scaled
