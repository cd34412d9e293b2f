"""Routes for who runs the server: what it is, what is loaded, what the caches hold, which requests are in flight."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from time import monotonic
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict
from starlette.requests import Request

import mlxr
from mlxr.core.errors import EngineStopped, MlxrError
from mlxr.core.model_settings import size_steps
from mlxr.core.settings import Settings
from mlxr.server import admin_models
from mlxr.server.activity import InFlight, in_flight
from mlxr.server.errors import ServerError
from mlxr.server.parts import parts_of
from mlxr.server.routes import Router
from mlxr.server.work import look
from mlxr.service.opening import find_device

if TYPE_CHECKING:
    from mlxr.server.model_names import ServedModels
    from mlxr.service.model_pool import ModelPool, RunningModel
    from mlxr.service.stats import SessionStats

router = Router(prefix="/v1/admin", tags=["admin"])
router.include(admin_models.router)


class _Row(BaseModel):
    model_config = ConfigDict(defer_build=True, extra="forbid")


class ModelRow(_Row):
    """A loaded model; `expires_at` is empty for one that stays.

    `size_bytes` are weights and cache as they are in memory now. The cache takes memory as it is used, at most
    `cache_max_bytes`. What a model has together with those in `shared_with` is in memory once.
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
    """The cache of one loaded model, as the engine counts it."""

    model: str
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
    """A request in flight."""

    id: str
    method: str
    path: str
    client: str
    key: str | None
    model: str | None
    seconds: float
    prompt_tokens: int
    generated_tokens: int


class Requests(_Row):
    """All requests in flight, the oldest first."""

    requests: list[RequestRow]


class Done(_Row):
    """Confirms that what was asked for has been done."""

    status: str = "ok"


class Info(_Row):
    """Says what the server is and may do, for the page and others who show it.

    `models_memory_bytes` is for all loaded models with their caches. Where `context_tokens` is null, each model has its
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
    """Return what the server is and may do."""
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
    """The default model by the name that lists have for it."""
    name = served.find_default()
    try:
        return served.find(name).short_name
    except MlxrError:  # whoever asks it hears why
        return name


@router.get("/models")
async def list_models(request: Request) -> Models:
    """Models that are loaded."""
    return Models(models=[_describe_model(model) for model in parts_of(request).pool.running()])


@router.delete("/models/{name:path}")
async def unload_model(request: Request, name: str) -> Done:
    """Let go of a loaded model once nobody uses it; its tag may be left out where it is `latest`."""
    pool = parts_of(request).pool
    names = {spelling.lower(): model.name for model in pool.running() for spelling in (model.name, model.short_name)}
    if name.lower() not in names:
        loaded = ", ".join(model.short_name for model in pool.running()) or "none is"
        raise ServerError(404, "not_found", f"the model {name} is not loaded; loaded: {loaded}", "name")
    await pool.unload(names[name.lower()])
    return Done()


@router.get("/cache")
async def list_caches(request: Request) -> Caches:
    """Return what the caches hold and have done."""
    return Caches(caches=[_describe_cache(name, stats) for name, stats in await collect_stats(parts_of(request).pool)])


@router.get("/requests")
async def list_requests(request: Request) -> Requests:
    """Requests in flight, this one included."""
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
    """Name and numbers of every loaded model; one that is just being unloaded is left out.

    Names that share what is loaded are told once, under the first in the alphabet, so that sums are right.
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
        generated_tokens=row.generated_tokens,
    )
