"""Routes that make vectors of texts: OpenAI's `/v1/embeddings`, Cohere's `/v1/embed` and `/v2/embed`, TEI's `/embed`.

Under `/v1/embed` a request with `inputs` in place of `texts` is TEI's, and gets a list of vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal
from uuid import uuid4

from pydantic import AliasChoices, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlxr.core.errors import InvalidRequest
from mlxr.server.generation import borrow, embed_all, embed_tokens
from mlxr.server.openai.fields import Count, PromptFields
from mlxr.server.openai.replies import ERRORS
from mlxr.server.request_fields import MAX_PROMPTS, Prompts, read_prompt, split_prompts
from mlxr.server.routes import JsonObject, ReplyModel, Router, reply_json
from mlxr.service.embedding import (
    Encoding,
    Kind,
    Vector,
    VectorPooling,
    check_dimensions,
    scale_vector,
    spell_vector,
)

router = Router()
Dtype = Literal["float", "int8", "uint8", "binary", "ubinary"]
Texts = Annotated[list[str], Field(max_length=MAX_PROMPTS)]


class EmbeddingRequest(PromptFields):
    """Turn texts into vectors of length 1."""

    model: str | None = Field(None, description="Name of the model; absent: the server's default model.")
    input: Prompts
    encoding_format: Encoding | None = Field(
        None, description="`base64` is that of the little-endian numbers; additions: what `output_dtype` has."
    )
    output_dtype: Dtype | None = Field(
        None,
        validation_alias=AliasChoices("output_dtype", "embedding_type"),
        description="Voyage's and Mistral's, Jina's `embedding_type`: numbers of 8 bits, or of 1 bit packed in bytes.",
    )
    dimensions: Count | None = Field(
        None,
        validation_alias=AliasChoices("dimensions", "output_dimension"),
        description="Keep the first so many numbers, scaled to length 1 again.",
    )
    kind: Kind = Field(
        "dense",
        description="Additions, for models such as bge-m3: `sparse` gives the weights of a text's tokens, `multi` a "
        "vector for each of them.",
    )
    pooling: VectorPooling | None = Field(
        None,
        description="Which tokens the vector is made of: all (`mean`), the `last` or the first (`cls`). An addition to "
        "the dialect; absent: what the model's files state.",
    )
    truncate: bool | None = Field(
        None,
        validation_alias=AliasChoices("truncate", "truncation"),
        description="Cut what is too long; absent: refuse it. An addition to the dialect, as in Jina's and Voyage's.",
    )


class TokenWeights(ReplyModel):
    """The weights of a text's tokens, and which tokens these are."""

    indices: list[int]
    values: list[float]


class EmbeddingReply(ReplyModel):
    """One vector: numbers, or base64 of little-endian numbers."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | list[int] | str | list[list[float]] | TokenWeights


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
    encoding: Encoding = body.output_dtype or body.encoding_format or "float"
    check_dimensions(body.dimensions, session.config.vector_size, [encoding])
    given, _ = split_prompts(body.input, "input")
    texts = [read_prompt(session, one, "input", parse_special=False) for one in given]
    name = body.model or lease.record.short_name
    if body.kind != "dense":
        _refuse_dense_fields(body)
        made, tokens, headers = await embed_tokens(
            request, lease, texts, body.kind, body.prompt_choice, truncates=bool(body.truncate)
        )
        listed = [EmbeddingReply(index=index, embedding=_spell_tokens(one)) for index, one in enumerate(made)]
        counted = EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens)
        return reply_json(EmbeddingList(data=listed, model=name, usage=counted), headers=headers)
    vectors, tokens, headers = await embed_all(
        request, lease, texts, body.pooling, body.prompt_choice, truncates=bool(body.truncate)
    )
    packs = body.encoding_format == "base64"
    data = [
        EmbeddingReply(
            index=index, embedding=spell_vector(scale_vector(vector, body.dimensions), encoding, packs=packs)
        )
        for index, vector in enumerate(vectors)
    ]
    usage = EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens)
    return reply_json(EmbeddingList(data=data, model=name, usage=usage), headers=headers)


def _refuse_dense_fields(body: EmbeddingRequest) -> None:
    for name in ("dimensions", "pooling", "output_dtype"):
        if getattr(body, name) is not None:
            raise InvalidRequest(name, f"is for vectors of whole texts, and kind is {body.kind}")
    if body.encoding_format not in (None, "float"):
        raise InvalidRequest("encoding_format", f"must be float where kind is {body.kind}")


def _spell_tokens(made: dict[int, float] | Vector) -> list[list[float]] | TokenWeights:
    if isinstance(made, dict):
        order = sorted(made)
        return TokenWeights(indices=order, values=[made[one] for one in order])
    vectors: list[list[float]] = made.tolist()
    return vectors


class SparseRequest(PromptFields):
    """Turn texts into the weights of their tokens, as TEI's clients ask."""

    model: str | None = None
    inputs: str | Texts
    truncate: bool = False
    truncation_direction: Literal["Right", "right"] | None = None


