"""The route `POST /v1/embeddings`: a vector for each text."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from mlxr.core.errors import InvalidRequest
from mlxr.server.generation import borrow, embed_all
from mlxr.server.openai.fields import Count
from mlxr.server.openai.replies import ERRORS
from mlxr.server.request_fields import Prompts, read_prompt, split_prompts
from mlxr.server.routes import ReplyModel, RequestModel, Router, reply_json
from mlxr.service.embedding import Vector, VectorPooling, scale_vector
from mlxr.service.session import Session

router = Router()


class EmbeddingRequest(RequestModel):
    """Turn texts into vectors of length 1."""

    model: str | None = Field(None, description="Name of the model; absent: the server's default model.")
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = Field(None, description="Keep the first so many numbers, scaled to length 1 again.")
    pooling: VectorPooling | None = Field(
        None,
        description="Which tokens the vector is made of: all (`mean`), the `last` or the first (`cls`). An addition to "
        "the dialect; absent: what the model's files state.",
    )


class EmbeddingReply(ReplyModel):
    """One vector: numbers, or base64 of little-endian float32."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(ReplyModel):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(ReplyModel):
    """One vector for each input."""

    object: Literal["list"] = "list"
    data: list[EmbeddingReply]
    model: str
    usage: EmbeddingUsage


@router.post("/v1/embeddings", response_model=EmbeddingList, responses=ERRORS)
async def create_embeddings(request: Request, body: EmbeddingRequest) -> Response:
    """Turn texts into vectors; all of them are computed in the same batches. Special tokens in texts do not count."""
    lease = await borrow(request, body.model)
    session = lease.session
    size = session.config.vector_size
    if body.dimensions is not None and body.dimensions > size:
        raise InvalidRequest("dimensions", f"the model's vectors have {size} dimensions, got {body.dimensions}")
    texts, _ = split_prompts(body.input, "input")
    prompts = await session.run(_encode_all, session, texts, reads=body.input)
    vectors, headers = await embed_all(request, lease, prompts, body.pooling)
    scaled = [scale_vector(vector, body.dimensions) for vector in vectors]
    tokens = sum(len(ids) for ids in prompts)
    return reply_json(
        EmbeddingList(
            data=[
                EmbeddingReply(index=index, embedding=_spell(vector, body.encoding_format))
                for index, vector in enumerate(scaled)
            ],
            model=body.model or lease.record.short_name,
            usage=EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens),
        ),
        headers=headers,
    )


def _encode_all(session: Session, prompts: Sequence[object]) -> list[list[int]]:
    encoded = []
    for number, prompt in enumerate(prompts):
        try:
            read = read_prompt(session, prompt, "input", parse_special=False)
            encoded.append(session.encode_prompt(read, parse_special=False))
        except InvalidRequest as error:
            raise InvalidRequest("input", f"text {number}: {error.reason}") from None
    return encoded


def _spell(vector: Vector, encoding: str | None) -> list[float] | str:
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    numbers: list[float] = vector.tolist()
    return numbers
