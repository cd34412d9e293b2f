"""POST /completion, and /completions, which is the same here: not OpenAI's, which lies below /v1."""

from __future__ import annotations

from pydantic import RootModel
from starlette.requests import Request
from starlette.responses import Response

from mlxr.server.generation import borrow
from mlxr.server.json_models import JsonObject
from mlxr.server.llamacpp.answering import answer
from mlxr.server.llamacpp.errors import STREAMED
from mlxr.server.llamacpp.fields import CompletionFields
from mlxr.server.prompts import Prompts, read_prompt, split_prompts
from mlxr.server.routes import Router

router = Router()


class CompletionBody(CompletionFields):
    """Continue one prompt, or each of several."""

    prompt: Prompts


class CompletionReply(RootModel[JsonObject | list[JsonObject]]):
    """The answer to one prompt in the words of llama.cpp's server, or a list of them; fields may have been picked."""


@router.post("/completion", response_model=CompletionReply, responses=STREAMED)
@router.post("/completions", response_model=CompletionReply, responses=STREAMED)
async def create_completion(request: Request, body: CompletionBody) -> Response:
    """Continue one prompt, or each of several."""
    given, as_list = split_prompts(body.prompt, "prompt")
    lease = await borrow(request, body.model, lora=body.shares)
    prompts = await lease.session.run(lambda: [read_prompt(lease.session, one, "prompt") for one in given], reads=given)
    return await answer(request, body, lease, prompts, as_list=as_list, grammar=body.make_grammar())
