"""The web application: all dialects around one pool of models.

`create_app` puts the layers together; `serve` in `listen` runs the result. Handlers find `pool`, `registry`,
`settings`, `metrics`, `activity` and `lifecycle` in `request.app.state`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

import mlxr
from mlxr.core.settings import Settings
from mlxr.server import anthropic, ollama, openai, own
from mlxr.server.activity import Activity
from mlxr.server.dialect import Dialect
from mlxr.server.errors import to_error
from mlxr.server.guard import Guard, RequestScope, render_error
from mlxr.server.lifecycle import Lifecycle
from mlxr.server.metrics import Metrics
from mlxr.server.openapi import describe_app
from mlxr.server.security import Keys

if TYPE_CHECKING:
    from mlxr.registry import Registry
    from mlxr.service.model_pool import ModelPool

DIALECTS: tuple[Dialect, ...] = (own.DIALECT, openai.DIALECT, anthropic.DIALECT, ollama.DIALECT)


def create_app(pool: ModelPool, registry: Registry, settings: Settings) -> FastAPI:
    """The application; raises SettingError for keys that cannot be read. Its end also ends `pool`."""
    metrics, activity = Metrics(), Activity()
    lifecycle = Lifecycle(pool, metrics, [settings.default_model, *settings.pinned_models], registry.sweep)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        lifecycle.start()
        try:
            yield
        finally:
            await lifecycle.stop()

    app = FastAPI(
        title="mlxr",
        version=str(mlxr.__version__),
        summary="Local language models for OpenAI, Anthropic and Ollama clients",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
    )
    state = {"pool": pool, "registry": registry, "settings": settings}
    state |= {"metrics": metrics, "activity": activity, "lifecycle": lifecycle}
    for name, value in state.items():
        setattr(app.state, name, value)
    for dialect in DIALECTS:
        app.include_router(dialect.router)
    app.openapi = lambda: describe_app(app)  # type: ignore[method-assign]
    _add_layers(app, settings, activity, metrics, lifecycle)
    return app


def _add_layers(app: FastAPI, settings: Settings, activity: Activity, metrics: Metrics, lifecycle: Lifecycle) -> None:
    """From the inside outwards."""

    async def answer(request: Request, error: Exception) -> Response:
        return render_error(DIALECTS, request, to_error(error))

    app.add_exception_handler(HTTPException, answer)
    app.add_exception_handler(RequestValidationError, answer)
    keys = Keys.read(settings)
    app.add_middleware(Guard, settings=settings, keys=keys, dialects=DIALECTS, lifecycle=lifecycle)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    app.add_middleware(RequestScope, activity=activity, metrics=metrics)
