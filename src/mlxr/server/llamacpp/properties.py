"""Texts as tokens, prompts and vectors: /tokenize, /detokenize, /apply-template, /embedding and /embeddings.

Vectors have llama.cpp's own shape; OpenAI's is that of /v1/embeddings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence, Sized
from functools import partial
from typing import Annotated, TypeVar

import numpy as np
from pydantic import Field, RootModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import mlxr
from mlxr.core.errors import InvalidRequest
from mlxr.core.model_settings import size_steps
from mlxr.core.settings import Settings
from mlxr.registry import AdapterRecord
from mlxr.server.activity import InFlight
from mlxr.server.errors import ServerError, spell_fields
from mlxr.server.generation import borrow, embed_all
from mlxr.server.llamacpp.completion import ERRORS, CompletionFields, describe_settings
from mlxr.server.openai.chat import FIELDS, ChatCompletionRequest
from mlxr.server.openai.fields import AdapterShare, PromptFields
from mlxr.server.openai.models import describe_model
from mlxr.server.openai.replies import fit_effort
from mlxr.server.parts import parts_of
from mlxr.server.request_fields import Prompts, read_prompt, split_prompts
from mlxr.server.routes import JsonObject, ReplyModel, RequestModel, Router
from mlxr.server.streaming import encode_json
from mlxr.server.work import look
from mlxr.service.embedding import Vector, VectorPooling, scale_vector
from mlxr.service.model_pool import ModelLease
from mlxr.service.opening import find_device
from mlxr.service.session import Session
from mlxr.service.sight import MEDIA

router = Router()
INLINE_LENGTH = 4096  # characters or tokens


S = TypeVar("S", bound=Sized)
T = TypeVar("T")


class TokenizeBody(RequestModel):
    """A text. `parse_special` lets spellings of special tokens in it count as such.

    llama.cpp's clients send it as `content`, vLLM's as `prompt`; the latter gets special tokens added by default.
    """

    content: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    model: str | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class Piece(ReplyModel):
    """A token and its bytes: text, or a list of numbers if they are no text by themselves."""

    id: int
    piece: str | list[int]


class Tokens(ReplyModel):
    """The tokens of a text."""

    tokens: list[int] | list[Piece]


class DetokenizeBody(RequestModel):
    """The body of a request to `/detokenize`: token ids that become text."""

    tokens: list[Annotated[int, Field(ge=0)]]
    model: str | None = None


class Content(ReplyModel):
    """A text, under the names that llama.cpp and vLLM have for it."""

    content: str
    prompt: str


class Rendered(ReplyModel):
    """The text that the model would read."""

    prompt: str


@router.post("/tokenize", response_model=Tokens, responses=ERRORS)
async def tokenize(request: Request, body: TokenizeBody) -> Response:
    """Return the token ids of a text."""
    lease = await borrow(request, body.model)
    session = lease.session
    text, add_special = body.content, bool(body.add_special)
    if text is None:
        text, add_special = body.prompt, body.add_special_tokens is not False
    if text is None:
        raise InvalidRequest("content", "is missing")
    encode = partial(session.encode_prompt, add_special=add_special, parse_special=body.parse_special is not False)

    def write(text: str) -> bytes:
        ids = encode(text)
        if not body.with_pieces:
            return _write_tokens(ids)
        return _write_tokens([{"id": token, "piece": _show(session.tokenizer.token_bytes(token))} for token in ids])

    with spell_fields({"prompt": "content"}):
        return Response(await beside_the_loop(session, write, text), media_type="application/json")


@router.post("/detokenize", responses=ERRORS)
async def detokenize(request: Request, body: DetokenizeBody) -> Content:
    """Return the text of token ids."""
    lease = await borrow(request, body.model)
    size = lease.session.config.vocab_size

    def decode(tokens: list[int]) -> str:
        if tokens and max(tokens) >= size:
            raise InvalidRequest("tokens", f"the vocabulary has {size} tokens, got {max(tokens)}")
        return lease.session.decode(tokens)

    text = await beside_the_loop(lease.session, decode, body.tokens)
    return Content(content=text, prompt=text)


@router.post("/apply-template", responses=ERRORS)
async def apply_template(request: Request, body: ChatCompletionRequest) -> Rendered:
    """Return the text that the chat template makes of a conversation, in the form of `/v1/chat/completions`, with
    tools.
    """
    lease = await borrow(request, body.model)
    wanted = fit_effort(request, lease, body.to_request(), "reasoning_effort")
    with spell_fields(FIELDS):
        return Rendered(prompt=await lease.session.run(lease.session.render_chat, wanted, reads=wanted))


async def beside_the_loop(session: Session, work: Callable[[S], T], given: S) -> T:
    """Return `work(given)`, done on another thread if there is so much that it would delay other requests."""
    return work(given) if len(given) <= INLINE_LENGTH else await session.run(work, given, reads=given)


def _write_tokens(tokens: Sequence[object]) -> bytes:
    """Return the reply as JSON, written in pieces, as one call would hold the interpreter's lock too long."""
    starts = range(0, len(tokens), INLINE_LENGTH)
    pieces = (encode_json(tokens[start : start + INLINE_LENGTH])[1:-1] for start in starts)
    return b'{"tokens":[%b]}' % b",".join(pieces)


