"""Routes of our own: health, metrics, the page's files, and those below `/v1/admin` for the server's owner.

The latter describe the server, loaded models, requests in flight and the memory of models, and import models and
adapters. Errors have one form: `{"error": {"code", "message", "field", "request_id"}}`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field, RootModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import mlxr
from mlxr.core.errors import EngineStopped, InvalidRequest, MlxrError, RequestFailed
from mlxr.core.model_settings import size_steps
from mlxr.core.sampling import read_params
from mlxr.core.settings import Settings
from mlxr.core.types import PARAMETERS
from mlxr.core.work_threads import Stop
from mlxr.registry import AdapterRecord, ModelRecord, Registry, library
from mlxr.server.activity import InFlight, in_flight
from mlxr.server.errors import ServerError
from mlxr.server.live import router as live_router
from mlxr.server.mcp import router as mcp_router
from mlxr.server.model_names import find_importable, forget_adapter, load_adapter
from mlxr.server.page_files import ASSET_PATH, ASSETS, ROOT_FILES, find_page_file
from mlxr.server.parts import parts_of
from mlxr.server.routes import Dialect, Router
from mlxr.server.streaming import until_disconnected
from mlxr.server.work import look, start_make, start_pull, work_of
from mlxr.service.catalogue import find_models_folder, recommend
from mlxr.service.machine_limits import find_read_rate, judge_fits, judge_speed
from mlxr.service.memory_need import find_conversation_need, find_memory_need
from mlxr.service.opening import find_device

if TYPE_CHECKING:
    from mlxr.server.model_names import ServedModels
    from mlxr.service.adapters import AdapterUse
    from mlxr.service.model_pool import ModelPool, RunningModel
    from mlxr.service.stats import SessionStats


own = Router(tags=["own"])
router = Router(prefix="/v1/admin", tags=["admin"])
MAX_SEARCH = 200  # characters of words for the hub
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _Row(BaseModel):
    model_config = ConfigDict(defer_build=True, extra="forbid", strict=True)


class Health(_Row):
    """The health of the server: whether it is ready, and the `reason` if not."""

    status: str
    reason: str | None = None


@own.get("/health/live")
async def live(_: Request) -> Health:
    """Tell whether the process runs."""
    return Health(status="ok")


@own.get("/health", responses={503: {"model": Health}})
@own.get("/health/ready", responses={503: {"model": Health}})
async def ready(request: Request) -> Response:
    """Tell whether requests are answered now; 503 while the first models are loaded and once the server is ending."""
    lifecycle = parts_of(request).lifecycle
    if lifecycle.is_ready:
        return JSONResponse({"status": "ok"})
    reason = "the server is being stopped" if lifecycle.is_draining else lifecycle.problem
    return JSONResponse({"status": "not ready", "reason": reason}, 503)


@own.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """Return all metrics in the text format that Prometheus reads."""
    parts = parts_of(request)
    stats = await collect_stats(parts.pool)
    stored_bytes = await asyncio.to_thread(parts.registry.store_bytes)
    return Response(parts.metrics.render(len(parts.activity), stored_bytes, stats), media_type=METRICS_TYPE)


async def page_file(request: Request) -> Response:
    """Return a file beside the page: icons, files of an installed page, and at `/docs` all routes to try."""
    return await _require_file(request, ROOT_FILES[request.url.path])


for path in ROOT_FILES:
    own.get(path, response_class=Response)(page_file)


@own.get(ASSET_PATH, response_class=Response)
async def page_asset(request: Request, name: str) -> Response:
    """Return a file of the page; its name changes with its contents."""
    return await _require_file(request, name, ASSETS)


async def _require_file(request: Request, name: str, folder: str = "") -> Response:
    reply = await find_page_file(request, name, folder)
    if reply is None:
        raise ServerError(404, "not_found", f"the page has no file {name[:100]!r}", "name")
    return reply


MAX_PATH_CHARACTERS = 4096
Words = Annotated[str, Field(min_length=1, max_length=MAX_PATH_CHARACTERS)]


class MemoryReply(_Row):
    """The memory that a model takes, or would take if it were loaded now.

    `cache_bytes` are kept for its cache whatever other models want. The cache takes memory as it is used:
    `cache_in_use_bytes` now, and up to `cache_max_bytes` if there is room. `free_bytes` is the budget of all models
    without pinned ones and memory in use. `unloads` names the models that would make room; `reason` says why it does
    not fit, and what to do about it. A conversation of `conversation_tokens` tokens (the query's `tokens`, or a whole
    context) fills `conversation_bytes` of the cache.
    """

    model: str
    is_loaded: bool
    weights_bytes: int
    cache_bytes: int
    cache_in_use_bytes: int
    cache_max_bytes: int
    free_bytes: int
    conversation_tokens: int
    conversation_bytes: int
    fits: bool
    unloads: list[str]
    reason: str | None


class KnownModel(_Row):
    """A well-known model. A pull takes its `name`; `fits` compares its files with the free memory.

    `fits` is yes, slow, tight, no or unknown. The expected tokens per second are null if memory was never measured.
    """

    name: str
    about: str
    repository: str
    size_bytes: int
    fits: str
    tokens_per_s: float | None


class FoundModel(_Row):
    """A repository of the hub that has GGUF files. A pull takes its `name`; `downloads` are those of a month."""

    name: str
    downloads: int


class Library(_Row):
    """All well-known models, the usual size of each family first, and the results of a search of the hub."""

    models: list[KnownModel]
    hub: list[FoundModel]


class FilesReply(_Row):
    """The place of a model's files. `stays` says that they are not deleted with its name.

    They stay if they are outside the models folder, or if the models in `shared_with` use them, too.
    """

    model: str
    path: str
    size_bytes: int
    stays: bool
    shared_with: list[str]


class SamplingReply(RootModel[dict[str, int | float]]):
    """Values of the sampling parameters that are numbers, by name."""


class PdfReply(_Row):
    """The text of a PDF, an empty line between its pages, and the number of pages without text."""

    text: str
    pages: int
    pages_without_text: int


class ImportBody(_Row):
    """The path of a model file or folder, absolute or below one of the folders for imports, and its new name.

    A name that another model has is refused, unless `replace` is true.
    """

    path: Words
    name: Words | None = None
    replace: bool = False


class ImportReply(_Row):
    """The model under its new name."""

    name: str
    size_bytes: int


@router.get("/library")
async def list_known_models(request: Request) -> Library:
    """Return the models that have short names, and whether they fit into the memory of this machine.

    With `?search=WORDS` the hub is searched, too.
    """
    settings = parts_of(request).settings
    words = request.query_params.get("search", "").strip()[:MAX_SEARCH]

    def read() -> list[KnownModel]:
        models = library.read_library(find_models_folder(settings))
        fits = judge_fits([model.size_bytes for model in models], settings.device)
        rate = find_read_rate(settings)
        return [
            KnownModel(
                name=model.name,
                about=model.about,
                repository=model.repository,
                size_bytes=model.size_bytes,
                fits=judge_speed(fit, model.speed(rate)),
                tokens_per_s=model.speed(rate),
            )
            for model, fit in zip(models, fits, strict=True)
        ]

    def search(_: Registry, stop: Stop) -> list[FoundModel]:
        from mlxr.registry.hub import HubClient, search_hub  # imported here, as most servers never need it

        with HubClient(stop) as client:
            found = search_hub(words, settings.hub_url, client)
        return [FoundModel(name=one.reference, downloads=one.downloads) for one in found]

    models = await asyncio.to_thread(read)
    hub = await until_disconnected(request, start_pull(request, search)) if words else []
    return Library(models=models, hub=hub)


@router.get("/models/{name:path}/memory")
async def show_memory(request: Request, name: str) -> MemoryReply:
    """Return the memory that a model takes, or would take if it were loaded."""
    parts = parts_of(request)
    record: ModelRecord = await look(request, parts.served.find_base, name)
    asked = request.query_params.get("tokens", "")
    if asked and not (asked.isascii() and asked.isdigit() and 0 < len(asked) < 10 and int(asked)):
        raise InvalidRequest("tokens", f"must be a positive number, not {asked[:20]!r}")
    need = await find_memory_need(parts.pool, record, parts.settings)
    tokens, conversation_bytes = await find_conversation_need(record, parts.settings, int(asked) if asked else None)
    return MemoryReply(
        model=record.short_name,
        is_loaded=need.is_loaded,
        weights_bytes=need.weight_bytes,
        cache_bytes=need.cache_bytes,
        cache_in_use_bytes=need.cache_in_use_bytes,
        cache_max_bytes=need.cache_max_bytes,
        free_bytes=need.free_bytes,
        conversation_tokens=tokens,
        conversation_bytes=conversation_bytes,
        fits=need.reason is None,
        unloads=list(need.leaving),
        reason=need.reason,
    )


@router.get("/models/{name:path}/files")
async def show_files(request: Request, name: str) -> FilesReply:
    """Return where the files of a model lie, and whether deleting it deletes them."""
    served = parts_of(request).served
    record: ModelRecord = await look(request, served.find_base, name)
    records = await look(request, served.list)
    shared = [one.short_name for one in records if one.name != record.name and one.path == record.path]
    return FilesReply(
        model=record.short_name,
        path=str(record.path),
        size_bytes=record.size_bytes,
        stays=bool(shared) or not record.is_owned,
        shared_with=shared,
    )


@router.get("/models/{name:path}/sampling")
async def show_sampling(request: Request, name: str) -> SamplingReply:
    """Return the default sampling for people's answers: what the model recommends, else what people expect."""
    record: ModelRecord = await look(request, parts_of(request).served.find_base, name)
    values = read_params(recommend(record.path), record.parameters)
    numbers = {row.name: values.get(row.name, row.default) for row in PARAMETERS if row.kind in ("int", "float")}
    told = {name: value for name, value in numbers.items() if name != "max_tokens" or name in values}
    return SamplingReply({name: value for name, value in told.items() if value is not None})


