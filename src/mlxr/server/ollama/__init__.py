"""The Ollama dialect: generate, chat, embeddings, and the management of models, as Ollama's clients know them.

Interface: https://github.com/ollama/ollama/blob/main/docs/api.md
"""

from __future__ import annotations

from mlxr.server.ollama import answers, models
from mlxr.server.ollama.reply import render_error
from mlxr.server.routes import Dialect, Router

router = Router(tags=["Ollama"])
for route in (answers, models):
    router.include(route.router)

DIALECT = Dialect("ollama", ("/api",), router, render_error)
