"""The web application: all dialects around one pool of models.

`create_app` puts the layers together; `serve` in `listen` runs the result. Handlers find `pool`, `registry`,
`served`, `work`, `settings`, `metrics`, `activity`, `lifecycle` and `live` in `request.app.state`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cache, partial
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mlxr.core.settings import Settings
from mlxr.server import anthropic, llamacpp, ollama, openai, own
from mlxr.server.activity import Activity
from mlxr.server.dialect import Dialect
from mlxr.server.errors import to_error
from mlxr.server.guard import Guard, RequestScope, render_error
from mlxr.server.ignored import HEADER as IGNORED
from mlxr.server.lifecycle import Lifecycle
from mlxr.server.live import Hub
from mlxr.server.metrics import Metrics
from mlxr.server.openai.responses import ResponseStore
from mlxr.server.openapi import describe_routes
from mlxr.server.origins import Origins
from mlxr.server.page_files import Page
from mlxr.server.routes import RouteRow, build_route
from mlxr.server.security import Keys
from mlxr.server.work import ServerWork

if TYPE_CHECKING:
    from mlxr.server.served import ServedModels
    from mlxr.service.model_pool import ModelPool

DIALECTS: tuple[Dialect, ...] = (own.DIALECT, openai.DIALECT, anthropic.DIALECT, ollama.DIALECT, llamacpp.DIALECT)


def create_app(pool: ModelPool, served: ServedModels, settings: Settings) -> Starlette:
    """The application; raises SettingError for keys that cannot be read and the like. Its end also ends `pool`."""
    metrics, activity = Metrics(), Activity()
    lifecycle = Lifecycle(pool, metrics, served.explain_default(), settings.pinned_models, served.registry.sweep)

    work = ServerWork(served.registry)
    live = Hub(pool, settings.live_watchers, lambda: lifecycle.is_draining)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        lifecycle.start()
        try:
            yield
        finally:
            await live.stop()
            await lifecycle.stop()
            work.stop()
            served.adapters.stop()

    rows = [row for dialect in DIALECTS for row in dialect.router.rows]
    app = Starlette(routes=[_document_route(rows), *map(build_route, rows)], lifespan=lifespan)
    state = {"pool": pool, "registry": served.registry, "served": served, "settings": settings}
    state |= {"work": work, "responses": ResponseStore(settings.responses_bytes), "page": Page.read(settings)}
    state |= {"dialects": [dialect.name for dialect in DIALECTS]}
    state |= {"metrics": metrics, "activity": activity, "lifecycle": lifecycle, "live": live}
    for name, value in state.items():
        setattr(app.state, name, value)
    _add_layers(app, settings, activity, metrics, lifecycle, live)
    return app


def _document_route(rows: Sequence[RouteRow]) -> Route:
    """GET /openapi.json; the document is made once, when somebody asks."""
    describe = cache(partial(describe_routes, rows))

    async def openapi(_: Request) -> Response:
        return JSONResponse(await asyncio.to_thread(describe))

    return Route("/openapi.json", openapi)


def _add_layers(
    app: Starlette, settings: Settings, activity: Activity, metrics: Metrics, lifecycle: Lifecycle, live: Hub
) -> None:
    """Put the layers around the routes, from the innermost to the outermost."""

    async def answer(request: Request, error: Exception) -> Response:
        return render_error(DIALECTS, request, to_error(error))

    app.add_exception_handler(HTTPException, answer)
    keys = Keys.read(settings)
    app.add_middleware(Guard, settings=settings, keys=keys, dialects=DIALECTS, lifecycle=lifecycle, page=app.state.page)
    app.add_middleware(
        CORSMiddleware,
        allow_origin_regex=Origins.read(settings).pattern,
        allow_methods=["*"],
        allow_headers=["*"],
        allow_private_network=True,
        expose_headers=["x-request-id", IGNORED],
    )
    app.add_middleware(RequestScope, activity=activity, metrics=metrics, live=live)
