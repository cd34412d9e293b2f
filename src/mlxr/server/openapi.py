"""The OpenAPI document: FastAPI's, with our errors in place of its own and the key that requests bring."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from mlxr.server.security import OPEN_PATHS

ERROR = {
    "description": "An error in the form of the dialect",
    "content": {"application/json": {"schema": {"type": "object"}}},
}
KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def describe_app(app: FastAPI) -> dict[str, Any]:
    """The document, made once."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
        for path, operation in _operations(schema):
            operation["responses"].pop("422", None)  # bodies that do not fit are answered with 400, see `errors`
            operation["responses"]["default"] = ERROR
            if path not in OPEN_PATHS:
                operation["security"] = [{"bearer": []}, {"header": []}, {}]
        components = schema.setdefault("components", {})
        for unused in ("HTTPValidationError", "ValidationError"):
            components.get("schemas", {}).pop(unused, None)
        components["securitySchemes"] = KEYS
        app.openapi_schema = schema
    return app.openapi_schema


def _operations(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, item in schema["paths"].items():
        for operation in item.values():
            yield path, operation
