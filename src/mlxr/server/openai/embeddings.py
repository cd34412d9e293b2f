"""Routes that make vectors of texts: OpenAI's `/v1/embeddings`, Cohere's `/v1/embed` and `/v2/embed`, TEI's `/embed`.

Under `/v1/embed` a request with `inputs` in place of `texts` is TEI's, and gets a list of vectors.

Also routes that rank documents by a query, for the clients of Jina, Cohere, TEI, vLLM and llama.cpp. `/v1/rerank` has
the form of Jina and llama.cpp, `/v2/rerank` Cohere's; a request with `texts` in place of `documents` is TEI's, and gets
a list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal
from uuid import uuid4

from pydantic import AliasChoices, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlxr.core.errors import InvalidRequest
from mlxr.server.generation import borrow, classify_all, embed_all, embed_tokens, rank_all
from mlxr.server.openai.fields import Count, PromptFields
from mlxr.server.openai.replies import ERRORS
from mlxr.server.request_fields import MAX_PROMPTS, Prompts, read_prompt, split_prompts
from mlxr.server.routes import JsonObject, ReplyModel, RequestModel, Router, reply_json
from mlxr.service.embedding import Encoding, Kind, Vector, VectorPooling, check_dimensions, scale_vector, spell_vector

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
    """The weights of a text's tokens, and the ids of these tokens."""

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
    """Turn texts into the weights of their tokens, for TEI's clients."""

    model: str | None = None
    inputs: str | Texts
    truncate: bool = False
    truncation_direction: Literal["Right", "right"] | None = None


@router.post("/v1/embed_sparse", responses=ERRORS)
async def embed_sparse(request: Request, body: SparseRequest) -> Response:
    """Return the weights of each text's tokens, for models that make them (bge-m3)."""
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    lease = await borrow(request, body.model)
    made, _, headers = await embed_tokens(
        request, lease, texts, "sparse", body.prompt_choice, field="inputs", truncates=body.truncate
    )
    rows = [[{"index": one, "value": row[one]} for one in sorted(row)] for row in made if isinstance(row, dict)]
    return JSONResponse(rows, headers=headers)


class EmbedRequest(PromptFields):
    """Turn texts into vectors, for Cohere's and TEI's clients."""

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


MAX_DOCUMENTS = 10_000
Document = str | JsonObject
Documents = Annotated[list[Document], Field(min_length=1, max_length=MAX_DOCUMENTS)]
TextOrTexts = str | Annotated[list[str], Field(min_length=1, max_length=MAX_DOCUMENTS)]


class RerankRequest(RequestModel):
    """Rank documents by how well they answer a query. A document is a text, or an object with one as `text`."""

    model: str | None = Field(None, description="Name of the model; absent: the server's default model.")
    query: str
    documents: Documents | None = None
    texts: Documents | None = Field(None, description="TEI's name of the documents, which asks for its reply.")
    top_n: Count | None = Field(None, description="Only the best so many; absent: all.")
    return_documents: bool | None = Field(None, description="Repeat each document in the reply.")
    return_text: bool | None = Field(None, description="TEI's name of `return_documents`.")
    raw_scores: bool | None = Field(None, description="TEI's: logits in place of numbers from 0 to 1.")
    instruction: str | None = Field(
        None, description="An addition: the task, for models that read one (Qwen3-Reranker); absent: a web search."
    )


class ScoreRequest(RequestModel):
    """Pairs of texts: one text with each of several, or two lists of the same length. vLLM's route."""

    model: str | None = None
    text_1: TextOrTexts
    text_2: TextOrTexts


