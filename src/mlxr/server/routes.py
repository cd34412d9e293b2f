"""Routes: a table of methods, paths and handlers, and the base models of the JSON in requests and replies.

A handler is `async def handler(request, name: str, body: SomeModel) -> Response | SomeModel`: it may take parts of the
path as text and the body as the pydantic model of its annotation. Starlette runs the rows. FastAPI describes them when
the OpenAPI document is first requested, as looking at every route would delay the start.

Requests and replies are pydantic models, from which also the OpenAPI document is made. Values are strict: one of
another JSON type, or a number that is none, is refused, and the error names it. Fields are not: null is the same as
nothing, and a field that a model does not declare passes, since clients send fields of other servers (see
`note_ignored`). A field that would change the answer and cannot be followed is declared as `Unsupported`. A model's
validator is built at its first use (some 3 ms), not at the start. Knows no dialect and no route.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import islice
from typing import Annotated, Any, TypedDict, TypeVar, Unpack, get_type_hints
from urllib.parse import quote

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from mlxr.core.errors import EngineStopped, InvalidRequest
from mlxr.core.frozen import frozen
from mlxr.server.activity import in_flight, log_ignored
from mlxr.server.errors import ServerError, explain_body, explain_parsing
from mlxr.server.parts import parts_of
from mlxr.service.identity import draw_hex

Text = Annotated[str, Field(min_length=1)]
JsonObject = dict[str, object]
Arguments = Annotated[JsonObject | str, BeforeValidator(lambda value: {} if value == [] else value)]
"""Arguments of an earlier call: an object, or JSON text. PHP writes an empty object as an empty list."""


def _refuse(value: object) -> None:
    if value is not None and value is not False and value != []:
        raise PydanticCustomError("unsupported", "this field is not supported")


Unsupported = Annotated[object, AfterValidator(_refuse), WithJsonSchema({"type": "null"})]
"""A field that cannot be ignored, so it is refused unless it asks for nothing (null, false, [])."""


class RequestModel(BaseModel):
    """The base of all models that a client sends."""

    model_config = ConfigDict(defer_build=True, extra="ignore", strict=True, allow_inf_nan=False, frozen=True)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema, in which every list fails at its first wrong item, as a list may have very many."""
        schema = handler(source)
        _let_lists_fail_fast(schema)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: object) -> object:
        """Drop fields that are null; a required one is then missing."""
        if isinstance(value, dict) and None in value.values():
            return {key: part for key, part in value.items() if part is not None}
        return value

    def list_left_out(self) -> Iterable[str]:
        """Return declared fields without effect, such as one kind of tool; they are listed with the undeclared ones."""
        return ()


