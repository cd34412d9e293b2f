"""Ollama's routes for models: list, show, create, pull, copy and delete them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from collections.abc import AsyncGenerator, AsyncIterator
from datetime import UTC, datetime, timedelta
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Annotated

from pydantic import Field
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response

from mlxr.core.errors import InvalidRequest, NameTaken, NotFound, RequestFailed
from mlxr.core.work_threads import Stop
from mlxr.registry import Changes, ModelRecord, Registry
from mlxr.registry.blobs import parse_digest
from mlxr.registry.modelfile import ROLES, check_options, list_parameters, write_modelfile
from mlxr.registry.record import Progress
from mlxr.server.errors import ClientGone, ServerError
from mlxr.server.ollama.answers import Options, note_options
from mlxr.server.ollama.reply import ERRORS, STREAMED, NamedRequest, error_frame, find_model, format_time
from mlxr.server.page_files import INDEX, find_page_file, wants_page
from mlxr.server.parts import parts_of
from mlxr.server.routes import JsonObject, ReplyModel, RequestModel, Router, Text, note_ignored, optional, reply_json
from mlxr.server.streaming import NDJSON, EventStream, ndjson, until_disconnected
from mlxr.server.work import change, look, start_make, start_pull, work_of
from mlxr.service.catalogue import read_metadata
from mlxr.service.creation import create_model
from mlxr.service.model_pool import RunningModel

if TYPE_CHECKING:
    from mlxr.registry.pull import PullProgress


INTERFACE_VERSION = "0.32.0"  # of Ollama, whose interface this is; clients ask for it to know its features
FOR_EVER = timedelta(days=100 * 365)
router = Router()


class Details(ReplyModel):
    """The kind of a model: its format, family, size and quantisation."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str
    context_length: int
    embedding_length: int


class Version(ReplyModel):
    """The version of the interface."""

    version: str


class ListedModel(ReplyModel):
    """A model that is here. Ollama has no field for models that only continue text: `has_chat_template` is ours."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: Details
    capabilities: list[str]
    has_chat_template: bool


class Tags(ReplyModel):
    """All models that are here."""

    models: list[ListedModel]


class LoadedModel(ReplyModel):
    """A model in memory; `size` is the memory that it takes now, `size_vram` the part of it on a GPU.

    The other fields are additions: the weights, the cache's memory now and at most, and the other names that share
    them.
    """

    name: str
    model: str
    size: int
    digest: str
    details: Details
    expires_at: str
    size_vram: int
    context_length: int
    weights_bytes: int
    cache_in_use_bytes: int
    cache_max_bytes: int
    shared_with: list[str]
    capabilities: list[str]


class Processes(ReplyModel):
    """All models in memory."""

    models: list[LoadedModel]


class ShowBody(NamedRequest):
    """The model to show; `verbose` adds long lists such as the vocabulary."""

    verbose: bool | None = None
    system: str | None = None
    template: str | None = None
    options: Options = None


class TensorReply(ReplyModel):
    """A tensor of the model."""

    name: str
    type: str
    shape: list[int]


class ShowReply(ReplyModel):
    """The details of a model. `template` is Jinja."""

    license: str | None = optional()
    modelfile: str
    parameters: str
    template: str
    system: str | None = optional()
    details: Details
    messages: list[dict[str, str]] | None = optional()
    model_info: JsonObject
    tensors: list[TensorReply]
    capabilities: list[str]
    modified_at: str


@router.get("/", response_class=PlainTextResponse)
async def say_running(request: Request) -> Response:
    """Return the page to a browser; to other clients the text by which they know that the server runs."""
    if wants_page(request.headers.get("accept", "")):
        page = await find_page_file(request, INDEX)
        if page is not None:
            return page
    return PlainTextResponse("Ollama is running", headers={"Vary": "Accept"})


@router.get("/api/version", response_model=Version)
async def version(_: Request) -> Version:
    """Return the version of Ollama's interface that this server has."""
    return Version(version=INTERFACE_VERSION)


@router.get("/api/tags", response_model=Tags, responses=ERRORS)
async def tags(request: Request) -> Response:
    """Return the models that are here and can be used."""
    records = await look(request, parts_of(request).served.list)
    return reply_json(Tags(models=[_describe_listed(record) for record in records if record.problem is None]))


@router.get("/api/ps", response_model=Processes, responses=ERRORS)
async def ps(request: Request) -> Response:
    """Return the models that are loaded."""
    return reply_json(Processes(models=[_describe_loaded(model) for model in parts_of(request).pool.running()]))


