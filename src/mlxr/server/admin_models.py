"""Routes for who looks after models and adapters: what a model takes, imports, adapters that come and go."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field, RootModel
from starlette.requests import Request

from mlxr.core.errors import InvalidRequest, RequestFailed
from mlxr.core.sampling import read_params
from mlxr.core.types import PARAMETERS
from mlxr.core.work_threads import Stop
from mlxr.registry import AdapterRecord, ModelRecord, Registry
from mlxr.server.model_names import find_importable, forget_adapter, load_adapter
from mlxr.server.parts import parts_of
from mlxr.server.routes import Router
from mlxr.server.streaming import until_disconnected
from mlxr.server.work import look, start_make
from mlxr.service.catalogue import recommend
from mlxr.service.memory_need import find_conversation_need, find_memory_need

if TYPE_CHECKING:
    from mlxr.service.adapters import AdapterUse
    from mlxr.service.model_pool import ModelPool


router = Router(prefix="/v1/admin")
MAX_PATH_CHARACTERS = 4096
Words = Annotated[str, Field(min_length=1, max_length=MAX_PATH_CHARACTERS)]


class _Row(BaseModel):
    model_config = ConfigDict(defer_build=True, extra="forbid", strict=True)


class MemoryReply(_Row):
    """Says what a model takes, or would take if it were loaded now.

    `cache_bytes` are kept for its cache whatever other models want. It takes memory as it is used, now
    `cache_in_use_bytes`, and up to `cache_max_bytes` where there is room. `free_bytes` is what all models may take less
    what pinned ones do and what is in use. `unloads` names the models that would make room; `reason` says why it does
    not fit, and what to do about it. A conversation of `conversation_tokens` tokens, those of the query `tokens` or a
    whole context, fills `conversation_bytes` of the cache.
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


class FilesReply(_Row):
    """Where the files of a model lie. `stays` says that they are not deleted with its name.

    They stay where they lie outside the models folder, or where the models in `shared_with` have the same ones.
    """

    model: str
    path: str
    size_bytes: int
    stays: bool
    shared_with: list[str]


class SamplingReply(RootModel[dict[str, int | float]]):
    """Values of the sampling parameters that are numbers, by name."""


class ImportBody(_Row):
    """The path of a model file or folder, whole or below one of the folders for imports, and what to call it.

    A name that another model has is refused, unless `replace` is true.
    """

    path: Words
    name: Words | None = None
    replace: bool = False


class ImportReply(_Row):
    """The model as it is called now."""

    name: str
    size_bytes: int


@router.get("/models/{name:path}/memory")
async def show_memory(request: Request, name: str) -> MemoryReply:
    """Return what a model takes in memory, before it is loaded or as it is."""
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
    """Return how a person's answers are sampled where they do not say: the model's advice, else what people expect."""
    record: ModelRecord = await look(request, parts_of(request).served.find_base, name)
    values = read_params(recommend(record.path), record.parameters)
    numbers = {row.name: values.get(row.name, row.default) for row in PARAMETERS if row.kind in ("int", "float")}
    told = {name: value for name, value in numbers.items() if name != "max_tokens" or name in values}
    return SamplingReply({name: value for name, value in told.items() if value is not None})


@router.post("/models/import")
async def import_model(request: Request, body: ImportBody) -> ImportReply:
    """Give a model file or folder a name. It stays where it is, and is read once; if the client goes, it gets none."""
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
    """All adapters. `held_bytes` is what they take in memory, with those that only answers have still."""

    adapters: list[AdapterRow]
    held_bytes: int


class LoadBody(_Row):
    """An adapter's name, its files below a folder for imports or its name in the registry, and its model."""

    name: Words
    path: Words
    base: Words | None = None


class AdapterReply(_Row):
    """The adapter as it is called now, and the model that it is for."""

    name: str
    base: str


@router.get("/adapters")
async def list_adapters(request: Request) -> AdapterList:
    """The adapters that requests may name, and what those in memory take."""
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
    """Unload an adapter and wait until no answer has it. One of the registry may be named again, others may not."""
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
