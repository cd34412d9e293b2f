"""Routes for who looks after the models: what one would take in memory, and giving a file on this machine a name.

A request may name a file only below the folders that the owner of the server listed (`import_folders`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, RootModel
from starlette.requests import Request

from mlxr.core.errors import RequestFailed
from mlxr.core.sampling import read_params
from mlxr.core.settings import Settings
from mlxr.core.types import PARAMETERS
from mlxr.core.work_threads import Stop
from mlxr.registry import ModelRecord, Registry
from mlxr.server.errors import ServerError
from mlxr.server.routes import Router
from mlxr.server.streaming import until_disconnected
from mlxr.server.work import look, start_make
from mlxr.service.catalogue import recommend
from mlxr.service.memory_need import find_memory_need

router = Router(prefix="/v1/admin")
MAX_PATH_CHARACTERS = 4096
Words = Annotated[str, Field(min_length=1, max_length=MAX_PATH_CHARACTERS)]


class _Row(BaseModel):
    model_config = ConfigDict(defer_build=True, extra="forbid", strict=True)


class MemoryReply(_Row):
    """What a model takes, or would take if it were loaded now.

    `cache_bytes` are kept for its cache whatever other models want. It takes memory as it is used, now
    `cache_in_use_bytes`, and up to `cache_max_bytes` where there is room. `free_bytes` is what all models may take less
    what pinned ones do and what is in use. `unloads` names the models that would make room; `reason` says why it does
    not fit, and what to do about it.
    """

    model: str
    is_loaded: bool
    weights_bytes: int
    cache_bytes: int
    cache_in_use_bytes: int
    cache_max_bytes: int
    free_bytes: int
    fits: bool
    unloads: list[str]
    reason: str | None


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
    """What a model takes in memory, before it is loaded or as it is."""
    state = request.app.state
    record: ModelRecord = await look(request, state.served.find_base, name)
    need = await find_memory_need(state.pool, record, state.settings)
    return MemoryReply(
        model=record.short_name,
        is_loaded=need.is_loaded,
        weights_bytes=need.weight_bytes,
        cache_bytes=need.cache_bytes,
        cache_in_use_bytes=need.cache_in_use_bytes,
        cache_max_bytes=need.cache_max_bytes,
        free_bytes=need.free_bytes,
        fits=need.reason is None,
        unloads=list(need.leaving),
        reason=need.reason,
    )


@router.get("/models/{name:path}/sampling")
async def show_sampling(request: Request, name: str) -> SamplingReply:
    """How a person's answers are sampled where they do not say: what the model recommends, else what people expect."""
    record: ModelRecord = await look(request, request.app.state.served.find_base, name)
    values = read_params(recommend(record.path), record.parameters)
    numbers = {row.name: values.get(row.name, row.default) for row in PARAMETERS if row.kind in ("int", "float")}
    told = {name: value for name, value in numbers.items() if name != "max_tokens" or name in values}
    return SamplingReply({name: value for name, value in told.items() if value is not None})


@router.post("/models/import")
async def import_model(request: Request, body: ImportBody) -> ImportReply:
    """Give a model file or folder a name. It stays where it is, and is read once; if the client goes, it gets none."""
    state = request.app.state
    path = await look(request, find_importable, state.settings, body.path)
    task = start_make(request, lambda registry, stop: _import_file(registry, path, body, stop))
    record = await until_disconnected(request, task)
    state.pool.refresh()
    return ImportReply(name=record.short_name, size_bytes=record.size_bytes)


def find_importable(settings: Settings, text: str) -> Path:
    """The file or folder that a request may import under that path; raises ServerError for every other one.

    Links are followed first, so none leads out of the folders. What lies outside is refused in the same words whether
    it exists or not.
    """
    folders = [Path(folder).expanduser().resolve() for folder in settings.import_folders]
    if not folders:
        remedy = "start the server with --import-folders FOLDER, or run `mlxr import PATH` on its machine"
        raise ServerError(403, "forbidden", f"no folder to import from is set; {remedy}", "path")
    try:
        # Joining a whole path to a folder gives the path itself.
        inside = [path for folder in folders if (path := (folder / text).resolve()).is_relative_to(folder)]
        found = next((path for path in inside if path.exists()), None)
    except (OSError, RuntimeError, ValueError) as error:  # links in a circle, names too long, null characters
        raise ServerError(400, "invalid_request", "path: is not one that a file can have", "path") from error
    if not inside:
        shown = ", ".join(settings.import_folders)
        raise ServerError(403, "forbidden", f"path: only what lies below {shown} can be imported", "path")
    if found is None:
        raise ServerError(404, "not_found", f"path: there is no file or folder {text[:200]!r}", "path")
    return found


def _import_file(registry: Registry, path: Path, body: ImportBody, stop: Stop) -> ModelRecord:
    def check(_done_bytes: int, _total_bytes: int) -> None:
        if stop.is_set():
            raise RequestFailed("cancelled", "the client is gone")

    return registry.import_file(path, body.name, progress=check, replaces=body.replace)