@router.post("/api/show", response_model=ShowReply, responses=ERRORS)
async def show(request: Request, body: ShowBody) -> Response:
    """Return the details of a model; given `system`, `template` and `options` are shown as if they were the model's."""
    note_options(request, body.options)
    record = await find_model(request, body.wanted)
    metadata, tensors = await look(request, partial(read_metadata, record.path, with_arrays=bool(body.verbose)))
    options = {**record.parameters, **check_options(body.options or {})}
    return reply_json(
        ShowReply(
            license=record.license or None,
            modelfile=await look(request, _write_modelfile, request, record),
            parameters="\n".join(list_parameters(options)),
            template=body.template or record.template or record.own_template,
            system=body.system or record.system,
            details=describe(record),
            messages=[dict(message) for message in record.messages] or None,
            model_info={"general.parameter_count": record.parameters_count, **metadata},
            tensors=[TensorReply(name=name, type=kind, shape=list(shape)) for name, kind, shape in tensors],
            capabilities=list_capabilities(record.capabilities),
            modified_at=format_time(record.modified_at),
        )
    )


def _write_modelfile(request: Request, record: ModelRecord) -> str:
    registry = parts_of(request).registry
    adapter = registry.find_adapter_of(record)
    return write_modelfile(record, None if adapter is None else adapter.path)


def describe(record: ModelRecord) -> Details:
    """Return the details of a record."""
    return Details(
        parent_model=record.from_name or "",
        format=record.format,
        family=record.architecture,
        families=[record.architecture],
        parameter_size=record.parameter_size,
        quantization_level=record.quantization,
        context_length=record.context_tokens,
        embedding_length=record.embedding_length,
    )


def list_capabilities(capabilities: frozenset[str]) -> list[str]:
    """Return the names of a model's capabilities; as in Ollama, "embedding" is only of models that do nothing else."""
    return sorted(capabilities - {"embedding"} if "completion" in capabilities else capabilities)


def _describe_listed(record: ModelRecord) -> ListedModel:
    return ListedModel(
        name=record.name,
        model=record.name,
        modified_at=format_time(record.modified_at),
        size=record.size_bytes,
        digest=record.digest,
        details=describe(record),
        capabilities=list_capabilities(record.capabilities),
        has_chat_template=bool(record.template or record.own_template),
    )


def _describe_loaded(model: RunningModel) -> LoadedModel:
    cache, weights_bytes = model.session.measure_cache(), model.session.weight_bytes
    size_bytes = weights_bytes + cache.in_use_bytes
    return LoadedModel(
        name=model.name,
        model=model.name,
        size=size_bytes,
        digest=model.record.digest,
        details=describe(model.record),
        expires_at=format_time(model.expires_at or datetime.now(UTC) + FOR_EVER),
        size_vram=0 if model.session.is_on_host else size_bytes,
        context_length=model.context_tokens,
        weights_bytes=weights_bytes,
        cache_in_use_bytes=cache.in_use_bytes,
        cache_max_bytes=cache.max_bytes,
        shared_with=list(model.shared_with),
        capabilities=list_capabilities(model.session.capabilities),
    )


REPORT_S = 0.1  # between two lines of progress, as pieces of a file come faster than people read
_STATUS = {"listing": "pulling manifest", "checking": "verifying sha256 digest", "adding": "writing manifest"}
logger = logging.getLogger(__name__)
MAX_FILES = 4096
WRITE_BYTES = 1 << 20


