"""Every failure as one value with an HTTP status, before a dialect gives it its own form.

`to_error` is the only place that maps exceptions to statuses. Messages are those of the errors themselves; an
unforeseen one becomes an internal error, whose details only the log has.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from json import JSONDecodeError
from types import MappingProxyType

from starlette.exceptions import HTTPException

from mlxr.core.errors import (
    AdaptersBusy,
    Busy,
    ContextFull,
    DoesNotFit,
    EngineStopped,
    FormatError,
    HubError,
    InvalidRequest,
    MlxrError,
    ModelError,
    NameTaken,
    NoSpace,
    NoTemplateWorker,
    NotFound,
    OutOfPages,
    QueueFull,
    RequestFailed,
    TemplateError,
    TokenizerError,
    Unavailable,
)
from mlxr.core.types import FinishReason

MAX_SHOWN_CHARACTERS = 1000


class ServerError(Exception):
    """An answer with an error status. `code` is a word for programs, `field` names the part of the request at fault,
    `counts` are numbers that belong to the code, under llama.cpp's names. `reason` is the message for the log.

    Codes: invalid_request, context_length_exceeded, model_unusable, not_found, method_not_allowed, name_taken,
    unauthorized, forbidden, timeout, too_large, rate_limited, queue_full, stopping, unavailable, no_space, deadline,
    cancelled, not_supported, internal.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        field: str | None = None,
        retry_after_s: float | None = None,
        allow: str | None = None,
        counts: Mapping[str, int] = MappingProxyType({}),
        closes: bool = False,
    ) -> None:
        super().__init__(message)
        self.closes = closes or status in (408, 413)  # the rest of the body is not read, so no request can follow
        self.status, self.code, self.message, self.field = status, code, message, field
        self.retry_after_s, self.allow, self.counts = retry_after_s, allow, counts
        self.reason = message

    @property
    def headers(self) -> dict[str, str]:
        """The headers that go with the error's response."""
        headers = {}
        if self.closes:
            headers["Connection"] = "close"
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.allow is not None:
            headers["Allow"] = self.allow
        if self.status == HTTPStatus.UNAUTHORIZED:
            headers["WWW-Authenticate"] = "Bearer"
        return headers


class ClientGone(Exception):
    """The client closed the connection, so no answer can be sent."""


# The first row that fits counts, so narrower classes come first.
_OWN_ERRORS: tuple[tuple[type[MlxrError], int, str, str | None], ...] = (
    (QueueFull, 429, "queue_full", None),
    (AdaptersBusy, 429, "queue_full", "adapter"),
    (Busy, 429, "queue_full", None),
    (NoSpace, 507, "no_space", None),
    (Unavailable, 503, "unavailable", None),
    (OutOfPages, 400, "invalid_request", "max_tokens"),
    (NotFound, 404, "not_found", "model"),
    (TemplateError, 400, "invalid_request", "messages"),
    (FormatError, 400, "model_unusable", "model"),
    (ModelError, 400, "model_unusable", "model"),
    (TokenizerError, 400, "model_unusable", "model"),
    (DoesNotFit, 400, "model_unusable", "model"),
    (HubError, 502, "unavailable", None),
    (EngineStopped, 503, "stopping", None),
    (NoTemplateWorker, 503, "unavailable", None),
)
_CODES = {404: "not_found", 405: "method_not_allowed"}


