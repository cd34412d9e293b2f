"""What the JSON of requests and replies has in common: pydantic models from which also the OpenAPI document is made.

Requests are strict: a value of another JSON type, a number that is none, or a field that is not in the model is
refused, and the error names it. A model's validator is built when it is first used (some 3 ms), which spares the start
those of all dialects. Knows no dialect and no route.
"""

from __future__ import annotations

import json
import random
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from mlxr.core.errors import InvalidRequest

MAX_INT = 2**31 - 1
Text = Annotated[str, Field(min_length=1)]
JsonObject = dict[str, object]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
_SMALLEST_TOP_P = 1e-9


def _refuse_true(value: bool) -> bool:
    if value:
        raise PydanticCustomError("only_false", "only false is supported")
    return value


Off = Annotated[bool, AfterValidator(_refuse_true), WithJsonSchema({"type": "boolean", "const": False})]


class RequestModel(BaseModel):
    """Base of all that a client sends."""

    model_config = ConfigDict(defer_build=True, extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class ReplyModel(BaseModel):
    """Base of all that a client gets."""

    model_config = ConfigDict(defer_build=True, extra="forbid", frozen=True)


def optional() -> Any:
    """A field of a reply that is left out where there is nothing to say."""
    return Field(default=None, exclude_if=lambda value: value is None)


def bound_top_p(top_p: float | None) -> float:
    """A client's top_p as SamplingParams has it: absent is 1; its 0 leaves the likeliest token, ours is above 0."""
    return 1.0 if top_p is None else top_p or _SMALLEST_TOP_P


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


def make_id(prefix: str) -> str:
    """A new name for something in a reply. It is no secret, so the system's randomness is not asked for."""
    return f"{prefix}{random.getrandbits(128):032x}"


def describe_call(call_id: str, name: str, arguments: str) -> JsonObject:
    """An earlier call of a tool as messages of the service carry it; `arguments` is JSON text."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
