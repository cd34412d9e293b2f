"""Routes of llama.cpp's server that need what does not exist here: refused with its status 501 and the reason."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from mlxr.server.errors import ServerError
from mlxr.server.llamacpp.errors import ERRORS
from mlxr.server.routes import Router

router = Router()


@router.post("/rerank", responses=ERRORS)
@router.post("/reranking", responses=ERRORS)
@router.post("/v1/rerank", responses=ERRORS)
@router.post("/v1/reranking", responses=ERRORS)
async def rerank(_: Request) -> Response:
    """Reranking is not supported: no architecture here has a head for it."""
    raise ServerError(501, "not_supported", "reranking is not supported: no model that can be loaded here reranks")


@router.post("/slots/{id_slot}", responses=ERRORS)
async def change_slot(_: Request, id_slot: str) -> Response:
    """Slots cannot be saved, restored or erased: cached pages belong to no slot."""
    del id_slot
    message = "slots cannot be saved, restored or erased: all requests share one cache; see the setting store_bytes"
    raise ServerError(501, "not_supported", message)


@router.post("/props", responses=ERRORS)
async def change_properties(_: Request) -> Response:
    """Properties cannot be changed while the server runs."""
    raise ServerError(501, "not_supported", "properties cannot be changed here; flags and settings do that")
