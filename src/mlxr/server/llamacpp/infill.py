"""POST /infill: what belongs between two pieces of code, with other files for context."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from mlxr.core.errors import InvalidRequest
from mlxr.server.errors import ServerError
from mlxr.server.generation import borrow
from mlxr.server.json_models import RequestModel
from mlxr.server.llamacpp.answering import answer
from mlxr.server.llamacpp.completion import CompletionReply
from mlxr.server.llamacpp.errors import STREAMED
from mlxr.server.llamacpp.fields import CompletionFields
from mlxr.server.routes import Router
from mlxr.service.infill import Snippet, encode_infill, find_infill_tokens

router = Router()


class ExtraInput(RequestModel):
    """Another file, or a part of one."""

    text: str
    filename: str | None = None


class InfillBody(CompletionFields):
    """A gap. `prompt` is what stands between the prefix and the cursor already."""

    input_prefix: str
    input_suffix: str
    input_extra: list[ExtraInput] | None = None
    prompt: str | None = None


@router.post("/infill", response_model=CompletionReply, responses=STREAMED)
async def create_infill(request: Request, body: InfillBody) -> Response:
    """Fill a gap in code, for models with infill tokens."""
    lease = await borrow(request, body.model, lora=body.shares)
    session = lease.session
    tokens = find_infill_tokens(session.tokenizer)
    if tokens is None:
        raise ServerError(501, "not_supported", "infill is not supported by this model: it has no infill tokens")
    encode = partial(
        encode_infill,
        session.tokenizer,
        body.input_prefix + (body.prompt or ""),
        body.input_suffix,
        [Snippet(extra.text, extra.filename or "tmp") for extra in body.input_extra or ()],
        max_tokens=session.context_tokens - int(min(body.most_tokens, session.context_tokens // 4)),
    )
    try:
        prompt = await session.run(encode, reads=[body.input_prefix, body.input_suffix])
    except InvalidRequest as error:
        raise InvalidRequest("input_prefix", error.reason) from None
    return await answer(request, body, lease, [prompt], grammar=body.make_grammar(), ends=tokens.ends)