class Lines:
    """Lines of progress, made on the event loop. Those reported since the last frame go into the next one."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._lines: list[JsonObject] = []
        self._reported_s = 0.0

    def report(self, line: JsonObject, *, is_piece: bool) -> None:
        """Add a line, always from the same thread, which may be any. Most lines about pieces are left out."""
        if is_piece and monotonic() - self._reported_s < REPORT_S:
            return
        self._reported_s = monotonic()
        with contextlib.suppress(RuntimeError):  # the server has ended
            self._loop.call_soon_threadsafe(self._add, line)

    async def follow(self, task: asyncio.Task[object]) -> AsyncGenerator[bytes, None]:
        """Yield frames until the task has ended; raises what it raised. A reader that goes away cancels it."""
        task.add_done_callback(lambda _: self._news.set())
        try:
            while not task.done():
                await self._news.wait()
                self._news.clear()
                if self._lines:
                    yield self._take()
            await task
        finally:
            task.cancel()
            await asyncio.wait({task})
        if self._lines:
            yield self._take()

    def _add(self, line: JsonObject) -> None:
        self._lines.append(line)
        self._news.set()

    def _take(self) -> bytes:
        lines, self._lines = self._lines, []
        return b"".join(map(ndjson, lines))


class PullBody(NamedRequest):
    """The model to pull: hf.co/owner/repo[:file or quant]."""

    stream: bool | None = None


class PullReply(ReplyModel):
    """The progress of a pull; `digest`, `total` and `completed` are of one file, in bytes."""

    status: str
    digest: str | None = optional()
    total: int | None = optional()
    completed: int | None = optional()


@router.post("/api/pull", response_model=PullReply, responses=STREAMED)
async def pull(request: Request, body: PullBody) -> Response:
    """Pull a model. If the client goes away, the pull stops; the next one continues it."""
    pulling = Pulling(request, body.wanted)
    task = await pulling.start()
    if body.stream is not False:
        return EventStream(request, pulling.write_frames(task), media_type=NDJSON, on_error=error_frame)
    await until_disconnected(request, task)
    return reply_json(PullReply(status="success"))


@router.post("/api/push", responses=ERRORS)
async def push(_: Request) -> Response:
    """Refuse the request: models are not sent anywhere."""
    raise ServerError(400, "unsupported", "push is not supported: models are not sent anywhere")


class Pulling:
    """One pull, on a thread of its own."""

    def __init__(self, request: Request, name: str) -> None:
        self._request, self._name = request, name
        self._lines = Lines()

    async def start(self) -> asyncio.Task[None]:
        """Begin to pull; the task ends when the model is there. Cancelled, it stops at once. Raises Busy."""
        if await self._is_here():
            return asyncio.create_task(asyncio.sleep(0))
        parts = parts_of(self._request)

        def work(registry: Registry, stop: Stop) -> None:
            from mlxr.registry.pull import pull as pull_model  # imports an HTTP client, which would slow the start

            url, room_bytes = parts.settings.hub_url, parts.pool.budget_bytes
            pull_model(registry, self._name, endpoint=url, report=self._report, stop=stop, room_bytes=room_bytes)

        task = start_pull(self._request, work)
        task.add_done_callback(lambda _: parts.pool.refresh())
        return task

    async def write_frames(self, task: asyncio.Task[None]) -> AsyncGenerator[bytes, None]:
        """Yield lines of progress, and the last one: success."""
        async for frame in self._lines.follow(task):
            yield frame
        yield ndjson({"status": "success"})

    async def _is_here(self) -> bool:
        """Return True if the name is that of a model that did not come from a hub, which then need not be asked."""
        if "hf.co/" in self._name or "huggingface.co/" in self._name:
            return False
        try:
            await find_model(self._request, self._name)
        except NotFound:
            return False
        return True

    def _report(self, progress: PullProgress) -> None:
        """Called on the thread that pulls."""
        self._lines.report(_describe(progress), is_piece=0 < progress.done_bytes < progress.total_bytes)


def _describe(progress: PullProgress) -> JsonObject:
    if progress.stage != "fetching":
        return {"status": progress.why or _STATUS[progress.stage]}
    return {
        "status": f"pulling {progress.digest[:12]}",
        "digest": f"sha256:{progress.digest}",
        "total": progress.total_bytes,
        "completed": progress.done_bytes,
    }


class TaughtMessage(RequestModel):
    """A message that every conversation with the model begins with."""

    role: Text
    content: str


class CreateBody(NamedRequest):
    """The source of a new model: another one (`from`), or blobs (`files`: file name to digest).

    `adapters` are blobs, too: the files of a low-rank adapter that all answers of the new model use. As in Ollama a
    model of that name is replaced, once the new one is complete, and the reply says so; with `replace` false it is not.
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
        """Raise InvalidRequest for fields that are not supported or missing."""
        if (self.source is None) == (not self.files):
            raise InvalidRequest("from", "give either from, the name of a model, or files, uploaded as blobs")
        for file_name, digest in (self.adapters or {}).items():
            parse_digest(digest, f"adapters.{file_name[:80]}")
        for index, message in enumerate(self.messages or []):
            if message.role not in ROLES:
                raise InvalidRequest(f"messages[{index}].role", f"must be one of {', '.join(ROLES)}")

    @property
    def changes(self) -> Changes:
        """The settings that the new model changes."""
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
    """One line of the stream: the progress of the creation. `replaced` is the model that had the name before."""

    status: str
    replaced: str | None = optional()


