"""Errors as llama.cpp's server writes them: OpenAI's frame with the HTTP status as `code` and words of its own."""

from __future__ import annotations

from typing import Literal

from mlxr.server.errors import ServerError
from mlxr.server.json_models import JsonObject, ReplyModel
from mlxr.server.routes import describe_errors, describe_stream
from mlxr.server.streaming import sse

ErrorType = Literal[
    "invalid_request_error",
    "exceed_context_size_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "not_supported_error",
    "unavailable_error",
    "server_error",
]
_TYPES: dict[int, ErrorType] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    501: "not_supported_error",
    503: "unavailable_error",
}


class ErrorDetail(ReplyModel):
    """Tells an error. `field` and `request_id` are additions: the part at fault, and the id that the log has."""

    code: int
    message: str
    type: ErrorType
    n_prompt_tokens: int | None = None
    n_ctx: int | None = None
    field: str | None = None
    request_id: str | None = None


class ErrorReply(ReplyModel):
    """The body of every error on llama.cpp's routes."""

    error: ErrorDetail


ERRORS = describe_errors(ErrorReply, "`field` names")
STREAMED = describe_stream(
    "The whole answer, or, with `stream`, server-sent events that it is the sum of.", "text/event-stream", ERRORS
)


def render_error(error: ServerError, request_id: str = "") -> JsonObject:
    """The body of an error."""
    fallback: ErrorType = "server_error" if error.status >= 500 else "invalid_request_error"
    detail: JsonObject = {"code": error.status, "message": error.message, "type": _TYPES.get(error.status, fallback)}
    if error.code == "context_length_exceeded":
        detail["type"] = "exceed_context_size_error"
        detail["message"] = f"the request exceeds the available context size: {error.message}"
        detail |= error.counts
    if error.field is not None:
        detail["field"] = error.field
    if request_id:
        detail["request_id"] = request_id
    return {"error": detail}


def error_frame(error: ServerError) -> bytes:
    """The last event of a stream that fails."""
    return sse(render_error(error))
