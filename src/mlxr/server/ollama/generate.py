"""The route `POST /api/generate`: the answer to a prompt."""

from __future__ import annotations

from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from mlxr.core.errors import InvalidRequest
from mlxr.core.types import Grammar, SamplingParams
from mlxr.server.generation import borrow
from mlxr.server.json_models import JsonObject
from mlxr.server.naming import spell_fields
from mlxr.server.ollama.answering import AnswerRequest, answer, check_think, load_only
from mlxr.server.ollama.options import make_params, make_window, note_options, read_grammar, read_keep_alive
from mlxr.server.ollama.reply import GenerateReply, Part, Parts
from mlxr.server.ollama.route import STREAMED
from mlxr.server.routes import Router
from mlxr.service.infill import make_infill
from mlxr.service.model_pool import ModelLease
from mlxr.service.requests import ChatRequest, TextRequest

router = Router()


class GenerateBody(AnswerRequest):
    """A prompt to answer; `raw` continues it as it is. `context` is that of an earlier reply, `template` one to use
    instead of the model's.
    """

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    context: list[int] | None = None
    raw: bool | None = None
    images: list[str] | None = None

    def check(self) -> None:
        """Raise InvalidRequest for what is not supported, or cannot go together."""
        super().check()
        if self.images:
            raise InvalidRequest("images", "is not supported: models read text only")
        if self.raw and (self.system or self.context or self.template):
            field = "system" if self.system else "context" if self.context else "template"
            raise InvalidRequest(field, "cannot be used with raw, which sends the prompt as it is")
        if self.suffix and (self.raw or self.system or self.context or self.format or self.template):
            raise InvalidRequest("suffix", "goes with prompt alone: not with raw, system, context, format or template")


@router.post("/api/generate", response_model=GenerateReply, responses=STREAMED)
async def generate(request: Request, body: GenerateBody) -> Response:
    """Answer one prompt; without a prompt only load or unload the model."""
    body.check()
    note_options(request, body.options)
    if not body.prompt and not body.suffix:
        return await load_only(request, body, {"response": ""})
    grammar = read_grammar(body.format)
    lease = await borrow(request, body.model, keep_alive_s=read_keep_alive(body.keep_alive), exact=True)
    params = make_params(lease.record, body.options, logprobs=body.logprobs, top_logprobs=body.top_logprobs)
    window = make_window(lease.record, body.options, body.truncate, lease.session.room_tokens)

    def render(part: Part, parts: Parts) -> JsonObject:
        piece: JsonObject = {"response": part.text}
        if part.thinking:
            piece["thinking"] = part.thinking
        if part.end is not None and not body.raw:
            piece["context"] = [*parts.prompt_ids, *parts.token_ids]
        return piece

    with spell_fields({"messages": "prompt", "chat_template": "template"}):
        if body.context:  # the template runs at once
            wanted = await lease.session.run(make_request, body, lease, params, grammar, reads=body.prompt)
        else:
            wanted = make_request(body, lease, params, grammar)
        wanted = replace(wanted, window=window)
        return await answer(request, body, lease, wanted, render)


def make_request(
    body: GenerateBody, lease: ModelLease, params: SamplingParams, grammar: Grammar | None
) -> TextRequest | ChatRequest:
    """A turn of a conversation where the model has a chat template, otherwise a text to continue."""
    session, prompt = lease.session, body.prompt or ""
    if body.suffix:
        return make_infill(session.tokenizer, TextRequest(prompt, params), body.suffix)
    if body.raw or not (session.can_chat or body.template):
        check_think(lease, body.think)
        if body.context:
            raise InvalidRequest("context", "is not supported: the model has no chat template")
        text = prompt if body.raw or not body.system else f"{body.system}\n\n{prompt}"
        return TextRequest(text, params, grammar)
    system = [{"role": "system", "content": body.system}] if body.system else []
    shown = [] if body.context else lease.record.messages  # a context holds them already
    messages = [*system, *shown, {"role": "user", "content": prompt}]
    think = body.think if body.template else check_think(lease, body.think)
    chat = ChatRequest(messages, params, grammar=grammar, think=think, chat_template=body.template or None)
    if not body.context:
        return chat
    turn = session.encode_chat(chat)
    bos_id = session.tokenizer.bos_id
    return TextRequest([*body.context, *(turn[1:] if turn[:1] == [bos_id] else turn)], params, grammar)