def _show(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


class EmbeddingBody(PromptFields):
    """Texts to turn into vectors; `content` and `input` are two names of one field."""

    model: str | None = None
    content: Prompts | None = None
    input: Prompts | None = None
    pooling: VectorPooling | None = Field(
        None, description="An addition: which tokens count. Absent: what the model's files state, else all."
    )
    embd_normalize: Annotated[int, Field(ge=-1, le=64)] | None = Field(
        None, description="-1: as it is, 0: largest number 32760, 1: sum 1, 2 (absent): length 1, p: p-norm 1."
    )


class EmbeddingReply(ReplyModel):
    """The vectors of one text: always one, since tokens are pooled."""

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
    read = [read_prompt(session, one, field) for one in texts]
    vectors, _, headers = await embed_all(
        request, lease, read, body.pooling, body.prompt_choice, field=field, parse_special=True
    )
    norm = 2 if body.embd_normalize is None else body.embd_normalize
    return JSONResponse(
        [{"index": index, "embedding": [_normalise(one, norm).tolist()]} for index, one in enumerate(vectors)],
        headers=headers,
    )


def _normalise(vector: Vector, norm: int) -> Vector:
    """Scale the vector so that its norm number `norm` is 1; see `embd_normalize`."""
    if norm == 2:
        return scale_vector(vector)
    if norm < 0:
        return vector
    sizes = np.abs(vector.astype(np.float64))
    size = float(sizes.max()) / 32760.0 if norm == 0 else float((sizes**norm).sum() ** (1.0 / norm))
    scaled: Vector = (vector / size if size else vector).astype(np.float32)
    return scaled


refused = Router()  # routes of llama.cpp's server that cannot work here
MAX_SHARES = 64


@router.get("/props", responses=ERRORS)
async def show_properties(request: Request) -> Response:
    """Return the server's properties and the default parameters of requests to the model `?model=`."""
    lease = await borrow(request, request.query_params.get("model"))
    record = lease.record
    return JSONResponse(
        {
            "default_generation_settings": {"params": _default_params(lease), **_describe_slot(lease, 0, None)},
            "total_slots": await _count_slots(parts_of(request).settings),
            "model_alias": record.short_name,
            "model_path": str(record.path),
            "modalities": {kind: kind in lease.session.capabilities for kind in ("vision", "audio")},
            "media_marker": MEDIA,
            **_describe_tokenizer(lease),
            "build_info": f"mlxr-{mlxr.__version__}",
            "is_sleeping": False,
        }
    )


@router.get("/tokenizer_info", responses=ERRORS)
async def show_tokenizer(request: Request) -> Response:
    """Return the special tokens and the chat template of the model `?model=`, for clients of vLLM."""
    return JSONResponse(_describe_tokenizer(await borrow(request, request.query_params.get("model"))))


@router.get("/slots", responses=ERRORS)
async def list_slots(request: Request) -> Response:
    """Return every slot and the request in it; with `?fail_on_no_slot=1` an error if none is free."""
    lease = await borrow(request, request.query_params.get("model"))
    parts = parts_of(request)
    busy = [row for row in parts.activity if row.cancels and row.model == lease.name]
    slots = await _count_slots(parts.settings)
    if request.query_params.get("fail_on_no_slot") and len(busy) >= slots:
        raise ServerError(503, "unavailable", "no slot is free", retry_after_s=1.0)
    listed = [_describe_slot(lease, index, busy[index] if index < len(busy) else None) for index in range(slots)]
    return JSONResponse(listed)


@router.get("/models", responses=ERRORS)
async def list_models(request: Request) -> Response:
    """Return the models that requests can name: OpenAI's list with llama.cpp's facts about each."""
    records = await look(request, parts_of(request).registry.list)
    loaded = {model.name for model in parts_of(request).pool.running()}
    data = [
        {
            **describe_model(record).model_dump(),
            "aliases": [],
            "tags": [],
            "status": {"value": "loaded" if record.name in loaded else "unloaded"},
            "meta": {
                "n_ctx_train": record.context_tokens,
                "n_embd": record.embedding_length,
                "n_params": record.parameters_count,
                "size": record.size_bytes,
            },
        }
        for record in records
        if record.problem is None
    ]
    return JSONResponse({"object": "list", "data": data})


def _default_params(lease: ModelLease) -> JsonObject:
    body = CompletionFields.model_validate({})
    return describe_settings(body.make_params(lease.record, lease.session), body)


async def _count_slots(settings: Settings) -> int:
    return size_steps(settings, await asyncio.to_thread(find_device, settings)).max_sequences


def _describe_slot(lease: ModelLease, index: int, row: InFlight | None) -> JsonObject:
    slot: JsonObject = {
        "id": index,
        "n_ctx": lease.session.context_tokens,
        "speculative": False,
        "is_processing": row is not None,
    }
    if row is not None:
        slot |= {"id_task": row.id, "n_prompt_tokens": row.prompt_tokens, "n_decoded": row.generated_tokens}
    return slot


def _describe_tokenizer(lease: ModelLease) -> JsonObject:
    tokenizer = lease.session.tokenizer
    return {
        "chat_template": lease.session.chat_template,
        "bos_token": _spell(lease, tokenizer.bos_id),
        "eos_token": _spell(lease, min(tokenizer.eos_ids, default=None)),
    }


def _spell(lease: ModelLease, token_id: int | None) -> str:
    return "" if token_id is None else lease.session.tokenizer.token_text(token_id)


class AdapterShares(RootModel[Annotated[list[AdapterShare], Field(max_length=MAX_SHARES)]]):
    """Adapters by id, and the factors of their updates; those that are not listed have 0."""


@router.get("/lora-adapters", responses=ERRORS)
async def list_adapters(request: Request) -> Response:
    """Return the adapters of the model `?model=` (absent: the default one). An id is a place in this list."""
    base, records = await look(request, _list, request)
    scales = parts_of(request).served.adapters.read_scales(base)
    return JSONResponse(
        [
            {
                "id": index,
                "path": record.name,
                "scale": scales.get(record.name, 0.0),
                "task_name": record.name,
                "prompt_prefix": "",
            }
            for index, record in enumerate(records)
        ]
    )


@router.post("/lora-adapters", responses=ERRORS)
async def set_adapters(request: Request, body: AdapterShares) -> Response:
    """Set the adapters for requests to the model `?model=` that name none."""
    base, records = await look(request, _list, request)
    factors = {share.id: share.scale for share in body.root}
    scales = {record.name: factors.get(index, 0.0) for index, record in enumerate(records)}
    parts_of(request).served.adapters.set_scales(base, scales)
    return JSONResponse({"success": True})


def _list(request: Request) -> tuple[str, tuple[AdapterRecord, ...]]:
    """Return the base model of the request, and its adapters."""
    served = parts_of(request).served
    model = request.query_params.get("model") or served.find_default()
    base = served.find(model).short_name
    return base, served.adapters.list_for(base)


@refused.post("/slots/{id_slot}", responses=ERRORS)
async def change_slot(_: Request, id_slot: str) -> Response:
    """Slots cannot be saved, restored or erased: cached pages belong to no slot."""
    del id_slot
    message = "slots cannot be saved, restored or erased: all requests share one cache; see the setting store_bytes"
    raise ServerError(501, "not_supported", message)


@refused.post("/props", responses=ERRORS)
async def change_properties(_: Request) -> Response:
    """Properties cannot be changed while the server runs."""
    raise ServerError(501, "not_supported", "properties cannot be changed here; flags and settings do that")


router.include(refused)
