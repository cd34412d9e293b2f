"""The web application: all dialects around one pool of models.

`create_app` puts the layers together; `serve` in `listen` runs the result. Handlers find everything else in the
`ServerParts`. `/openapi.json` is FastAPI's document, with our errors in place of its own and the key that requests
bring; FastAPI only describes the routes here, so it is imported when the document is made.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from difflib import get_close_matches
from functools import cache, partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from pydantic.warnings import UnsupportedFieldAttributeWarning
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import mlxr
from mlxr.core.settings import Settings
from mlxr.server import admin, anthropic, llamacpp, ollama, openai
from mlxr.server.access import OPEN_PATHS, Keys, Origins
from mlxr.server.activity import Activity
from mlxr.server.errors import ServerError, to_error
from mlxr.server.guard import Guard, RequestScope, render_error
from mlxr.server.live import Hub
from mlxr.server.mcp import ToolServers
from mlxr.server.metrics import Metrics
from mlxr.server.openai.responses import ResponseStore
from mlxr.server.page_files import ASSET_PATH, ROOT_PATHS, Page
from mlxr.server.parts import Lifecycle, ServerParts
from mlxr.server.routes import IGNORED, Dialect, RouteRow, build_route
from mlxr.server.work import ServerWork

if TYPE_CHECKING:
    from mlxr.server.model_names import ServedModels
    from mlxr.service.model_pool import ModelPool


TITLE = "mlxr"
SUMMARY = "Local language models for OpenAI, Anthropic and Ollama clients"
ERROR = {
    "description": "An error in the form of the dialect",
    "content": {"application/json": {"schema": {"type": "object"}}},
}
KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
DIALECTS: tuple[Dialect, ...] = (admin.DIALECT, openai.DIALECT, anthropic.DIALECT, ollama.DIALECT, llamacpp.DIALECT)


def create_app(pool: ModelPool, served: ServedModels, settings: Settings) -> Starlette:
    """Make the application; raises SettingError, as for keys that cannot be read. Its end also ends `pool`."""
    metrics, activity = Metrics(), Activity()
    lifecycle = Lifecycle(pool, metrics, served.explain_default(), settings.pinned_models, served.registry.sweep)

    work = ServerWork(served.registry)
    tool_servers = ToolServers(settings)
    responses = ResponseStore(settings.responses_bytes, settings.responses_file)
    live = Hub(pool, settings.live_watchers, lambda: lifecycle.is_draining)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        lifecycle.start()
        try:
            yield
        finally:
            await live.stop()
            await tool_servers.stop()
            await lifecycle.stop()
            await responses.stop()
            work.stop()
            served.adapters.stop()

    rows = [row for dialect in DIALECTS for row in dialect.router.rows]
    app = Starlette(routes=[_document_route(rows), *map(build_route, rows)], lifespan=lifespan)
    app.state.parts = ServerParts(
        settings=settings,
        pool=pool,
        served=served,
        registry=served.registry,
        work=work,
        activity=activity,
        lifecycle=lifecycle,
        metrics=metrics,
        live=live,
        responses=responses,
        tool_servers=tool_servers,
        page=Page.read(settings),
        dialects=tuple(dialect.name for dialect in DIALECTS),
    )
    _add_layers(app, app.state.parts)
    return app


def _document_route(rows: Sequence[RouteRow]) -> Route:
    """Return the route GET /openapi.json; the document is made once, at the first request."""
    describe = cache(partial(describe_routes, rows))

    async def openapi(_: Request) -> Response:
        return JSONResponse(await asyncio.to_thread(describe))

    return Route("/openapi.json", openapi)


def _add_layers(app: Starlette, parts: ServerParts) -> None:
    """Put the layers around the routes, from the innermost to the outermost."""

    async def answer(request: Request, error: Exception) -> Response:
        failure = to_error(error)
        if failure.status == HTTPStatus.NOT_FOUND and "endpoint" not in request.scope:
            failure = _explain_unknown(request.url.path)
        return render_error(DIALECTS, request, failure)

    settings = parts.settings
    app.add_exception_handler(HTTPException, answer)
    app.add_middleware(Guard, parts=parts, keys=Keys.read(settings), dialects=DIALECTS)
    app.add_middleware(
        CORSMiddleware,
        allow_origin_regex=Origins.read(settings).pattern,
        allow_methods=["*"],
        allow_headers=["*"],
        allow_private_network=True,
        expose_headers=["x-request-id", IGNORED],
    )
    app.add_middleware(RequestScope, parts=parts)


def _explain_unknown(path: str) -> ServerError:
    """Return the error for a path that no route has, with paths that are spelt like it."""
    paths = {row.path for dialect in DIALECTS for row in dialect.router.rows if "{" not in row.path}
    near = get_close_matches(path.rstrip("/")[:100], sorted(paths), n=3, cutoff=0.75)
    hint = f"near it: {', '.join(near)}" if near else "GET /openapi.json lists all"
    return ServerError(404, "not_found", f"there is no route {path[:100]}; {hint}")


def describe_routes(rows: Sequence[RouteRow]) -> dict[str, Any]:
    """Make the OpenAPI document; takes some tenths of a second."""
    from fastapi import APIRouter
    from fastapi.openapi.utils import get_openapi

    router = APIRouter()
    for row in rows:
        if row.method != "HEAD":
            router.add_api_route(row.path, row.handler, methods=[row.method], tags=[*row.tags], **row.description)
    with warnings.catch_warnings():  # FastAPI does the same, but too early for models that are built when first used
        warnings.simplefilter("ignore", UnsupportedFieldAttributeWarning)
        schema = get_openapi(title=TITLE, version=str(mlxr.__version__), summary=SUMMARY, routes=router.routes)
    for path, operation in _operations(schema):
        operation["responses"].pop("422", None)  # bodies that do not fit are answered with 400, see `errors`
        operation["responses"]["default"] = ERROR
        if path not in OPEN_PATHS | ROOT_PATHS | {ASSET_PATH}:
            operation["security"] = [{"bearer": []}, {"header": []}, {}]
    components = schema.setdefault("components", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        components.get("schemas", {}).pop(unused, None)
    components["securitySchemes"] = KEYS
    return schema


def _operations(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, item in schema["paths"].items():
        for operation in item.values():
            yield path, operation
