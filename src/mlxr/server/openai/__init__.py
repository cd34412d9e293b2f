"""The OpenAI dialect: chat and text completions, embeddings and ranks, models, Responses, transcriptions."""

from __future__ import annotations

from mlxr.server.openai import chat, completions, embeddings, models, responses, transcriptions
from mlxr.server.openai.replies import render_error
from mlxr.server.routes import Dialect, Router

router = Router(tags=["OpenAI"])
for route in (chat, completions, embeddings, models, responses, transcriptions):
    router.include(route.router)
router.include(models.adapter_router)
VLLM = models.VLLM

DIALECT = Dialect("openai", ("/v1", "/v2"), router, render_error)