@router.post("/pdf", openapi_extra={"requestBody": {"required": True, "content": {"application/pdf": {}}}})
async def read_pdf_text(request: Request) -> PdfReply:
    """Return the text of the PDF in the body, for a message; a page that is a picture has none."""
    work = work_of(request)
    data = await work.bodies.take(request, bytes, is_json=False)
    pages = await until_disconnected(request, work.pdfs.start(lambda _stop: work.documents.read(data, "file")))
    texts = [page.strip() for page in pages if isinstance(page, str)]
    if not any(texts):
        raise InvalidRequest("file", "has no text; its pages are pictures, as those of a scanner")
    return PdfReply(text="\n\n".join(texts), pages=len(pages), pages_without_text=len(pages) - len(texts))


@router.post("/models/import")
async def import_model(request: Request, body: ImportBody) -> ImportReply:
    """Give a model file or folder a name. It stays in its place and is read once; if the client goes, it gets none."""
    parts = parts_of(request)
    path = await look(request, find_importable, parts.settings, body.path)
    task = start_make(request, lambda registry, stop: _import_file(registry, path, body, stop))
    record = await until_disconnected(request, task)
    parts.pool.refresh()
    return ImportReply(name=record.short_name, size_bytes=record.size_bytes)


def _import_file(registry: Registry, path: Path, body: ImportBody, stop: Stop) -> ModelRecord:
    def check(_done_bytes: int, _total_bytes: int) -> None:
        if stop.is_set():
            raise RequestFailed("cancelled", "the client is gone")

    return registry.import_file(path, body.name, progress=check, replaces=body.replace)