@router.post("/v1/embed_sparse", responses=ERRORS)
async def embed_sparse(request: Request, body: SparseRequest) -> Response:
    """The weights of each text's tokens, for models that make them (bge-m3)."""
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    lease = await borrow(request, body.model)
    made, _, headers = await embed_tokens(
        request, lease, texts, "sparse", body.prompt_choice, field="inputs", truncates=body.truncate
    )
    rows = [[{"index": one, "value": row[one]} for one in sorted(row)] for row in made if isinstance(row, dict)]
    return JSONResponse(rows, headers=headers)


class EmbedRequest(PromptFields):
    """Turn texts into vectors, as Cohere's and TEI's clients ask."""

    model: str | None = None
    texts: Texts | None = None
    inputs: str | list[str | JsonObject] | None = Field(
        None, description="TEI's texts; in `/v2/embed` Cohere's, each an object whose `content` is a list of texts."
    )
    embedding_types: list[Encoding] | None = Field(None, description="Cohere's: each of these; absent: `float`.")
    dimensions: Count | None = Field(None, validation_alias=AliasChoices("output_dimension", "dimensions"))
    max_tokens: Count | None = Field(None, description="Cohere's: a text of more tokens is cut as `truncate` says.")
    truncate: bool | Literal["NONE", "START", "END"] | None = Field(
        None, description="What is too long is cut at its end or refused; absent: TEI refuses, Cohere cuts."
    )
    truncation_direction: Literal["Right", "right"] | None = None
    normalize: bool | None = Field(None, description="TEI's: false leaves vectors as long as they are.")


@router.post("/v1/embed", responses=ERRORS)
@router.post("/v2/embed", responses=ERRORS)
async def embed(request: Request, body: EmbedRequest) -> Response:
    """Turn texts into vectors, in the shapes of Cohere's and TEI's replies."""
    is_second = request.url.path.startswith("/v2/")
    is_tei = body.texts is None and not is_second
    if body.truncate == "START":
        raise InvalidRequest("truncate", "START is not supported: texts are cut at their end")
    texts = _list_texts(body, is_second=is_second)
    encodings: Sequence[Encoding] = body.embedding_types or ["float"]
    lease = await borrow(request, body.model)
    check_dimensions(body.dimensions, lease.session.config.vector_size, encodings, "output_dimension")
    if body.max_tokens is not None and body.max_tokens < lease.session.text_tokens:
        raise InvalidRequest("max_tokens", f"must be at least {lease.session.text_tokens}, the model's own")
    cuts = not is_tei if body.truncate is None else body.truncate in (True, "END")
    field = "texts" if body.texts is not None else "inputs"
    vectors, tokens, headers = await embed_all(
        request, lease, texts, None, body.prompt_choice, field=field, truncates=cuts
    )
    if is_tei and body.normalize is False:
        return JSONResponse([vector[: body.dimensions].tolist() for vector in vectors], headers=headers)
    scaled = [scale_vector(vector, body.dimensions) for vector in vectors]
    if is_tei:
        return JSONResponse([vector.tolist() for vector in scaled], headers=headers)
    typed = {encoding: [spell_vector(vector, encoding) for vector in scaled] for encoding in encodings}
    units = {"api_version": {"version": "2" if is_second else "1"}, "billed_units": {"input_tokens": tokens}}
    by_type = is_second or body.embedding_types is not None
    reply = {
        "id": str(uuid4()),
        "texts": texts,
        "embeddings": typed if by_type else typed["float"],
        "meta": units,
        "response_type": "embeddings_by_type" if by_type else "embeddings_floats",
    }
    return JSONResponse(reply, headers=headers)


def _list_texts(body: EmbedRequest, *, is_second: bool) -> list[str]:
    if body.texts is not None:
        given: list[object] = [*body.texts]
    elif body.inputs is not None:
        given = [body.inputs] if isinstance(body.inputs, str) else [*body.inputs]
    else:
        raise InvalidRequest("texts", "is missing")
    if not 1 <= len(given) <= MAX_PROMPTS:
        raise InvalidRequest("texts", f"has {len(given)} texts; from 1 to {MAX_PROMPTS} are taken")
    return [_read_text(one, index) if is_second else _read_plain(one, index) for index, one in enumerate(given)]


def _read_plain(given: object, index: int) -> str:
    if not isinstance(given, str):
        raise InvalidRequest(f"inputs[{index}]", "must be a text")
    return given


def _read_text(given: object, index: int) -> str:
    parts = given.get("content") if isinstance(given, dict) else None
    if isinstance(given, str) or not isinstance(parts, list):
        return _read_plain(given, index)
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(f"inputs[{index}].content", "must be a list of text parts; models read text only")
    return "\n".join(map(str, texts))
