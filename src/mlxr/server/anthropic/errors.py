"""Errors in Anthropic's form."""

from __future__ import annotations

from typing import Literal

from mlxr.server.errors import ServerError
from mlxr.server.json_models import JsonObject, ReplyModel, optional

ErrorType = Literal[
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "request_too_large",
    "rate_limit_error",
    "timeout_error",
    "overloaded_error",
    "api_error",
]
_TYPES: dict[int, ErrorType] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ErrorDetail(ReplyModel):
    """Tells an error; the message begins with the field at fault. `details` holds a code that clients act upon."""

    type: ErrorType
    message: str
    details: JsonObject | None = optional()


class ErrorReply(ReplyModel):
    """The body of every error on Anthropic's routes."""

    type: Literal["error"] = "error"
    error: ErrorDetail
    request_id: str


def render_error(error: ServerError, request_id: str) -> JsonObject:
    """The body of an error."""
    message = error.message
    if {
        "n_prompt_tokens",
        "n_ctx",
    } <= error.counts.keys():  # Anthropic's clients shorten the conversation at these words
        message = f"prompt is too long: {error.counts['n_prompt_tokens']} tokens > {error.counts['n_ctx']} maximum"
    if error.field is not None and not message.startswith(error.field):
        message = f"{error.field}: {message}"
    details: JsonObject | None = {"error_code": "thread_unsupported_request"} if error.field == "thread" else None
    detail = ErrorDetail(type=name_type(error.status), message=message, details=details)
    return ErrorReply(error=detail, request_id=request_id).model_dump()


def name_type(status: int) -> ErrorType:
    """Anthropic's word for a kind of error."""
    return _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