class AdapterRow(_Row):
    """An adapter that requests may name. `loaded_in` are the models that have it in memory, each `loaded_bytes`."""

    name: str
    base: str
    size_bytes: int
    rank: int
    weights: int
    loaded_in: list[str]
    loaded_bytes: int
    requests: int
    is_in_use: bool


class AdapterList(_Row):
    """All adapters. `held_bytes` is their memory, including unloaded ones that answers still use."""

    adapters: list[AdapterRow]
    held_bytes: int


class LoadBody(_Row):
    """An adapter's name, its files below a folder for imports or its name in the registry, and its model."""

    name: Words
    path: Words
    base: Words | None = None


class AdapterReply(_Row):
    """The adapter under its name, and the model that it is for."""

    name: str
    base: str


@router.get("/adapters")
async def list_adapters(request: Request) -> AdapterList:
    """Return the adapters that requests may name, and the memory of those that are loaded."""
    parts = parts_of(request)
    records = await look(request, _list, request)
    pool: ModelPool = parts.pool
    loaded = [(model.short_name, model.session.adapters.measure()) for model in pool.running()]
    uses = [(name, use) for name, adapters in loaded for use in adapters.uses]
    rows = [_describe(record, [(name, use) for name, use in uses if use.name == record.name]) for record in records]
    return AdapterList(adapters=rows, held_bytes=sum(adapters.held_bytes for _, adapters in loaded))


@router.post("/adapters")
async def add_adapter(request: Request, body: LoadBody) -> AdapterReply:
    """Read an adapter; requests may name it for as long as the server runs."""
    record = await load_adapter(request, body.name, body.path, body.base)
    return AdapterReply(name=record.name, base=record.base)


