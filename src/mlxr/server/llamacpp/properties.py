"""What the server is, does and has: /props, /slots, /models, /lora-adapters, and the routes that are refused by name.

A slot is one of the `max_sequences` answers that can grow at the same time. Slots exist only in these replies: all
requests share one cache, and an answer takes whatever room there is.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

from pydantic import Field, RootModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import mlxr
from mlxr.core.model_settings import size_steps
from mlxr.core.settings import Settings
from mlxr.registry import AdapterRecord
from mlxr.server.activity import InFlight
from mlxr.server.errors import ServerError
from mlxr.server.generation import borrow
from mlxr.server.json_models import JsonObject
from mlxr.server.llamacpp.completion import CompletionFields, describe_settings
from mlxr.server.llamacpp.reply import ERRORS
from mlxr.server.openai.fields import AdapterShare
from mlxr.server.openai.models import describe_model
from mlxr.server.parts import parts_of
from mlxr.server.routes import Router
from mlxr.server.work import look
from mlxr.service.model_pool import ModelLease
from mlxr.service.opening import find_device

router = Router()
refused = Router()  # what llama.cpp's server has and this one cannot have
MAX_SHARES = 64


@router.get("/props", responses=ERRORS)
async def show_properties(request: Request) -> Response:
    """Return what holds for all requests, and the parameters of those that say nothing, for the model `?model=`."""
    lease = await borrow(request, request.query_params.get("model"))
    record = lease.record
    return JSONResponse(
        {
            "default_generation_settings": {"params": _default_params(lease), **_describe_slot(lease, 0, None)},
            "total_slots": await _count_slots(parts_of(request).settings),
            "model_alias": record.short_name,
            "model_path": str(record.path),
            "modalities": {"vision": False, "audio": False},
            **_describe_tokenizer(lease),
            "build_info": f"mlxr-{mlxr.__version__}",
            "is_sleeping": False,
        }
    )


@router.get("/tokenizer_info", responses=ERRORS)
async def show_tokenizer(request: Request) -> Response:
    """The special tokens and the chat template of the model `?model=`, where clients of vLLM look for them."""
    return JSONResponse(_describe_tokenizer(await borrow(request, request.query_params.get("model"))))


@router.get("/slots", responses=ERRORS)
async def list_slots(request: Request) -> Response:
    """Every slot and the request that is in it; with `?fail_on_no_slot=1` an error where none is free."""
    lease = await borrow(request, request.query_params.get("model"))
    parts = parts_of(request)
    busy = [row for row in parts.activity if row.cancels and row.model == lease.name]
    slots = await _count_slots(parts.settings)
    if request.query_params.get("fail_on_no_slot") and len(busy) >= slots:
        raise ServerError(503, "unavailable", "no slot is free", retry_after_s=1.0)
    listed = [_describe_slot(lease, index, busy[index] if index < len(busy) else None) for index in range(slots)]
    return JSONResponse(listed)


@router.get("/models", responses=ERRORS)
async def list_models(request: Request) -> Response:
    """The models that requests can name: OpenAI's list with llama.cpp's facts about each."""
    records = await look(request, parts_of(request).registry.list)
    loaded = {model.name for model in parts_of(request).pool.running()}
    data = [
        {
            **describe_model(record).model_dump(),
            "aliases": [],
            "tags": [],
            "status": {"value": "loaded" if record.name in loaded else "unloaded"},
            "meta": {
                "n_ctx_train": record.context_tokens,
                "n_embd": record.embedding_length,
                "n_params": record.parameters_count,
                "size": record.size_bytes,
            },
        }
        for record in records
        if record.problem is None
    ]
    return JSONResponse({"object": "list", "data": data})


def _default_params(lease: ModelLease) -> JsonObject:
    body = CompletionFields.model_validate({})
    return describe_settings(body.make_params(lease.record, lease.session), body)


async def _count_slots(settings: Settings) -> int:
    return size_steps(settings, await asyncio.to_thread(find_device, settings)).max_sequences


def _describe_slot(lease: ModelLease, index: int, row: InFlight | None) -> JsonObject:
    slot: JsonObject = {
        "id": index,
        "n_ctx": lease.session.context_tokens,
        "speculative": False,
        "is_processing": row is not None,
    }
    if row is not None:
        slot |= {"id_task": row.id, "n_prompt_tokens": row.prompt_tokens, "n_decoded": row.generated_tokens}
    return slot


def _describe_tokenizer(lease: ModelLease) -> JsonObject:
    tokenizer = lease.session.tokenizer
    return {
        "chat_template": lease.session.chat_template,
        "bos_token": _spell(lease, tokenizer.bos_id),
        "eos_token": _spell(lease, min(tokenizer.eos_ids, default=None)),
    }


def _spell(lease: ModelLease, token_id: int | None) -> str:
    return "" if token_id is None else lease.session.tokenizer.token_text(token_id)


class AdapterShares(RootModel[Annotated[list[AdapterShare], Field(max_length=MAX_SHARES)]]):
    """Adapters by id, and what their updates are multiplied by; those that are not listed have 0."""


@router.get("/lora-adapters", responses=ERRORS)
async def list_adapters(request: Request) -> Response:
    """The adapters of the model `?model=` (absent: the default one). An id is a place in this list."""
    base, records = await look(request, _list, request)
    scales = parts_of(request).served.adapters.read_scales(base)
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
    parts_of(request).served.adapters.set_scales(base, scales)
    return JSONResponse({"success": True})


def _list(request: Request) -> tuple[str, tuple[AdapterRecord, ...]]:
    """The base that is meant, and its adapters."""
    served = parts_of(request).served
    model = request.query_params.get("model") or served.find_default()
    base = served.find(model).short_name
    return base, served.adapters.list_for(base)


@refused.post("/rerank", responses=ERRORS)
@refused.post("/reranking", responses=ERRORS)
@refused.post("/v1/rerank", responses=ERRORS)
@refused.post("/v1/reranking", responses=ERRORS)
async def rerank(_: Request) -> Response:
    """Reranking is not supported: no architecture here has a head for it."""
    raise ServerError(501, "not_supported", "reranking is not supported: no model that can be loaded here reranks")


@refused.post("/slots/{id_slot}", responses=ERRORS)
async def change_slot(_: Request, id_slot: str) -> Response:
    """Slots cannot be saved, restored or erased: cached pages belong to no slot."""
    del id_slot
    message = "slots cannot be saved, restored or erased: all requests share one cache; see the setting store_bytes"
    raise ServerError(501, "not_supported", message)


@refused.post("/props", responses=ERRORS)
async def change_properties(_: Request) -> Response:
    """Properties cannot be changed while the server runs."""
    raise ServerError(501, "not_supported", "properties cannot be changed here; flags and settings do that")


router.include(refused)