def to_error(error: BaseException) -> ServerError:
    """Return `error` as an answer for the client."""
    if isinstance(error, ServerError):
        return error
    if isinstance(error, HTTPException):
        code = _CODES.get(error.status_code, "invalid_request" if error.status_code < 500 else "internal")
        return ServerError(
            error.status_code, code, _shorten(str(error.detail)), allow=(error.headers or {}).get("Allow")
        )
    if isinstance(error, ContextFull):
        counts = {"n_prompt_tokens": error.prompt_tokens, "n_ctx": error.context_tokens}
        known = {name: count for name, count in counts.items() if count is not None}
        return ServerError(400, "context_length_exceeded", _shorten(str(error)), error.field, counts=known)
    if isinstance(error, NameTaken):
        return ServerError(409, "name_taken", _shorten(str(error)), error.field)
    if isinstance(error, InvalidRequest) and not isinstance(error, OutOfPages | QueueFull | AdaptersBusy):
        return ServerError(400, "invalid_request", _shorten(str(error)), error.field)
    for kind, status, code, field in _OWN_ERRORS:
        if isinstance(error, kind):
            retry_after_s = 1.0 if status == 503 else getattr(error, "retry_after_s", None)
            failure = ServerError(status, code, _shorten(str(error)), field, retry_after_s)
            if kind is TemplateError:  # a template's own words may quote the conversation
                failure.reason = "the chat template refused the conversation; the client was told why"
            return failure
    if isinstance(error, RequestFailed) and error.reason == FinishReason.DEADLINE:
        return ServerError(504, "deadline", _shorten(str(error)))
    if isinstance(error, RequestFailed) and error.reason == FinishReason.CANCELLED:
        return ServerError(503, "cancelled", _shorten(str(error)), retry_after_s=1.0)
    if isinstance(error, MlxrError):
        return ServerError(500, "internal", _shorten(str(error)))
    return ServerError(500, "internal", "internal error; the server's log says more under the id of this request")


def explain_parsing(error: ValueError | RecursionError) -> ServerError:
    """Return the error for a body whose bytes are no JSON."""
    if isinstance(error, JSONDecodeError):
        reason = f"is not JSON: {error.msg} at character {error.pos}"
    elif isinstance(error, RecursionError):
        reason = "is nested too deeply"
    else:
        reason = "is not UTF-8" if isinstance(error, UnicodeDecodeError) else f"is not JSON: {_shorten(str(error))}"
    return ServerError(400, "invalid_request", f"the body {reason}", "body")


def explain_body(problems: Sequence[Mapping[str, object]], body: object) -> ServerError:
    """Return the error for a body that does not fit the route, from the problems that pydantic found."""
    field, problem = _find_deepest([(name_field(one.get("loc"), body), one) for one in problems])
    message = str(problem.get("msg", "is not valid"))
    if problem.get("type") == "extra_forbidden":
        message = "this field is not supported"
    return ServerError(400, "invalid_request", _shorten(f"{field}: {message}"), field)


def _find_deepest(problems: Sequence[tuple[str, Mapping[str, object]]]) -> tuple[str, Mapping[str, object]]:
    """Return the problem furthest inside, of pairs of a field and its problem: if a value may have several forms, each
    form complains, and the intended one gets furthest.
    """
    first = problems[0][0]
    inside = [problem for problem in problems if problem[0].startswith((first + ".", first + "["))]
    return max([problems[0], *inside], key=lambda problem: problem[0].count(".") + problem[0].count("["))


def name_field(location: object, body: object = None) -> str:
    """Return the place of a validation error, such as messages[0].content; parts that are no place in `body` are left
    out: between the names of fields pydantic names the alternatives of a union.
    """
    parts = list(location) if isinstance(location, Sequence) else []
    name = ""
    for index, part in enumerate(parts, 1):
        if isinstance(body, list) and isinstance(part, int) and part < len(body):
            body = body[part]
            name += f"[{part}]"
        elif isinstance(body, Mapping) and (part in body or (index == len(parts) and _is_name(part))):
            body = body.get(part)
            name += f".{part}"
    return _shorten(name.removeprefix(".") or "body")


def _is_name(part: object) -> bool:
    """Return True if the last part of a place can be a missing field, not an alternative such as list[str]."""
    return isinstance(part, str) and part.isidentifier() and part.islower() and part not in {"str", "int", "float"}


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_CHARACTERS else text[:MAX_SHOWN_CHARACTERS] + "…"


@contextmanager
def spell_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Replace the field that an InvalidRequest names, or the field that it is a part of, by its name in `names`."""
    try:
        yield
    except InvalidRequest as error:
        field = error.field if error.field in names else re.split(r"[.\[]", error.field, maxsplit=1)[0]
        if type(error) not in (InvalidRequest, ContextFull) or field not in names:
            raise
        raise error.rename(names[field]) from None
