"""The dialect of llama.cpp's server: its own routes, and OpenAI's routes without `/v1`."""

from __future__ import annotations

from dataclasses import replace

from mlxr.server import openai
from mlxr.server.llamacpp import completion, properties
from mlxr.server.llamacpp.completion import ERRORS, render_error
from mlxr.server.routes import Description, Dialect, Router, RouteRow

router = Router(tags=["llama.cpp"])
for route in (completion, properties):
    router.include(route.router)
_OWN = {row.path for row in router.rows}
_PREFIX = "/v1"


def _shorten(row: RouteRow) -> RouteRow:
    """Return a row of OpenAI's dialect without the prefix and with errors of this one."""
    description: Description = {**row.description, "responses": {**row.description.get("responses", {}), **ERRORS}}
    return replace(row, path=row.path.removeprefix(_PREFIX), description=description, tags=("llama.cpp",))


# Only for paths under which llama.cpp has no route of another shape.
router.rows += [
    _shorten(row)
    for row in openai.router.rows
    if row.path.startswith(_PREFIX + "/") and openai.VLLM not in row.tags and row.path.removeprefix(_PREFIX) not in _OWN
]

DIALECT = Dialect("llamacpp", tuple(sorted({row.path.partition("{")[0] for row in router.rows})), router, render_error)