@router.delete("/adapters/{name}")
async def remove_adapter(request: Request, name: str) -> AdapterReply:
    """Unload an adapter and wait until no answer uses it. One of the registry may be named again, others may not."""
    record = await forget_adapter(request, name)
    return AdapterReply(name=record.name, base=record.base)


def _list(request: Request) -> tuple[AdapterRecord, ...]:
    adapters = parts_of(request).served.adapters
    adapters.read_settings()
    records: tuple[AdapterRecord, ...] = adapters.list()
    return records


def _describe(record: AdapterRecord, uses: list[tuple[str, AdapterUse]]) -> AdapterRow:
    return AdapterRow(
        name=record.name,
        base=record.base,
        size_bytes=record.size_bytes,
        rank=record.rank,
        weights=record.weights,
        loaded_in=[name for name, _ in uses],
        loaded_bytes=sum(use.size_bytes for _, use in uses),
        requests=sum(use.requests for _, use in uses),
        is_in_use=any(use.is_in_use for _, use in uses),
    )


class ModelRow(_Row):
    """A loaded model; `expires_at` is empty for one that stays.

    `size_bytes` are the weights and the cache in memory now. The cache takes memory as it is used, at most
    `cache_max_bytes`. Weights and cache that a model shares with those in `shared_with` are in memory once.
    """

    name: str
    architecture: str
    quantization: str
    size_bytes: int
    weights_bytes: int
    cache_in_use_bytes: int
    cache_max_bytes: int
    shared_with: list[str]
    context_tokens: int
    expires_at: str | None


class Models(_Row):
    """The reply of `GET /v1/admin/models`: all loaded models."""

    models: list[ModelRow]


class CacheRow(_Row):
    """The cache of one loaded model, as the engine counts it.

    The reply does not wait for a long step: during one, the figures are from before it, `age_s` seconds ago.
    """

    model: str
    age_s: float
    device: str
    isa: str
    threads: int
    weight_bytes: int
    copied_bytes: int
    experts: dict[str, object] | None
    engine: dict[str, object]


class Caches(_Row):
    """The caches of all loaded models."""

    caches: list[CacheRow]


class RequestRow(_Row):
    """A request in flight; `read_tokens` of a prompt are computed, or came from the cache."""

    id: str
    method: str
    path: str
    client: str
    key: str | None
    model: str | None
    seconds: float
    prompt_tokens: int
    read_tokens: int
    generated_tokens: int


class Requests(_Row):
    """All requests in flight, the oldest first."""

    requests: list[RequestRow]


class Done(_Row):
    """A confirmation that the request was carried out."""

    status: str = "ok"


class Info(_Row):
    """Facts about the server and its settings, for the page and other programs.

    `models_memory_bytes` is for all loaded models with their caches. If `context_tokens` is null, each model has its
    own context.
    """

    version: str
    device: str
    dialects: list[str]
    needs_key: bool
    default_model: str
    context_tokens: int | None
    max_sequences: int
    max_waiting: int
    max_body_bytes: int
    keep_alive_s: float
    models_memory_bytes: int
    store_bytes: int
    hub_url: str
    import_folders: list[str]
    tool_origins: list[str]


@router.get("/info")
async def show_info(request: Request) -> Info:
    """Return facts about the server and its settings."""
    parts = parts_of(request)
    settings: Settings = parts.settings
    device = await asyncio.to_thread(find_device, settings)
    return Info(
        version=str(mlxr.__version__),
        device=device,
        dialects=list(parts.dialects),
        needs_key=bool(settings.api_keys or settings.api_keys_file),
        default_model=await look(request, _name_default, parts.served),
        context_tokens=settings.context_tokens,
        max_sequences=size_steps(settings, device).max_sequences,
        max_waiting=settings.max_waiting,
        max_body_bytes=settings.max_body_bytes,
        keep_alive_s=settings.keep_alive_s,
        models_memory_bytes=parts.pool.budget_bytes,
        store_bytes=settings.store_bytes,
        hub_url=settings.hub_url,
        import_folders=list(settings.import_folders),
        tool_origins=list(settings.page_tool_origins),
    )


def _name_default(served: ServedModels) -> str:
    """Return the name of the default model, as lists have it."""
    name = served.find_default()
    try:
        return served.find(name).short_name
    except MlxrError:  # a request to it will tell why
        return name


