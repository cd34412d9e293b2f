"""Routes of our own: health, metrics and the files of the page.

Below `/v1/admin` see `admin`. Errors have one form: `{"error": {"code", "message", "field", "request_id"}}`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlxr.server import admin, live_routes
from mlxr.server.admin import collect_stats
from mlxr.server.errors import ServerError
from mlxr.server.page_files import ASSET_PATH, ASSETS, ROOT_FILES, find_page_file
from mlxr.server.parts import parts_of
from mlxr.server.routes import Dialect, Router

router = Router(tags=["own"])
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _Body(BaseModel):
    model_config = ConfigDict(defer_build=True, extra="forbid", strict=True)


class Health(_Body):
    """Says whether the server is ready; `reason` says why not."""

    status: str
    reason: str | None = None


@router.get("/health/live")
async def live(_: Request) -> Health:
    """Tell whether the process runs."""
    return Health(status="ok")


@router.get("/health", responses={503: {"model": Health}})
@router.get("/health/ready", responses={503: {"model": Health}})
async def ready(request: Request) -> Response:
    """Tell whether requests are answered now; 503 while the first models are loaded and once the server is ending."""
    lifecycle = parts_of(request).lifecycle
    if lifecycle.is_ready:
        return JSONResponse({"status": "ok"})
    reason = "the server is being stopped" if lifecycle.is_draining else lifecycle.problem
    return JSONResponse({"status": "not ready", "reason": reason}, 503)


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """All metrics in the text format that Prometheus reads."""
    parts = parts_of(request)
    stats = await collect_stats(parts.pool)
    stored_bytes = await asyncio.to_thread(parts.registry.store_bytes)
    return Response(parts.metrics.render(len(parts.activity), stored_bytes, stats), media_type=METRICS_TYPE)


async def page_file(request: Request) -> Response:
    """A file that browsers look for beside the page: its icons, what an installed page is, what it needs offline."""
    return await _require_file(request, request.url.path.removeprefix("/"))


for name in ROOT_FILES:
    router.get(f"/{name}", response_class=Response)(page_file)


@router.get(ASSET_PATH, response_class=Response)
async def page_asset(request: Request, name: str) -> Response:
    """A file that the page is made of; its name changes with what is in it."""
    return await _require_file(request, name, ASSETS)


async def _require_file(request: Request, name: str, folder: str = "") -> Response:
    reply = await find_page_file(request, name, folder)
    if reply is None:
        raise ServerError(404, "not_found", f"the page has no file {name[:100]!r}", "name")
    return reply


def render_own_error(error: ServerError, request_id: str) -> Mapping[str, object]:
    """The body of an error outside the dialects."""
    fields = {"code": error.code, "message": error.message, "field": error.field, "request_id": request_id}
    return {"error": {name: value for name, value in {**fields, **error.counts}.items() if value is not None}}


router.include(admin.router)
router.include(live_routes.router)
DIALECT = Dialect("own", ("", "/v1/admin"), router, render_own_error)
