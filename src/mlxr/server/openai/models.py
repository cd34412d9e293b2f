"""GET /v1/models and /v1/models/{id}, and vLLM's routes that load and unload low-rank adapters.

Anthropic's clients ask for models under the same paths, and their model objects have no field in common with OpenAI's
but `id`, so each entry is both. The path of an adapter is one that may be imported (`import_folders`), or the name of
an adapter of the registry; shapes: https://docs.vllm.ai/en/latest/features/lora/
"""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime
from typing import Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from mlxr.core.errors import MlxrError
from mlxr.registry.record import AdapterRecord, ModelRecord
from mlxr.server.model_names import ServedModels, forget_adapter, load_adapter
from mlxr.server.openai.replies import ERRORS
from mlxr.server.parts import parts_of
from mlxr.server.routes import ReplyModel, RequestModel, Router, Text, describe_stream, reply_json
from mlxr.server.work import look

router = Router()
VLLM = "vLLM"


class ModelReply(ReplyModel):
    """A model, or an adapter with the model that it is for as `parent` and its own name as `root`, as in vLLM's server.

    From `type` on the fields are those of Anthropic's dialect.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "mlxr"
    root: str
    parent: str | None = None
    type: Literal["model"] = "model"
    display_name: str
    created_at: str
    capabilities: list[str] | None = None


class ModelList(ReplyModel):
    """All models. From `has_more` on the fields are those of Anthropic's dialect."""

    object: Literal["list"] = "list"
    data: list[ModelReply]
    has_more: Literal[False] = False
    first_id: str | None
    last_id: str | None


@router.get("/v1/models", response_model=ModelList, responses=ERRORS)
async def list_models(request: Request) -> Response:
    """Return the models that requests can name, then their aliases."""
    models = await look(request, _describe_all, parts_of(request).served)
    ids = [model.id for model in models]
    return reply_json(ModelList(data=models, first_id=ids[0] if ids else None, last_id=ids[-1] if ids else None))


@router.get("/v1/models/{model:path}", response_model=ModelReply, responses=ERRORS)
async def get_model(request: Request, model: str) -> Response:
    """Return one model by name or alias, or an adapter."""
    return reply_json(await look(request, _find, parts_of(request).served, model))


def _find(served: ServedModels, name: str) -> ModelReply:
    found = served.adapters.match(name)
    return describe_model(served.find(name), name) if found is None else describe_adapter(found[1], name)


def _describe_all(served: ServedModels) -> list[ModelReply]:
    models = [describe_model(record) for record in served.list() if record.problem is None]
    for alias in served.aliases:
        with contextlib.suppress(MlxrError):  # its model is not there
            if "*" not in alias:
                models.append(describe_model(served.find(alias), alias))
    served.adapters.read_settings()
    return [*models, *map(describe_adapter, served.adapters.list())]


def describe_model(record: ModelRecord, name: str | None = None) -> ModelReply:
    """Describe a model of the registry, under the alias `name` if one is given."""
    return _describe(
        name or record.short_name, record.short_name, None, record.modified_at, sorted(record.capabilities)
    )


def describe_adapter(record: AdapterRecord, name: str | None = None) -> ModelReply:
    """Describe an adapter, under its own name or the requested one."""
    return _describe(name or record.name, record.name, record.base, record.modified_at)


def _describe(
    name: str, root: str, parent: str | None, modified_at: datetime, capabilities: list[str] | None = None
) -> ModelReply:
    changed = modified_at.astimezone(UTC)
    return ModelReply(
        id=name,
        created=int(changed.timestamp()),
        root=root,
        parent=parent,
        display_name=root,
        created_at=changed.isoformat(timespec="seconds").replace("+00:00", "Z"),
        capabilities=capabilities,
    )


SAID = describe_stream("What was done, in words.", "text/plain", ERRORS)
adapter_router = Router(tags=[VLLM])


class LoadBody(RequestModel):
    """An adapter's name, its path, and the model that it is for (absent: the default one)."""

    lora_name: Text
    lora_path: Text
    base_model_name: Text | None = None
    load_inplace: bool | None = Field(None, description="Take the place of the one that has the name.")


class UnloadBody(RequestModel):
    """The adapter to forget."""

    lora_name: Text


@adapter_router.post("/v1/load_lora_adapter", responses=SAID)
async def load(request: Request, body: LoadBody) -> Response:
    """Read an adapter; from then on requests may name it as their model, for as long as the server runs."""
    name = body.lora_name
    await load_adapter(request, name, body.lora_path, body.base_model_name, replaces=bool(body.load_inplace))
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


@adapter_router.post("/v1/unload_lora_adapter", responses=SAID)
async def unload(request: Request, body: UnloadBody) -> Response:
    """Forget an adapter, for new requests at once; the reply comes when no answer uses it any more."""
    await forget_adapter(request, body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
