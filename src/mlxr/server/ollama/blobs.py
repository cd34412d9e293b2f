"""Files uploaded for /api/create: HEAD and POST /api/blobs/{digest}."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from mlxr.registry import Registry
from mlxr.server.errors import ClientGone, ServerError
from mlxr.server.ollama.route import ERRORS
from mlxr.server.routes import Router
from mlxr.server.work import look, work_of

WRITE_BYTES = 1 << 20
router = Router()


@router.head("/api/blobs/{digest}")
async def has_blob(request: Request, digest: str) -> Response:
    """200 if the blob is here, 404 if it is not."""
    is_here = await look(request, request.app.state.registry.blobs.has, digest)
    return Response(status_code=200 if is_here else 404)


@router.post("/api/blobs/{digest}", status_code=201, responses=ERRORS)
async def store_blob(request: Request, digest: str) -> Response:
    """Store the body, whose digest must be that of the path."""
    registry: Registry = request.app.state.registry
    threads = work_of(request).uploads
    incoming = await threads.run(registry.blobs.receive, digest)
    with incoming:
        _check_room(registry, request.headers.get("content-length", ""))
        try:
            async for chunk in _gather(request.stream()):
                await threads.run(incoming.write, chunk)
        except ClientDisconnect as error:
            raise ClientGone from error
        await threads.run(incoming.commit)
    return Response(status_code=201)


async def _gather(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The same bytes in larger pieces, each of which is worth a thread."""
    held = bytearray()
    async for chunk in chunks:
        held += chunk
        if len(held) >= WRITE_BYTES:
            yield bytes(held)
            held.clear()
    if held:
        yield bytes(held)


def _check_room(registry: Registry, length: str) -> None:
    free_bytes = shutil.disk_usage(registry.blobs.folder).free
    if length.isascii() and length.isdigit() and int(length[:20]) > free_bytes:
        raise ServerError(413, "too_large", f"the file takes {length[:20]} bytes, {free_bytes} are free")
