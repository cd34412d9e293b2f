"""GET and POST /lora-adapters: the low-rank adapters of a model by id, and those that requests have that name none."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, RootModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlxr.registry import AdapterRecord
from mlxr.server.llamacpp.errors import ERRORS
from mlxr.server.openai.fields import AdapterShare
from mlxr.server.routes import Router
from mlxr.server.served import ServedModels
from mlxr.server.work import look

MAX_SHARES = 64
router = Router()


class AdapterShares(RootModel[Annotated[list[AdapterShare], Field(max_length=MAX_SHARES)]]):
    """Adapters by id, and what their updates are multiplied by; those that are not listed have 0."""


@router.get("/lora-adapters", responses=ERRORS)
async def list_adapters(request: Request) -> Response:
    """The adapters of the model `?model=` (absent: the default one). An id is a place in this list."""
    base, records = await look(request, _list, request)
    scales = request.app.state.served.adapters.read_scales(base)
    return JSONResponse(
        [
            {
                "id": index,
                "path": record.name,
                "scale": scales.get(record.name, 0.0),
                "task_name": record.name,
                "prompt_prefix": "",
            }
            for index, record in enumerate(records)
        ]
    )


@router.post("/lora-adapters", responses=ERRORS)
async def set_adapters(request: Request, body: AdapterShares) -> Response:
    """Set which adapters requests to the model `?model=` have that name none."""
    base, records = await look(request, _list, request)
    factors = {share.id: share.scale for share in body.root}
    scales = {record.name: factors.get(index, 0.0) for index, record in enumerate(records)}
    request.app.state.served.adapters.set_scales(base, scales)
    return JSONResponse({"success": True})


def _list(request: Request) -> tuple[str, tuple[AdapterRecord, ...]]:
    """The base that is meant, and its adapters."""
    served: ServedModels = request.app.state.served
    model = request.query_params.get("model") or served.find_default()
    base = served.find(model).short_name
    return base, served.adapters.list_for(base)