@router.post("/api/create", response_model=StatusReply, responses=STREAMED)
async def create(request: Request, body: CreateBody) -> Response:
    """Make a model. Errors of the request are told at once, errors of the files in the last line."""
    body.check()
    note_options(request, body.parameters, "parameters")
    if body.renderer:
        note_ignored(request, ["renderer"])
    name, changes = body.wanted, body.changes

    served = parts_of(request).served
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
        parts_of(request).pool.refresh()
        for file in record.files:
            yield ndjson({"status": f"using existing layer sha256:{file.sha256}"})
        yield ndjson({"status": "writing manifest"}) + ndjson({"status": "success"})

    replaced = None
    if body.replace is not False:
        replaced = await look(request, _find_taken, parts_of(request).registry, name)
    task = start_make(request, make)
    if body.stream is not False:
        return EventStream(request, write_frames(), media_type=NDJSON, on_error=error_frame)
    await until_disconnected(request, task)
    parts_of(request).pool.refresh()
    return reply_json(StatusReply(status="success", replaced=replaced))


def _find_taken(registry: Registry, name: str) -> str | None:
    """Return the name, if a model has it already; also logs that."""
    try:
        registry.check_free(name)
    except NameTaken:
        logger.info("/api/create replaces the model %s", name)
        return name
    return None


def _report_quantizing(lines: Lines, type_name: str, stop: Stop) -> Progress:
    """Return a function to which quantising reports the bytes written and the total; it raises to stop the thread."""

    def report(done_bytes: int, total_bytes: int) -> None:
        if stop.is_set():
            raise RequestFailed("cancelled", "the client is gone")
        line: JsonObject = {"status": f"quantizing model to {type_name}", "total": total_bytes, "completed": done_bytes}
        lines.report(line, is_piece=done_bytes < total_bytes)

    return report


@router.post("/api/copy", responses=ERRORS)
async def copy(request: Request, body: CopyBody) -> Response:
    """Give a model a second name. One that another model has is refused, unless the request says `replace`."""
    served = parts_of(request).served

    def make(registry: Registry) -> ModelRecord:
        served.refuse_file_name(body.destination, "destination")
        return registry.copy(served.find(body.source), body.destination, replaces=body.replace is True)

    await change(request, make)
    parts_of(request).pool.refresh()
    return Response()


@router.delete("/api/delete", responses=ERRORS)
async def delete(request: Request, body: NamedRequest) -> Response:
    """Remove a model, and its files if they lie in the store and no other model has them."""
    parts = parts_of(request)

    def remove(registry: Registry) -> ModelRecord:
        parts.served.refuse_file_name(body.wanted, "model")
        return registry.remove(body.wanted)

    pool, record = parts.pool, await change(request, remove)
    for running in pool.running():
        if running.name.lower() == record.name.lower():
            await until_disconnected(request, pool.unload(running.name))
    pool.refresh()
    return Response()


@router.head("/api/blobs/{digest}")
async def has_blob(request: Request, digest: str) -> Response:
    """Answer 200 if the blob is here, 404 if it is not."""
    is_here = await look(request, parts_of(request).registry.blobs.has, digest)
    return Response(status_code=200 if is_here else 404)


@router.post("/api/blobs/{digest}", status_code=201, responses=ERRORS)
async def store_blob(request: Request, digest: str) -> Response:
    """Store the body, whose digest must be that of the path."""
    registry = parts_of(request).registry
    threads = work_of(request).uploads
    incoming = await threads.run(registry.blobs.receive, digest)
    with incoming:
        _check_room(registry, request.headers.get("content-length", ""))
        try:
            async for chunk in _gather(request.stream()):
                await threads.run(incoming.write, chunk)
        except ClientDisconnect as error:
            raise ClientGone from error
        await threads.run(incoming.commit)
    return Response(status_code=201)


async def _gather(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the same bytes in larger pieces, each of which is worth a call on a thread."""
    held = bytearray()
    async for chunk in chunks:
        held += chunk
        if len(held) >= WRITE_BYTES:
            yield bytes(held)
            held.clear()
    if held:
        yield bytes(held)


def _check_room(registry: Registry, length: str) -> None:
    free_bytes = shutil.disk_usage(registry.blobs.folder).free
    if length.isascii() and length.isdigit() and int(length[:20]) > free_bytes:
        raise ServerError(413, "too_large", f"the file takes {length[:20]} bytes, {free_bytes} are free")
