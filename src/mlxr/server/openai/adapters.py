"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM's server has them.

A path is one that may be imported (`import_folders`), or the name of an adapter of the registry.
Shapes: https://docs.vllm.ai/en/latest/features/lora/
"""

from __future__ import annotations

from pydantic import Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from mlxr.server.adapter_loading import forget_adapter, load_adapter
from mlxr.server.json_models import RequestModel, Text
from mlxr.server.openai.route import ERRORS
from mlxr.server.routes import Router, describe_stream

TAG = "vLLM"
SAID = describe_stream("What was done, in words.", "text/plain", ERRORS)
router = Router(tags=[TAG])


class LoadBody(RequestModel):
    """An adapter's name, its path, and the model that it is for (absent: the default one)."""

    lora_name: Text
    lora_path: Text
    base_model_name: Text | None = None
    load_inplace: bool | None = Field(None, description="Take the place of the one that has the name.")


class UnloadBody(RequestModel):
    """The adapter to forget."""

    lora_name: Text


@router.post("/v1/load_lora_adapter", responses=SAID)
async def load(request: Request, body: LoadBody) -> Response:
    """Read an adapter; from then on requests may name it as their model, for as long as the server runs."""
    name = body.lora_name
    await load_adapter(request, name, body.lora_path, body.base_model_name, replaces=bool(body.load_inplace))
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


@router.post("/v1/unload_lora_adapter", responses=SAID)
async def unload(request: Request, body: UnloadBody) -> Response:
    """Forget an adapter, for new requests at once; the reply comes when no answer has it any more."""
    await forget_adapter(request, body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
