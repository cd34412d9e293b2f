"""Models made, copied and deleted: /api/create, /api/copy, /api/delete."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from typing import Annotated

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from mlxr.core.errors import InvalidRequest, NameTaken, RequestFailed
from mlxr.core.work_threads import Stop
from mlxr.registry import Changes, ModelRecord, Registry
from mlxr.registry.blobs import parse_digest
from mlxr.registry.modelfile import ROLES
from mlxr.registry.options import check_options
from mlxr.registry.record import Progress
from mlxr.server.ignored import note_ignored
from mlxr.server.json_models import JsonObject, ReplyModel, RequestModel, Text, optional
from mlxr.server.ollama.lines import Lines
from mlxr.server.ollama.options import Options, note_options
from mlxr.server.ollama.route import ERRORS, STREAMED, NamedRequest, error_frame
from mlxr.server.routes import Router, reply_json
from mlxr.server.served import ServedModels
from mlxr.server.streaming import NDJSON, EventStream, ndjson, until_disconnected
from mlxr.server.work import change, look, start_make
from mlxr.service.creation import create_model

logger = logging.getLogger(__name__)
MAX_FILES = 4096
router = Router()


class TaughtMessage(RequestModel):
    """A message that every conversation with the model begins with."""

    role: Text
    content: str


class CreateBody(NamedRequest):
    """What to make a model of: another one (`from`), or blobs (`files`: file name to digest).

    `adapters` are blobs, too: the files of a low-rank adapter that all answers of the new model have. As in Ollama a
    model of that name is replaced, once the new one is whole, and the reply says so; with `replace` false it is not.
    """

    source: Annotated[Text | None, Field(alias="from")] = None
    files: Annotated[dict[str, str] | None, Field(max_length=MAX_FILES)] = None
    template: str | None = None
    renderer: str | None = None
    system: str | None = None
    license: str | list[str] | None = None
    parameters: Options = None
    messages: list[TaughtMessage] | None = None
    adapters: Annotated[dict[str, str], Field(max_length=MAX_FILES)] | None = None
    quantize: str | None = None
    replace: bool | None = None
    stream: bool | None = None

    def check(self) -> None:
        """Raise InvalidRequest for what is not supported or missing."""
        if (self.source is None) == (not self.files):
            raise InvalidRequest("from", "give either from, the name of a model, or files, uploaded as blobs")
        for file_name, digest in (self.adapters or {}).items():
            parse_digest(digest, f"adapters.{file_name[:80]}")
        for index, message in enumerate(self.messages or []):
            if message.role not in ROLES:
                raise InvalidRequest(f"messages[{index}].role", f"must be one of {', '.join(ROLES)}")

    @property
    def changes(self) -> Changes:
        """What the new model sets anew."""
        return Changes(
            template=self.template or None,
            system=self.system or None,
            parameters=check_options(self.parameters or {}, "parameters") or None,
            messages=[message.model_dump() for message in self.messages] if self.messages else None,
            license="\n\n".join(self.license) if isinstance(self.license, list) else self.license,
        )


class CopyBody(RequestModel):
    """The model and its other name, which no other model may have unless `replace` is true."""

    source: Text
    destination: Text
    replace: bool | None = None


class StatusReply(ReplyModel):
    """One line of the stream: how far the creation is. `replaced` is the model that had the name before."""

    status: str
    replaced: str | None = optional()


@router.post("/api/create", response_model=StatusReply, responses=STREAMED)
async def create(request: Request, body: CreateBody) -> Response:
    """Make a model. What is wrong with the request is told at once, what is wrong with the files in the last line."""
    body.check()
    note_options(request, body.parameters, "parameters")
    if body.renderer:
        note_ignored(request, ["renderer"])
    name, changes = body.wanted, body.changes

    served: ServedModels = request.app.state.served
    lines = Lines()

    def make(registry: Registry, stop: Stop) -> ModelRecord:
        progress = _report_quantizing(lines, body.quantize or "", stop)
        served.refuse_file_name(name, "model")
        source = served.find(body.source) if body.source is not None else body.files or {}
        return create_model(
            registry,
            name,
            source,
            changes,
            quantize=body.quantize or None,
            progress=progress,
            adapter=body.adapters or None,
            replaces=body.replace is not False,
            renderer=body.renderer or None,
        )

    async def write_frames() -> AsyncGenerator[bytes, None]:
        yield ndjson({"status": "parsing model"})
        if replaced is not None:
            yield ndjson({"status": f"replacing the model {replaced}"})
        async for frame in lines.follow(task):
            yield frame
        record = task.result()
        request.app.state.pool.refresh()
        for file in record.files:
            yield ndjson({"status": f"using existing layer sha256:{file.sha256}"})
        yield ndjson({"status": "writing manifest"}) + ndjson({"status": "success"})

    replaced = None
    if body.replace is not False:
        replaced = await look(request, _find_taken, request.app.state.registry, name)
    task = start_make(request, make)
    if body.stream is not False:
        return EventStream(request, write_frames(), media_type=NDJSON, on_error=error_frame)
    await until_disconnected(request, task)
    request.app.state.pool.refresh()
    return reply_json(StatusReply(status="success", replaced=replaced))


def _find_taken(registry: Registry, name: str) -> str | None:
    """The name, if a model has it already, which the log then tells."""
    try:
        registry.check_free(name)
    except NameTaken:
        logger.info("/api/create replaces the model %s", name)
        return name
    return None


def _report_quantizing(lines: Lines, type_name: str, stop: Stop) -> Progress:
    """Return what a thread that quantises calls with bytes written and in all; it raises when it shall stop."""

    def report(done_bytes: int, total_bytes: int) -> None:
        if stop.is_set():
            raise RequestFailed("cancelled", "the client is gone")
        line: JsonObject = {"status": f"quantizing model to {type_name}", "total": total_bytes, "completed": done_bytes}
        lines.report(line, is_piece=done_bytes < total_bytes)

    return report


@router.post("/api/copy", responses=ERRORS)
async def copy(request: Request, body: CopyBody) -> Response:
    """Give a model a second name. One that another model has is refused, unless the request says `replace`."""
    served: ServedModels = request.app.state.served

    def make(registry: Registry) -> ModelRecord:
        served.refuse_file_name(body.destination, "destination")
        return registry.copy(served.find(body.source), body.destination, replaces=body.replace is True)

    await change(request, make)
    request.app.state.pool.refresh()
    return Response()


@router.delete("/api/delete", responses=ERRORS)
async def delete(request: Request, body: NamedRequest) -> Response:
    """Remove a model, and its files if they lie in the store and no other model has them."""
    state = request.app.state

    def remove(registry: Registry) -> ModelRecord:
        state.served.refuse_file_name(body.wanted, "model")
        return registry.remove(body.wanted)

    pool, record = state.pool, await change(request, remove)
    for running in pool.running():
        if running.name.lower() == record.name.lower():
            await until_disconnected(request, pool.unload(running.name))
    pool.refresh()
    return Response()
