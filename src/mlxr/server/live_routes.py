"""Routes for who watches the engine: the stream of what it does, one page in full, what the machine can do."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import fields
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlxr.core.errors import DeviceError
from mlxr.core.stats import MachineLimits
from mlxr.server.activity import in_flight
from mlxr.server.errors import ServerError
from mlxr.server.live import Watcher
from mlxr.server.live_events import LiveEvents, PageDetails, write_limits, write_page
from mlxr.server.parts import parts_of
from mlxr.server.routes import Router
from mlxr.server.streaming import SSE, EventStream, sse
from mlxr.server.work import look

if TYPE_CHECKING:
    from mlxr.service.model_pool import RunningModel

router = Router(prefix="/v1/admin", tags=["admin"])
PATIENCE_S = 10.0  # for a watcher that does not read


class LiveStream(JSONResponse):
    """Stands for the stream in the OpenAPI document: events whose data are JSON."""

    media_type = SSE


def _describe_query(name: str, description: str, **schema: object) -> dict[str, object]:
    return {"name": name, "in": "query", "description": description, "schema": schema}


MODEL = _describe_query("model", "Name or alias of a model; without it, the one that was used last.", type="string")
GROUP = _describe_query("group", "Number of the group of layers.", type="integer", default=0)


@router.get(
    "/live",
    response_class=LiveStream,
    response_model=LiveEvents,
    openapi_extra={"parameters": [MODEL]},
)
async def watch(request: Request) -> Response:
    """Stream what an engine does; docs/page-live.md describes the events.

    `model` chooses one of several models; without it, the one that was used last is watched.
    """
    name = request.query_params.get("model")
    if name is not None:
        record = await look(request, parts_of(request).served.find, name)
        name = record.name
    hub = parts_of(request).live
    watcher, row = hub.enter(name), in_flight(request)
    row.stack.callback(hub.leave, watcher)
    row.cancels.append(watcher.close)
    return EventStream(request, _write_frames(watcher), media_type=SSE, on_error=_error_frame, patience_s=PATIENCE_S)


@router.get("/pages/{page}", response_model=PageDetails, openapi_extra={"parameters": [MODEL, GROUP]})
async def describe_page(request: Request, page: str) -> Response:
    """Tell about one page of a model's cache: who holds it, where it stands in their texts, how old it is."""
    model = await _find_model(request)
    group = request.query_params.get("group", "0")
    group_number, number = map(_read_number, (group, page))
    record = await model.session.describe_page(group_number, number)
    if record is None:
        raise ServerError(
            404, "not_found", f"{model.short_name} has no page {page[:20]!r} in group {group[:20]!r}", "page"
        )
    details = PageDetails(
        **{row.name: getattr(record, row.name) for row in fields(record)},
        model=model.name,
        group=group_number,
        page=number,
    )
    return Response(write_page(details), media_type="application/json")


@router.post("/probe", response_model=MachineLimits, openapi_extra={"parameters": [MODEL]})
async def measure(request: Request) -> Response:
    """Measure what the machine can do with the threads of a model, and keep it; answers pause for about a second."""
    model = await _find_model(request)
    try:
        limits = await model.session.measure_limits()
    except DeviceError as error:
        raise ServerError(409, "unavailable", str(error), "model") from error
    parts_of(request).live.note_limits(model.session, limits)
    return Response(write_limits(limits), media_type="application/json")


def _read_number(text: str) -> int:
    """A number of a group or page; -1, which none has, for anything else."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1


async def _find_model(request: Request) -> RunningModel:
    """The model that the request names, or the one used last; ServerError if it is not loaded."""
    pool = parts_of(request).pool
    name, running = request.query_params.get("model"), pool.running()
    if name is not None:
        record = await look(request, parts_of(request).served.find, name)
        running = [model for model in running if model.name == record.name]
    if not running:
        raise ServerError(404, "not_found", f"{'no model' if name is None else name[:100]} is loaded", "model")
    return running[0]


async def _write_frames(watcher: Watcher) -> AsyncGenerator[bytes, None]:
    while (frames := await watcher.take()) is not None:
        yield frames


def _error_frame(error: ServerError) -> bytes:
    return sse({"error": {"code": error.code, "message": error.message}}, "error")
