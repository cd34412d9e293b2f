"""GET /v1/models and /v1/models/{id}.

Anthropic's clients ask under the same paths, and their model objects have no field in common with OpenAI's but `id`,
so each entry is both.
"""

from __future__ import annotations

import asyncio
import contextlib
from datetime import UTC
from typing import Literal

from starlette.requests import Request
from starlette.responses import Response

from mlxr.core.errors import MlxrError
from mlxr.registry.record import ModelRecord
from mlxr.server.json_models import ReplyModel
from mlxr.server.openai.route import ERRORS
from mlxr.server.routes import Router, reply_json
from mlxr.server.served import ServedModels

router = Router()


class ModelReply(ReplyModel):
    """A model. From `type` on the fields are those of Anthropic's dialect."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "mlxr"
    type: Literal["model"] = "model"
    display_name: str
    created_at: str


class ModelList(ReplyModel):
    """All models. From `has_more` on the fields are those of Anthropic's dialect."""

    object: Literal["list"] = "list"
    data: list[ModelReply]
    has_more: Literal[False] = False
    first_id: str | None
    last_id: str | None


@router.get("/v1/models", response_model=ModelList, responses=ERRORS)
async def list_models(request: Request) -> Response:
    """The models that requests can name, then their aliases."""
    models = await asyncio.to_thread(_describe_all, request.app.state.served)
    ids = [model.id for model in models]
    return reply_json(ModelList(data=models, first_id=ids[0] if ids else None, last_id=ids[-1] if ids else None))


@router.get("/v1/models/{model:path}", response_model=ModelReply, responses=ERRORS)
async def get_model(request: Request, model: str) -> Response:
    """One model by name or alias."""
    return reply_json(describe_model(await asyncio.to_thread(request.app.state.served.find, model), model))


def _describe_all(served: ServedModels) -> list[ModelReply]:
    models = [describe_model(record) for record in served.list() if record.problem is None]
    for alias in served.aliases:
        with contextlib.suppress(MlxrError):  # its model is not there
            if "*" not in alias:
                models.append(describe_model(served.find(alias), alias))
    return models


def describe_model(record: ModelRecord, name: str | None = None) -> ModelReply:
    """A model of the registry, under `name` where that is an alias."""
    changed = record.modified_at.astimezone(UTC)
    return ModelReply(
        id=name or record.short_name,
        created=int(changed.timestamp()),
        display_name=record.short_name,
        created_at=changed.isoformat(timespec="seconds").replace("+00:00", "Z"),
    )
