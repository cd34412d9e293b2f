"""What the JSON of requests and replies has in common: pydantic models from which also the OpenAPI document is made.

Values are strict: one of another JSON type, or a number that is none, is refused, and the error names it. Fields are
not: null is the same as nothing, and a field that a model does not declare passes, since clients send what other
servers know (see `ignored`). A field that would change the answer and cannot be followed is declared as `Unsupported`.
A model's validator is built when it is first used (some 3 ms), which spares the start those of all dialects. Knows no
dialect and no route.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

from mlxr.core.errors import InvalidRequest
from mlxr.service.identity import draw_hex

Text = Annotated[str, Field(min_length=1)]
JsonObject = dict[str, object]
Arguments = Annotated[JsonObject | str, BeforeValidator(lambda value: {} if value == [] else value)]
"""Arguments of an earlier call: an object, or JSON text. An empty list is how PHP writes an empty object."""


def _refuse(value: object) -> None:
    if value is not None and value is not False and value != []:
        raise PydanticCustomError("unsupported", "this field is not supported")


Unsupported = Annotated[object, AfterValidator(_refuse), WithJsonSchema({"type": "null"})]
"""A field without which the answer would be wrong, and that is refused unless it asks for nothing (null, false, [])."""


class RequestModel(BaseModel):
    """Base of all that a client sends."""

    model_config = ConfigDict(defer_build=True, extra="ignore", strict=True, allow_inf_nan=False, frozen=True)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """The schema in which every list ends at its first wrong item, as a list may have very many of them."""
        schema = handler(source)
        _let_lists_fail_fast(schema)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: object) -> object:
        """Null is the same as nothing for every field; one that must be there is missing then."""
        if isinstance(value, dict) and None in value.values():
            return {key: part for key, part in value.items() if part is not None}
        return value

    def list_left_out(self) -> Iterable[str]:
        """Return declared fields without effect, such as one kind of tool; they are named with the undeclared ones."""
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
    """Base of all that a client gets."""

    model_config = ConfigDict(defer_build=True, extra="forbid", frozen=True)


def optional(name: str | None = None) -> Any:
    """A field of a reply that is left out where there is nothing to say; `name` is what JSON calls it."""
    return Field(default=None, serialization_alias=name, exclude_if=lambda value: value is None)


def dump_json(value: object, field: str) -> str:
    """JSON text of a part of a request; raises InvalidRequest naming `field` where there is none."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        text.encode()
    except RecursionError:
        raise InvalidRequest(field, "is nested too deeply") from None
    except ValueError as error:
        raise InvalidRequest(field, f"is not JSON: {error}") from None
    return text


def find_half(body: BaseModel) -> str | None:
    """The first field, such as messages[0].content, with half of a surrogate pair in it; None where all is Unicode.

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
    """Tell whether UTF-8 can spell a text: one that comes from JSON may hold half of a surrogate pair."""
    try:
        str(text).encode()
    except UnicodeEncodeError:
        return False
    return True


def make_id(prefix: str) -> str:
    """A new name for something in a reply, which nobody can guess: who knows a response's name may read it."""
    return f"{prefix}{draw_hex(16, prefix)}"


def describe_call(call_id: str, name: str, arguments: str) -> JsonObject:
    """An earlier call of a tool as messages of the service carry it; `arguments` is JSON text."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
