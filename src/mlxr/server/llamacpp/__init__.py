"""The dialect of llama.cpp's server: its own routes, and OpenAI's routes without `/v1`."""

from __future__ import annotations

from dataclasses import replace

from mlxr.server import openai
from mlxr.server.dialect import Dialect
from mlxr.server.llamacpp import completion, embedding, infill, properties, refused, tokens
from mlxr.server.llamacpp.errors import render_error
from mlxr.server.routes import Router

router = Router(tags=["llama.cpp"])
for route in (completion, infill, tokens, embedding, properties, refused):
    router.include(route.router)
_OWN = {row.path for row in router.rows}
_PREFIX = "/v1"
# OpenAI's routes without the prefix, where llama.cpp has no route of another shape under that path.
_SHORT = [
    replace(row, path=row.path.removeprefix(_PREFIX), tags=("llama.cpp",))
    for row in openai.router.rows
    if row.path.startswith(_PREFIX + "/") and row.path.removeprefix(_PREFIX) not in _OWN
]
router.rows += _SHORT

DIALECT = Dialect("llamacpp", tuple(sorted({row.path.partition("{")[0] for row in router.rows})), router, render_error)
