"""Routes for who looks after adapters: which there are, what they take, giving one to the server, taking it back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request

from mlxr.registry import AdapterRecord
from mlxr.server.adapter_loading import forget_adapter, load_adapter
from mlxr.server.admin_models import MAX_PATH_CHARACTERS
from mlxr.server.routes import Router
from mlxr.server.work import look

if TYPE_CHECKING:
    from mlxr.service.adapters import AdapterUse
    from mlxr.service.model_pool import ModelPool

router = Router(prefix="/v1/admin")
Words = Annotated[str, Field(min_length=1, max_length=MAX_PATH_CHARACTERS)]


class _Row(BaseModel):
    model_config = ConfigDict(defer_build=True, extra="forbid", strict=True)


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
    state = request.app.state
    records = await look(request, _list, request)
    pool: ModelPool = state.pool
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
    adapters = request.app.state.served.adapters
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
