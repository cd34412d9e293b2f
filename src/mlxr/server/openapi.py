"""The OpenAPI document: FastAPI's, with our errors in place of its own and the key that requests bring.

FastAPI describes the routes and does nothing else here, so it is imported when the document is made.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic.warnings import UnsupportedFieldAttributeWarning

import mlxr
from mlxr.server.page_files import ASSET_PATH, ICON_PATH
from mlxr.server.routes import RouteRow
from mlxr.server.security import OPEN_PATHS

TITLE = "mlxr"
SUMMARY = "Local language models for OpenAI, Anthropic and Ollama clients"
ERROR = {
    "description": "An error in the form of the dialect",
    "content": {"application/json": {"schema": {"type": "object"}}},
}
KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def describe_routes(rows: Sequence[RouteRow]) -> dict[str, Any]:
    """The document; takes some tenths of a second."""
    from fastapi import APIRouter
    from fastapi.openapi.utils import get_openapi

    router = APIRouter()
    for row in rows:
        if row.method != "HEAD":
            router.add_api_route(row.path, row.handler, methods=[row.method], tags=[*row.tags], **row.description)
    with warnings.catch_warnings():  # FastAPI does the same, but too early for models that are built when first used
        warnings.simplefilter("ignore", UnsupportedFieldAttributeWarning)
        schema = get_openapi(title=TITLE, version=str(mlxr.__version__), summary=SUMMARY, routes=router.routes)
    for path, operation in _operations(schema):
        operation["responses"].pop("422", None)  # bodies that do not fit are answered with 400, see `errors`
        operation["responses"]["default"] = ERROR
        if path not in OPEN_PATHS | {ICON_PATH, ASSET_PATH}:
            operation["security"] = [{"bearer": []}, {"header": []}, {}]
    components = schema.setdefault("components", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        components.get("schemas", {}).pop(unused, None)
    components["securitySchemes"] = KEYS
    return schema


def _operations(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, item in schema["paths"].items():
        for operation in item.values():
            yield path, operation
