"""The routes `POST /v1/audio/transcriptions` and `/v1/audio/translations`, for models that hear.

The body is a form, as OpenAI's clients send it. A sound is cut into pieces of 30 s, the most that a model hears at
once. Each piece is a conversation of its own, and a segment of `verbose_json` whose times are those of the cuts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from email.message import Message
from functools import partial
from typing import Literal

from pydantic import Field, ValidationError
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from mlxr.core.errors import InvalidRequest
from mlxr.core.types import SamplingParams
from mlxr.server.errors import ServerError, explain_body
from mlxr.server.generation import borrow, read_all, start
from mlxr.server.openai.replies import ERRORS, fit_effort
from mlxr.server.parts import parts_of
from mlxr.server.routes import JsonObject, ReplyModel, RequestModel, Router, note_ignored, optional, reply_json
from mlxr.service.requests import ChatRequest
from mlxr.service.sight import make_sound
from mlxr.service.streams import ReplyFold

PIECE_S, MAX_AT_ONCE, MAX_PARTS = 30.0, 4, 64
TASKS = {
    "transcribe": "Transcribe the speech in this recording. Answer with its words alone.",
    "translate": "Translate the speech in this recording to English. Answer with the translation alone.",
}
router = Router()


class TranscriptionRequest(RequestModel):
    """The fields of the form."""

    file: bytes
    model: str | None = None
    language: str | None = Field(None, max_length=64)
    prompt: str | None = Field(None, max_length=4096)
    response_format: Literal["json", "text", "verbose_json"] = "json"
    temperature: float = Field(0.0, ge=0.0, le=2.0)
    stream: Literal["false"] = "false"
    timestamp_granularities: Literal["segment"] | None = Field(None, alias="timestamp_granularities[]")

    def instruct(self, task: str) -> str:
        """Return the instruction to the model for each piece."""
        words = TASKS[task]
        if self.language and task == "transcribe":
            words += f" Their language is {self.language}."
        if self.prompt:
            words += f" Spell names as they are spelt here: {self.prompt}"
        return words


class AudioUsage(ReplyModel):
    """Tokens of all pieces."""

    type: Literal["tokens"] = "tokens"
    input_tokens: int
    output_tokens: int
    total_tokens: int


class SegmentReply(ReplyModel):
    """The text of a piece of a sound; its times are those at which the sound was cut."""

    id: int
    start: float
    end: float
    text: str
    temperature: float


class Transcription(ReplyModel):
    """The text of a sound; all fields but `text` and `usage` are those of `verbose_json`."""

    text: str
    task: Literal["transcribe", "translate"] | None = optional()
    language: str | None = optional()
    duration: float | None = optional()
    segments: list[SegmentReply] | None = optional()
    usage: AudioUsage


_FORM: JsonObject = {
    "type": "object",
    "required": ["file"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        **{name: {"type": "string"} for name in ("model", "language", "prompt", "response_format", "temperature")},
    },
}
_BODY = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}}


@router.post("/v1/audio/transcriptions", response_model=Transcription, responses=ERRORS, openapi_extra=_BODY)
@router.post("/v1/audio/translations", response_model=Transcription, responses=ERRORS, openapi_extra=_BODY)
async def transcribe(request: Request) -> Response:
    """Write down the words of a sound, in their own language or in English."""
    read = partial(read_form, request.headers.get("content-type", ""))
    body, ignored = await parts_of(request).work.bodies.take(request, read, is_json=False)
    note_ignored(request, ignored)
    lease = await borrow(request, body.model)
    session = lease.session
    if session.deaf:
        raise InvalidRequest("model", f"{lease.record.short_name} does not hear: {session.deaf}")
    pieces, seconds = await session.listen(body.file, "file")
    task: Literal["transcribe", "translate"] = (
        "translate" if request.url.path.endswith("/translations") else "transcribe"
    )
    words: JsonObject = {"type": "text", "text": body.instruct(task)}
    asked = [
        ChatRequest(
            messages=[{"role": "user", "content": [make_sound(body.file, "file", piece), words]}],
            params=SamplingParams(temperature=body.temperature),
            think=False,
        )
        for piece in range(pieces)
    ]
    folds = list[ReplyFold]()
    for first in range(0, pieces, MAX_AT_ONCE):
        fitted = [fit_effort(request, lease, one, "file") for one in asked[first : first + MAX_AT_ONCE]]
        started = await asyncio.gather(*(start(request, lease, one) for one in fitted))
        folds.append(ReplyFold([len(generation.prompt_ids) for generation in started]))
        folds[-1].add_all(await read_all(request, started))
    texts = [answer.text.strip() for fold in folds for answer in fold.answers]
    whole = " ".join(filter(None, texts))
    if body.response_format == "text":
        return PlainTextResponse(f"{whole}\n")
    given, made = (sum(getattr(fold, name) for fold in folds) for name in ("prompt_tokens", "generated_tokens"))
    reply = Transcription(
        text=whole, usage=AudioUsage(input_tokens=given, output_tokens=made, total_tokens=given + made)
    )
    if body.response_format == "verbose_json":
        segments = [
            SegmentReply(
                id=number,
                start=PIECE_S * number,
                end=min(seconds, PIECE_S * (number + 1)),
                text=text,
                temperature=body.temperature,
            )
            for number, text in enumerate(texts)
        ]
        language = "english" if task == "translate" else body.language or ""
        more = {"task": task, "language": language, "duration": seconds, "segments": segments}
        reply = reply.model_copy(update=more)
    return reply_json(reply)


def read_form(content_type: str, data: bytearray) -> tuple[TranscriptionRequest, list[str]]:
    """Return the fields of a form, and the names of those without effect. Raises ServerError if it is none."""
    fields = split_form(content_type, bytes(data))
    values: dict[str, object] = {}
    for name, value in fields.items():
        text = value if name == "file" else value.decode("utf-8", "replace")
        if text != "":
            values[name] = text
    if "temperature" in values:
        try:
            values["temperature"] = float(str(values["temperature"]))
        except ValueError:
            raise InvalidRequest("temperature", "must be a number") from None
    try:
        body = TranscriptionRequest.model_validate(values)
    except ValidationError as error:
        raise explain_body(error.errors(include_url=False), values) from error
    known = {field.alias or name for name, field in TranscriptionRequest.model_fields.items()}
    return body, sorted(values.keys() - known)


def split_form(content_type: str, data: bytes) -> Mapping[str, bytes]:
    """Return the fields of a body `multipart/form-data` (RFC 7578), the first of each name. Raises ServerError."""
    header = Message()
    header["content-type"] = content_type
    boundary = header.get_param("boundary")
    if header.get_content_type() != "multipart/form-data" or not isinstance(boundary, str) or not boundary:
        raise ServerError(400, "invalid_request", "body: must be a form, multipart/form-data with a boundary", "body")
    sections = (b"\r\n" + data).split(b"\r\n--" + boundary.encode("latin-1", "replace"), MAX_PARTS + 1)
    fields: dict[str, bytes] = {}
    for section in sections[1:]:
        if section.startswith(b"--"):
            return fields
        head, _, value = section.partition(b"\r\n\r\n")
        part = Message()
        for line in head.decode("utf-8", "replace").split("\r\n"):
            if line.lower().startswith("content-disposition:"):
                part["content-disposition"] = line.partition(":")[2].strip()
        name = part.get_param("name", header="content-disposition")
        if isinstance(name, str):
            fields.setdefault(name, value)
    raise ServerError(400, "invalid_request", f"body: is a form that is cut off, or has over {MAX_PARTS} parts", "body")
