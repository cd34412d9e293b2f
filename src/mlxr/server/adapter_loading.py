"""Giving adapters to a running server, and taking them back: what the routes of all dialects for that do.

A request may name a path only where models may be imported from too (`import_folders`), or an adapter of the registry.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from functools import partial
from pathlib import Path

from starlette.requests import Request

from mlxr.core.errors import FormatError, InvalidRequest, ModelError, NotFound
from mlxr.registry import AdapterRecord
from mlxr.server.admin_models import find_importable
from mlxr.server.errors import ServerError
from mlxr.server.generation import borrow
from mlxr.server.served import ServedModels
from mlxr.server.streaming import until_disconnected
from mlxr.server.work import look, start_make


async def load_adapter(
    request: Request, name: str, path: str, base: str | None, *, replaces: bool = False
) -> AdapterRecord:
    """Read the adapter at `path` for its base, which is loaded first if need be, and let requests name it.

    What it would replace stays where this fails.
    Raises ServerError or InvalidRequest for a path that may not be named, a bad name, and files that do not fit.
    """
    served: ServedModels = request.app.state.served
    try:
        place = await look(request, _find_path, request, path)
        describe = partial(served.adapters.describe, name, place, base, replaces=replaces)
        record = await start_make(request, lambda _registry, _stop: describe())
    except (FormatError, ModelError) as error:
        raise ServerError(400, "model_unusable", str(error), "path") from error
    lease = await borrow(request, record.base, exact=True)
    await until_disconnected(request, lease.session.adapters.bring(record))
    await look(request, partial(served.adapters.give, record, replaces=replaces))
    return record


async def forget_adapter(request: Request, name: str) -> AdapterRecord:
    """Let requests name an adapter no longer, unless the registry has it; wait until no answer has it any more.

    Raises NotFound for an unknown name.
    """
    state = request.app.state
    try:
        record: AdapterRecord = await look(request, state.served.adapters.take_back, name)
    except NotFound as error:
        raise ServerError(404, "not_found", str(error), "name") from error
    waits = [model.session.adapters.unload_and_wait(record.name) for model in state.pool.running()]
    await until_disconnected(request, _wait_for_all(waits))
    return record


async def _wait_for_all(waits: Sequence[Awaitable[None]]) -> None:
    await asyncio.gather(*waits)


def _find_path(request: Request, text: str) -> Path:
    """The files that a request may mean: those of an adapter of the registry, or below the folders for imports."""
    state = request.app.state
    try:
        registered: AdapterRecord = state.registry.adapters.get(text)
    except (NotFound, InvalidRequest):
        return find_importable(state.settings, text)
    return registered.path