@router.get("/models")
async def list_models(request: Request) -> Models:
    """Return the models that are loaded."""
    return Models(models=[_describe_model(model) for model in parts_of(request).pool.running()])


@router.delete("/models/{name:path}")
async def unload_model(request: Request, name: str) -> Done:
    """Unload a model once no request uses it; the tag may be left out if it is `latest`."""
    pool = parts_of(request).pool
    names = {spelling.lower(): model.name for model in pool.running() for spelling in (model.name, model.short_name)}
    if name.lower() not in names:
        loaded = ", ".join(model.short_name for model in pool.running()) or "none is"
        raise ServerError(404, "not_found", f"the model {name} is not loaded; loaded: {loaded}", "name")
    await pool.unload(names[name.lower()])
    return Done()


@router.get("/cache")
async def list_caches(request: Request) -> Caches:
    """Return the contents and the counts of the caches."""
    return Caches(caches=[_describe_cache(name, stats) for name, stats in await collect_stats(parts_of(request).pool)])


@router.get("/requests")
async def list_requests(request: Request) -> Requests:
    """Return the requests in flight, this one included."""
    return Requests(requests=[_describe_request(row) for row in parts_of(request).activity])


@router.delete("/requests/{request_id}")
async def cancel_request(request: Request, request_id: str) -> Done:
    """End the answers of a request at the next step."""
    activity = parts_of(request).activity
    row = activity.find(request_id)
    if row is None:
        raise ServerError(404, "not_found", f"there is no request {request_id} in flight", "request_id")
    row.cancel()
    return Done()


@router.post("/requests/{request_id}/end_thinking")
async def end_thinking(request: Request, request_id: str) -> Done:
    """Close the thoughts of a request's answers, so that the model answers now; the id may be that of its reply."""
    parts_of(request).activity.end_thoughts(request_id, in_flight(request).key_id, "request_id")
    return Done()


async def collect_stats(pool: ModelPool) -> list[tuple[str, SessionStats]]:
    """Return name and statistics of every loaded model; one that is just being unloaded is left out.

    Names that share weights and cache come once, under the first in the alphabet, so that sums are right.
    """
    running = [model for model in pool.running() if all(model.name < other for other in model.shared_with)]
    found = await asyncio.gather(*(model.session.stats() for model in running), return_exceptions=True)
    stats: list[tuple[str, SessionStats]] = []
    for model, result in zip(running, found, strict=True):
        if isinstance(result, BaseException):
            if not isinstance(result, EngineStopped):
                raise result
        else:
            stats.append((model.name, result))
    return stats


def _describe_model(model: RunningModel) -> ModelRow:
    cache, weights_bytes = model.session.measure_cache(), model.session.weight_bytes
    return ModelRow(
        name=model.name,
        architecture=model.record.architecture,
        quantization=model.record.quantization,
        size_bytes=weights_bytes + cache.in_use_bytes,
        weights_bytes=weights_bytes,
        cache_in_use_bytes=cache.in_use_bytes,
        cache_max_bytes=cache.max_bytes,
        shared_with=list(model.shared_with),
        context_tokens=model.context_tokens,
        expires_at=None if model.expires_at is None else str(model.expires_at),
    )


def _describe_cache(name: str, stats: SessionStats) -> CacheRow:
    return CacheRow(
        model=name,
        age_s=round(stats.age_s, 3),
        device=stats.device,
        isa=stats.isa,
        threads=stats.threads,
        weight_bytes=stats.weight_bytes,
        copied_bytes=stats.copied_bytes,
        experts=None if stats.routing is None else asdict(stats.routing),
        engine=stats.engine.to_fields(),
    )


def _describe_request(row: InFlight) -> RequestRow:
    return RequestRow(
        id=row.id,
        method=row.method,
        path=row.path,
        client=row.client,
        key=row.key_id,
        model=row.model,
        seconds=monotonic() - row.arrived_s,
        prompt_tokens=row.prompt_tokens,
        read_tokens=row.read_tokens,
        generated_tokens=row.generated_tokens,
    )


def render_own_error(error: ServerError, request_id: str) -> Mapping[str, object]:
    """Return the body of an error outside the dialects."""
    fields = {"code": error.code, "message": error.message, "field": error.field, "request_id": request_id}
    return {"error": {name: value for name, value in {**fields, **error.counts}.items() if value is not None}}


own.include(router)
own.include(live_router)
own.include(mcp_router)
DIALECT = Dialect("own", ("", "/v1/admin"), own, render_own_error)
