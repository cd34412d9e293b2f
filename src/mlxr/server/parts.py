"""The parts of a server in one typed object, and its lifecycle: loading, ready, draining, and the lag of its loop.

Routes and layers find the parts in the application that serves a request. `serve` tells the `Lifecycle` when to begin
to drain; routes ask it whether the server is ready. It loads the models that are needed from the start.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from time import monotonic
from typing import TYPE_CHECKING

from starlette.requests import HTTPConnection

from mlxr.core.errors import MlxrError
from mlxr.core.frozen import frozen
from mlxr.core.memory import return_free_memory

if TYPE_CHECKING:
    from mlxr.core.settings import Settings
    from mlxr.registry import Registry
    from mlxr.server.activity import Activity
    from mlxr.server.live import Hub
    from mlxr.server.mcp import ToolServers
    from mlxr.server.metrics import Metrics
    from mlxr.server.model_names import ServedModels
    from mlxr.server.openai.responses import ResponseStore
    from mlxr.server.page_files import Page
    from mlxr.server.work import ServerWork
    from mlxr.service.catalogue import DefaultModel
    from mlxr.service.model_pool import ModelPool


logger = logging.getLogger(__name__)
LAG_INTERVAL_S = 0.05
RETURN_INTERVAL_S = 2.0  # between checks for memory that can be given back


class Lifecycle:
    """The phase that the server is in. Belongs to one event loop from `start` on.

    The default model and the `pinned` ones are loaded first. A default model that no setting names may fail to load.
    `sweep` removes leftovers of earlier runs from the registry; it runs once, when the models are loaded.
    """

    def __init__(
        self, pool: ModelPool, metrics: Metrics, default: DefaultModel, pinned: Sequence[str], sweep: Callable[[], None]
    ) -> None:
        self._pool, self._metrics, self._sweep = pool, metrics, sweep
        self._default, self._first_models = default, tuple(dict.fromkeys([default.name, *pinned]))
        self._tasks: list[asyncio.Task[None]] = []
        self.loaded = asyncio.Event()
        self.is_draining = False
        self.had_large_body = False  # since memory was given back last
        self.problem: str | None = "models are being loaded"

    @property
    def is_ready(self) -> bool:
        """True if requests are answered at once: the first models are loaded and the server is not ending."""
        return self.problem is None and not self.is_draining

    def start(self) -> None:
        """Begin to load the first models and to watch the event loop."""
        work = (self._load(), self._watch_lag(), self._return_memory())
        self._tasks = [asyncio.create_task(part) for part in work]

    def begin_drain(self) -> None:
        """Refuse new requests; those in flight go on."""
        self.is_draining = True

    async def stop(self) -> None:
        """End the tasks and all models."""
        self.begin_drain()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._pool.stop(0.0)

    async def _load(self) -> None:
        try:
            for name in self._first_models:
                await self._load_first(name)
            self.problem = None
        except MlxrError as error:
            self.problem = str(error)
            logger.error("a model that should be there from the start cannot be loaded: %s", error)
        except Exception as error:
            self.problem = f"{type(error).__name__}: {error}"
            logger.exception("a model that should be there from the start cannot be loaded")
        finally:
            self.loaded.set()
        try:
            await asyncio.to_thread(self._sweep)
        except (MlxrError, OSError) as error:  # such as a folder that may only be read
            logger.warning("leftovers in the registry cannot be removed: %s", error)
        except Exception:
            logger.exception("leftovers in the registry cannot be removed")

    async def _load_first(self, name: str) -> None:
        try:
            async with await self._pool.acquire(name):
                pass
        except MlxrError as error:
            if name != self._default.name or self._default.is_set or not self._default.is_own:
                raise
            logger.warning("the default model cannot be loaded, --default-model names another one: %s", error)

    async def _return_memory(self) -> None:
        """Give back memory that the C library keeps after parsing large bodies."""
        while True:
            await asyncio.sleep(RETURN_INTERVAL_S)
            if self.had_large_body:
                self.had_large_body = False
                await asyncio.to_thread(return_free_memory)

    async def _watch_lag(self) -> None:
        """Measure the delay with which the event loop wakes a task."""
        while True:
            before_s = monotonic()
            await asyncio.sleep(LAG_INTERVAL_S)
            self._metrics.loop_lag.observe(max(0.0, monotonic() - before_s - LAG_INTERVAL_S))


@frozen
class ServerParts:
    """The parts of a server, in `app.state.parts`; see `create_app`."""

    settings: Settings
    pool: ModelPool  # the models that are loaded
    served: ServedModels  # the models that requests may name
    registry: Registry  # the models on disk
    work: ServerWork  # threads for work that may take long
    activity: Activity  # the requests in flight
    lifecycle: Lifecycle
    metrics: Metrics
    live: Hub  # the watchers of engines
    responses: ResponseStore  # responses that /v1/responses keeps
    tool_servers: ToolServers  # MCP servers that are allowed
    page: Page | None  # None if the page is switched off
    dialects: tuple[str, ...]  # their names


def parts_of(connection: HTTPConnection) -> ServerParts:
    """Return the parts of the server that a request came to."""
    parts = connection.app.state.parts
    assert isinstance(parts, ServerParts)
    return parts
