"""Texts as tokens, prompts and vectors: /tokenize, /detokenize, /apply-template, /embedding and /embeddings.

Vectors have llama.cpp's own shape; OpenAI's is that of /v1/embeddings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from functools import partial
from typing import Annotated, TypeVar

import numpy as np
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlxr.core.errors import InvalidRequest
from mlxr.server.errors import spell_fields
from mlxr.server.generation import borrow, embed_all
from mlxr.server.json_models import ReplyModel, RequestModel
from mlxr.server.llamacpp.reply import ERRORS
from mlxr.server.openai.chat_request import FIELDS, ChatCompletionRequest
from mlxr.server.openai.replies import fit_effort
from mlxr.server.request_fields import Prompts, read_prompt, split_prompts
from mlxr.server.routes import Router
from mlxr.server.streaming import dump_json
from mlxr.service.embedding import Pooling, Vector, scale_vector
from mlxr.service.session import Session

router = Router()
INLINE_LENGTH = 4096  # characters or tokens


S = TypeVar("S", bound=Sized)
T = TypeVar("T")


class TokenizeBody(RequestModel):
    """A text. `parse_special` lets spellings of special tokens in it count as such.

    It is `content` as llama.cpp calls it, or `prompt` as vLLM does, who adds special tokens unless told otherwise.
    """

    content: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    model: str | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class Piece(ReplyModel):
    """A token and its bytes: text, or a list of numbers where they are no text by themselves."""

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
    """The token ids of a text."""
    lease = await borrow(request, body.model)
    session = lease.session
    text, add_special = body.content, bool(body.add_special)
    if text is None:
        text, add_special = body.prompt, body.add_special_tokens is not False
    if text is None:
        raise InvalidRequest("content", "is missing")
    encode = partial(session.encode_prompt, add_special=add_special, parse_special=body.parse_special is not False)

    def write(text: str) -> str:
        ids = encode(text)
        if not body.with_pieces:
            return _write_tokens(ids)
        return _write_tokens([{"id": token, "piece": _show(session.tokenizer.token_bytes(token))} for token in ids])

    with spell_fields({"prompt": "content"}):
        return Response(await beside_the_loop(session, write, text), media_type="application/json")


@router.post("/detokenize", responses=ERRORS)
async def detokenize(request: Request, body: DetokenizeBody) -> Content:
    """The text of token ids."""
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
    """The text that the chat template makes of a conversation, given as to `/v1/chat/completions`, tools included."""
    lease = await borrow(request, body.model)
    wanted = fit_effort(request, lease, body.to_request(), "reasoning_effort")
    with spell_fields(FIELDS):
        return Rendered(prompt=await lease.session.run(lease.session.render_chat, wanted, reads=wanted))


async def beside_the_loop(session: Session, work: Callable[[S], T], given: S) -> T:
    """`work(given)`, on another thread where there is so much that other requests would feel it."""
    return work(given) if len(given) <= INLINE_LENGTH else await session.run(work, given, reads=given)


def _write_tokens(tokens: Sequence[object]) -> str:
    """The reply as JSON, written in pieces, as one call would keep all others from the interpreter."""
    starts = range(0, len(tokens), INLINE_LENGTH)
    pieces = (dump_json(tokens[start : start + INLINE_LENGTH])[1:-1] for start in starts)
    return f'{{"tokens":[{",".join(pieces)}]}}'


def _show(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


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