@router.post("/v1/rerank", responses=ERRORS)
@router.post("/v1/reranking", responses=ERRORS)
@router.post("/v2/rerank", responses=ERRORS)
async def rerank(request: Request, body: RerankRequest) -> Response:
    """Rank documents by a query, the best first. A document that is too long is cut."""
    given = body.texts if body.documents is None else body.documents
    if given is None:
        raise InvalidRequest("documents", "is missing")
    texts = [_read_document(one, index) for index, one in enumerate(given)]
    lease = await borrow(request, body.model)
    logits, tokens, headers = await rank_all(request, lease, body.query, texts, body.instruction)
    read = lease.session.ranker.read_raw if body.raw_scores else lease.session.ranker.score
    scores = [read(one.tolist()) for one in logits]
    order = sorted(range(len(texts)), key=lambda index: -scores[index])[: body.top_n]
    repeats = body.return_documents or body.return_text
    if body.documents is None:
        rows = [{"index": i, "score": scores[i]} | ({"text": texts[i]} if repeats else {}) for i in order]
        return JSONResponse(rows, headers=headers)
    results = [
        {"index": i, "relevance_score": scores[i]} | ({"document": {"text": texts[i]}} if repeats else {})
        for i in order
    ]
    if request.url.path.startswith("/v2/"):
        units = {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}}
        reply = {"id": str(uuid4()), "results": results, "meta": units | {"tokens": {"input_tokens": tokens}}}
        return JSONResponse(reply, headers=headers)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    name = body.model or lease.record.short_name
    return JSONResponse({"object": "list", "model": name, "results": results, "usage": usage}, headers=headers)


@router.post("/v1/score", responses=ERRORS)
async def score(request: Request, body: ScoreRequest) -> Response:
    """Return for each second text how well it answers the first one, from 0 to 1."""
    first, second = ([one] if isinstance(one, str) else one for one in (body.text_1, body.text_2))
    first = first * len(second) if len(first) == 1 else first
    if len(first) != len(second):
        raise InvalidRequest("text_2", f"has {len(second)} texts for {len(first)}, expected as many, or one `text_1`")
    lease = await borrow(request, body.model)
    scores, tokens, headers = dict[int, float](), 0, dict[str, str]()
    asked: dict[str, list[int]] = {}
    for index, query in enumerate(first):
        asked.setdefault(query, []).append(index)
    for query, places in asked.items():
        logits, count, headers = await rank_all(request, lease, query, [second[index] for index in places], None)
        tokens += count
        scores |= {index: lease.session.ranker.score(one.tolist()) for index, one in zip(places, logits, strict=True)}
    reply = {
        "object": "list",
        "model": body.model or lease.record.short_name,
        "data": [{"index": index, "object": "score", "score": scores[index]} for index in sorted(scores)],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    return JSONResponse(reply, headers=headers)


class ClassifyRequest(RequestModel):
    """Texts to classify: vLLM's `input`, or TEI's `inputs`, which gets TEI's reply."""

    model: str | None = None
    input: TextOrTexts | None = None
    inputs: TextOrTexts | None = None
    raw_scores: bool | None = Field(None, description="TEI's: logits in place of numbers from 0 to 1.")


@router.post("/v1/classify", responses=ERRORS)
@router.post("/v1/predict", responses=ERRORS)
async def classify(request: Request, body: ClassifyRequest) -> Response:
    """Return the probability of each label for each text, for models with a classifier."""
    given = body.inputs if body.input is None else body.input
    if given is None:
        raise InvalidRequest("input", "is missing")
    texts = [given] if isinstance(given, str) else given
    lease = await borrow(request, body.model)
    session = lease.session
    logits, tokens = await classify_all(request, lease, texts)
    apart, raw = session.labels_stand_apart, body.raw_scores
    shares = [one.tolist() if raw else session.ranker.read_shares(one.tolist(), apart=apart) for one in logits]
    names = [*session.config.labels, *(f"LABEL_{index}" for index in range(len(session.config.labels), len(shares[0])))]
    if body.input is None:
        ranked = [
            [{"label": label, "score": share} for share, label in sorted(zip(row, names, strict=True), reverse=True)]
            for row in shares
        ]
        return JSONResponse(ranked[0] if isinstance(given, str) else ranked)
    data = [
        {"index": index, "label": names[row.index(max(row))], "probs": row, "num_classes": len(row)}
        for index, row in enumerate(shares)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    name = body.model or lease.record.short_name
    return JSONResponse({"object": "list", "id": str(uuid4()), "model": name, "data": data, "usage": usage})


def _read_document(document: Document, index: int) -> str:
    text = document if isinstance(document, str) else document.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"documents[{index}]", "must be a text, or an object with one as `text`")
    return text
