"""Errors in OpenAI's form."""

from __future__ import annotations

from typing import Literal

from mlxr.server.errors import ServerError
from mlxr.server.json_models import JsonObject, ReplyModel, optional

ErrorType = Literal[
    "invalid_request_error", "authentication_error", "rate_limit_error", "server_error", "exceed_context_size_error"
]
_CODES = {
    "unauthorized": "invalid_api_key",
    "rate_limited": "rate_limit_exceeded",
    "queue_full": "rate_limit_exceeded",
    "internal": "server_error",
}


class ErrorDetail(ReplyModel):
    """Tells an error; `param` names the field at fault. Of a prompt that is too long llama.cpp's clients read `type`,
    `n_prompt_tokens` and `n_ctx`.
    """

    message: str
    type: ErrorType
    param: str | None
    code: str | None
    n_prompt_tokens: int | None = optional()
    n_ctx: int | None = optional()


class ErrorReply(ReplyModel):
    """The body of every error on OpenAI's routes."""

    error: ErrorDetail


def render_error(error: ServerError, _request_id: str = "") -> JsonObject:
    """The body of an error; the id of the request is in the header `x-request-id` alone."""
    return {
        "error": {
            "message": error.message,
            "type": name_type(error),
            "param": error.field,
            "code": name_code(error),
            **error.counts,
        }
    }


def name_type(error: ServerError) -> ErrorType:
    """OpenAI's word for a kind of error, and llama.cpp's for the one that its clients look for."""
    if error.code == "context_length_exceeded":
        return "exceed_context_size_error"
    if error.status == 401:
        return "authentication_error"
    if error.status == 429:
        return "rate_limit_error"
    return "server_error" if error.status >= 500 else "invalid_request_error"


def name_code(error: ServerError) -> str:
    """OpenAI's word for an error where it has one, otherwise ours."""
    if error.code == "not_found" and error.field == "model":
        return "model_not_found"
    return _CODES.get(error.code, error.code)
