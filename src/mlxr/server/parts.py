"""The parts of a server, in one typed object: what routes and layers find in the application that serves a request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.requests import HTTPConnection

if TYPE_CHECKING:
    from mlxr.core.settings import Settings
    from mlxr.registry import Registry
    from mlxr.server.activity import Activity
    from mlxr.server.lifecycle import Lifecycle
    from mlxr.server.live import Hub
    from mlxr.server.metrics import Metrics
    from mlxr.server.model_names import ServedModels
    from mlxr.server.openai.responses import ResponseStore
    from mlxr.server.page_files import Page
    from mlxr.server.work import ServerWork
    from mlxr.service.model_pool import ModelPool


@dataclass(frozen=True, slots=True)
class ServerParts:
    """Holds what a server consists of. `app.state.parts` holds it; see `create_app`."""

    settings: Settings
    pool: ModelPool  # the models that are loaded
    served: ServedModels  # the models that requests may name
    registry: Registry  # the models on disk
    work: ServerWork  # threads for what may take long
    activity: Activity  # the requests in flight
    lifecycle: Lifecycle
    metrics: Metrics
    live: Hub  # who watches which engine
    responses: ResponseStore  # what /v1/responses keeps
    page: Page | None  # None where the page is switched off
    dialects: tuple[str, ...]  # their names


def parts_of(connection: HTTPConnection) -> ServerParts:
    """Return the parts of the server that a request came to."""
    parts = connection.app.state.parts
    assert isinstance(parts, ServerParts)
    return parts
