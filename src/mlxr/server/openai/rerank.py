"""The routes that rank documents by a query, as the clients of Jina, Cohere, TEI, vLLM and llama.cpp ask.

OpenAI has none. Jina's and llama.cpp's shape is that of `/v1/rerank`, Cohere's that of `/v2/rerank`; a request with
`texts` in place of `documents` is TEI's, and gets a list.
"""

from __future__ import annotations

from typing import Annotated
from uuid import uuid4

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlxr.core.errors import InvalidRequest
from mlxr.server.generation import borrow, classify_all, rank_all
from mlxr.server.openai.fields import Count
from mlxr.server.openai.replies import ERRORS
from mlxr.server.routes import JsonObject, RequestModel, Router

MAX_DOCUMENTS = 10_000
router = Router()
Document = str | JsonObject
Documents = Annotated[list[Document], Field(min_length=1, max_length=MAX_DOCUMENTS)]
Texts = str | Annotated[list[str], Field(min_length=1, max_length=MAX_DOCUMENTS)]


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
    """Pairs of texts: one with each of several, or as many with as many. vLLM's route."""

    model: str | None = None
    text_1: Texts
    text_2: Texts


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
    """How well each second text answers the first one, from 0 to 1."""
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
    """Texts to tell the labels of: vLLM's `input`, or TEI's `inputs`, which asks for its reply."""

    model: str | None = None
    input: Texts | None = None
    inputs: Texts | None = None
    raw_scores: bool | None = Field(None, description="TEI's: logits in place of numbers from 0 to 1.")


@router.post("/v1/classify", responses=ERRORS)
@router.post("/v1/predict", responses=ERRORS)
async def classify(request: Request, body: ClassifyRequest) -> Response:
    """How likely each label of a model with a classifier is for each text."""
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