def _let_lists_fail_fast(schema: object) -> None:
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        for part in schema.values():
            _let_lists_fail_fast(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _let_lists_fail_fast(part)


class ReplyModel(BaseModel):
    """The base of all models that a client gets."""

    model_config = ConfigDict(defer_build=True, extra="forbid", frozen=True)


def optional(name: str | None = None) -> Any:
    """Declare a field of a reply that is left out if it is None; `name` is its name in JSON."""
    return Field(default=None, serialization_alias=name, exclude_if=lambda value: value is None)


def dump_json(value: object, field: str) -> str:
    """Return a part of a request as JSON text; raises InvalidRequest naming `field` if that is impossible."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        text.encode()
    except RecursionError:
        raise InvalidRequest(field, "is nested too deeply") from None
    except ValueError as error:
        raise InvalidRequest(field, f"is not JSON: {error}") from None
    return text


def find_half(body: BaseModel) -> str | None:
    """Return the first field, such as messages[0].content, with half of a surrogate pair in it; None if there is none.

    No reply could repeat such a text. Fields that the model does not declare are not looked at.
    """
    waiting: list[tuple[str, object]] = [("", body)]
    while waiting:
        place, part = waiting.pop()
        if isinstance(part, str):
            if not is_unicode(part):
                return place
        elif isinstance(part, BaseModel):
            fields = type(part).model_fields.items()
            inner = [(field.alias or name, getattr(part, name)) for name, field in fields]
            waiting += [(f"{place}.{name}".removeprefix("."), value) for name, value in reversed(inner)]
        elif isinstance(part, Mapping):
            if not all(map(is_unicode, part)):
                return place
            waiting += [(f"{place}.{name}", value) for name, value in reversed(list(part.items()))]
        elif isinstance(part, list):
            waiting += [(f"{place}[{index}]", value) for index, value in reversed(list(enumerate(part)))]
    return None


def is_unicode(text: object) -> bool:
    """Return True if UTF-8 can encode a text: one that comes from JSON may hold half of a surrogate pair."""
    try:
        str(text).encode()
    except UnicodeEncodeError:
        return False
    return True


def make_id(prefix: str) -> str:
    """Make an id for a part of a reply that cannot be guessed: a client that knows a response's id may read it."""
    return f"{prefix}{draw_hex(16, prefix)}"


def describe_call(call_id: str, name: str, arguments: str) -> JsonObject:
    """Return an earlier call of a tool as in messages of the service; `arguments` is JSON text."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


RenderError = Callable[[ServerError, str], Mapping[str, object]]


@frozen
class Dialect:
    """A dialect; `render_error(error, request_id)` makes the JSON body of errors below one of its `prefixes`."""

    name: str
    prefixes: tuple[str, ...]
    router: Router
    render_error: RenderError


def find_dialect(dialects: Sequence[Dialect], path: str) -> Dialect:
    """Return the dialect of `path`: the one with the longest prefix. One of them must have the prefix ""."""
    fitting = [
        (len(prefix), dialect)
        for dialect in dialects
        for prefix in dialect.prefixes
        if not prefix or path == prefix or path.startswith(prefix.rstrip("/") + "/")
    ]
    return max(fitting, key=lambda pair: pair[0])[1]


IGNORED = "x-mlxr-ignored"
MAX_NAMES = 32
MAX_NAME_CHARACTERS = 64
MAX_LOOKS = 20_000  # parts of a body that are looked at


def note_ignored(request: Request, names: Iterable[str]) -> None:
    """Name these fields in the response to `request` and in the debug log; `names` may be hostile and many."""
    row = in_flight(request)
    known = len(row.ignored)
    for name in dict.fromkeys(islice(names, MAX_LOOKS)):
        if len(row.ignored) > MAX_NAMES:  # one more than shown says that there are more
            break
        spelt = _spell(name)
        if spelt not in row.ignored:
            row.ignored.append(spelt)
    if len(row.ignored) > known:
        log_ignored(row, join_names(row.ignored))


def join_names(names: list[str]) -> str:
    """Return the value of the header: the first names, and `...` if there are more."""
    return ", ".join([*names[:MAX_NAMES], "..."] if len(names) > MAX_NAMES else names)


def find_ignored(value: object, model: BaseModel) -> Iterator[str]:
    """Yield the fields in `value` that `model`, which was made of it, does not have: `metadata`, `messages[].id`.

    Fields that are null do not count. Of a very long body only the beginning is looked at.
    """
    return (name for name in islice(_walk(value, model, ""), MAX_LOOKS) if name is not None)


def _walk(value: object, part: object, place: str) -> Iterator[str | None]:
    """Yield one item for each part looked at: the name of a field without effect, or None."""
    if isinstance(part, RequestModel) and isinstance(value, Mapping):
        fields = _name_fields(type(part))
        for key, inner in value.items():
            name = fields.get(key)
            yield None if name is not None or inner is None else f"{place}{key}"
            if name is not None and isinstance(inner, Mapping | list):
                yield from _walk(inner, getattr(part, name), f"{place}{key}.")
    elif isinstance(part, list) and isinstance(value, list):
        place = place.removesuffix(".") + "[]."
        for inner_value, inner_part in zip(value, part, strict=False):
            yield None
            yield from _walk(inner_value, inner_part, place)


@cache
def _name_fields(model: type[BaseModel]) -> Mapping[str, str]:
    """Return the names of the model's fields by their keys in JSON."""
    names: dict[str, str] = {}
    for name, field in model.model_fields.items():
        alias = field.validation_alias
        keys = alias.choices if isinstance(alias, AliasChoices) else [alias or name]
        names |= {key: name for key in keys if isinstance(key, str)}
    return names


def _spell(name: str) -> str:
    """Return the name as a header may carry it: other than plain characters as %XX, not too long, `%` if empty."""
    plain = quote(name[:MAX_NAME_CHARACTERS], safe="[]", errors="replace")
    return plain[:MAX_NAME_CHARACTERS] or "%"


Handler = Callable[..., Awaitable[Response | BaseModel]]
H = TypeVar("H", bound=Handler)
Responses = dict[int | str, dict[str, Any]]
MAX_MESSAGES = 1 << 14  # of one conversation


def describe_errors(model: type[BaseModel], place: str) -> Responses:
    """Return the document's description of a dialect's errors; `place` says where they name the field at fault."""
    return {
        "4XX": {"model": model, "description": f"The request cannot be served; {place} the field at fault."},
        "5XX": {"model": model, "description": "The server failed."},
    }


def describe_stream(description: str, media_type: str, errors: Responses) -> Responses:
    """Return the document's description of an answer that may be a stream of `media_type`, and of its errors."""
    return {200: {"description": description, "content": {media_type: {}}}, **errors}


class Description(TypedDict, total=False):
    """The document's description of a route besides the handler's annotations and docstring, in FastAPI's words."""

    response_model: type[Any]
    responses: Responses
    response_class: type[Response]
    status_code: int
    deprecated: bool
    openapi_extra: dict[str, Any]


@frozen
class RouteRow:
    """One route: its method, its path, its handler, and its description in `/openapi.json`."""

    method: str
    path: str
    handler: Handler
    description: Description
    tags: tuple[str, ...]


class Router:
    """Rows in the order in which they are tried, with a common prefix and common tags."""

    def __init__(self, prefix: str = "", tags: Sequence[str] = ()) -> None:
        self._prefix, self._tags = prefix, tuple(tags)
        self.rows: list[RouteRow] = []

    def get(self, path: str, **description: Unpack[Description]) -> Callable[[H], H]:
        """Make a function the handler of GET, and of HEAD, which is GET without a body."""
        return self._add("GET", path, description)

    def head(self, path: str) -> Callable[[H], H]:
        """Make a function the handler of HEAD for a path without GET."""
        return self._add("HEAD", path, {})

    def post(self, path: str, **description: Unpack[Description]) -> Callable[[H], H]:
        """Make a function the handler of POST."""
        return self._add("POST", path, description)

    def delete(self, path: str, **description: Unpack[Description]) -> Callable[[H], H]:
        """Make a function the handler of DELETE."""
        return self._add("DELETE", path, description)

    def include(self, other: Router) -> None:
        """Take over the rows of `other`, with the tags of both."""
        self.rows += [replace(row, tags=self._tags + row.tags) for row in other.rows]

    def _add(self, method: str, path: str, description: Description) -> Callable[[H], H]:
        def add(handler: H) -> H:
            self.rows.append(RouteRow(method, self._prefix + path, handler, description, self._tags))
            return handler

        return add


def build_route(row: RouteRow) -> Route:
    """Make Starlette's route of a row."""

    @cache
    def find_model() -> type[BaseModel] | None:
        return get_type_hints(row.handler).get("body")

    async def answer(request: Request) -> Response:
        served = in_flight(request)
        try:
            return await handle(request)
        except asyncio.CancelledError:
            if not served.is_cut_off or served.task is None:
                raise
            served.task.uncancel()
            raise EngineStopped from None

    async def handle(request: Request) -> Response:
        values: dict[str, object] = {**request.path_params}
        model = find_model()
        if model is not None:
            body, ignored = await parts_of(request).work.bodies.take(request, partial(_parse_body, model))
            note_ignored(request, ignored)
            values["body"] = body
        reply = await row.handler(request, **values)
        return reply if isinstance(reply, Response) else reply_json(reply)

    return _Route(row.path, answer, methods=[row.method])


class _Route(Route):
    """A route that matches only its own methods if a part of its path may be anything.

    So a request for a route that does not exist, such as POST /v1/responses/cancel, is told so.
    """

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child = super().matches(scope)
        return (Match.NONE, {}) if match is Match.PARTIAL and self.param_convertors else (match, child)


def _parse_body(model: type[BaseModel], data: bytearray) -> tuple[BaseModel, list[str]]:
    """Parse the body, JSON whatever its content type (`curl -d` calls it a form); also returns fields without effect.

    Raises ServerError naming the fault.
    """
    value, may_hold_halves = _parse_json(data)
    if value is None:
        raise ServerError(400, "invalid_request", "body: Field required", "body")
    _check_messages(value)
    try:
        body = model.model_validate(value, from_attributes=True)
    except ValidationError as error:
        raise explain_body(error.errors(include_url=False), value) from error
    if may_hold_halves and (half := find_half(body)) is not None:
        text = f"{half}: holds half of a surrogate pair, which is no Unicode text"
        raise ServerError(400, "invalid_request", text, half)
    left_out = body.list_left_out() if isinstance(body, RequestModel) else ()
    return body, [*left_out, *find_ignored(value, body)]


def _parse_json(data: bytearray) -> tuple[object, bool]:
    """Return the value of a body, and whether one of its texts may hold half of a surrogate pair, escaped in JSON.

    Raises ServerError if it is no JSON, or no valid UTF-8.
    """
    try:
        text = data.decode(json.detect_encoding(data))
        return (json.loads(text) if data else None), "\\ud" in text or "\\uD" in text
    except (ValueError, RecursionError) as error:
        raise explain_parsing(error) from error


def _check_messages(value: object) -> None:
    """Refuse conversations of very many messages before validating each of them."""
    for field in ("messages", "input"):
        messages = value.get(field) if isinstance(value, dict) else None
        if isinstance(messages, list) and len(messages) > MAX_MESSAGES and isinstance(messages[0], dict):
            text = f"{field}: has {len(messages)} entries, at most {MAX_MESSAGES} are read"
            raise ServerError(400, "invalid_request", text, field)


def reply_json(reply: BaseModel, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response with `reply` as its body; fields have their aliases as names."""
    return Response(reply.model_dump_json(by_alias=True), status, headers, media_type="application/json")
