"""Arguments whose values are written without saying what they are: text as it is, anything else as JSON.

The schema of a tool says which of the two a value is. Python's words for true, false and null are understood, as chat
templates write these.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

from mlxr.service.requests import Tool
from mlxr.service.tools.format import JSON_STYLE, quote_lark

_PYTHON = {"True": True, "False": False, "None": None}
_MAX_REFERENCES = 9  # that follow each other
_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def read_value(text: str, schema: object) -> object:
    """The value that `text` stands for, in the light of its schema; the text itself where it can be no other."""
    types = list_types(schema)
    if types == frozenset({"string"}):
        return text
    value = _parse(text)
    kind = _NAMES.get(type(value), "null")
    may_be_text = types is None or "string" in types
    return text if may_be_text and (kind == "string" or not _fits(kind, types)) else value


def list_types(schema: object) -> frozenset[str] | None:
    """JSON's names of the types that a schema allows, None if it does not say."""
    if not isinstance(schema, Mapping):
        return None
    if "const" in schema:
        return _list_value_types([schema["const"]])
    if isinstance(schema.get("enum"), list):
        return _list_value_types(cast("list[object]", schema["enum"]))
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            found = [list_types(part) for part in cast("list[object]", schema[key])]
            return None if None in found else frozenset().union(*(types for types in found if types))
    kind = schema.get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    return frozenset(map(str, kinds)) if all(isinstance(name, str) for name in kinds) else None


def list_properties(tool: Tool) -> Mapping[str, object]:
    """The schemas of a tool's arguments by name, none where it does not say. References to definitions are followed."""
    properties, definitions = tool.parameters.get("properties"), tool.parameters.get("$defs")
    if not isinstance(properties, Mapping):
        return {}
    return {key: _resolve(schema, definitions) for key, schema in properties.items()}


def list_required(tool: Tool) -> Sequence[str]:
    """The arguments that must be there, of those that the tool describes, in the schema's order."""
    required = tool.parameters.get("required")
    names = required if isinstance(required, list | tuple) else ()
    return [key for key in list_properties(tool) if key in names]


def write_value_rule(rule: str, tool: Tool, schema: object, end: str) -> str:
    """The rule called `rule` of a Lark grammar: one value and then `end`, a part of a rule. It needs the rule `text`,
    which is any text with `end` behind it.
    """
    types, choices = list_types(schema), _list_choices(schema)
    if choices is not None:
        return f"{rule}: ({' | '.join(quote_lark(choice) for choice in choices)}) {end}\n"
    if types is None or "string" in types:
        return f"{rule}: text\n"
    definitions = {"$defs": tool.parameters.get("$defs", {}), "x-guidance": JSON_STYLE}
    value = {**cast("Mapping[str, object]", schema), **definitions}
    return f"{rule}: {rule}_value {end}\n{rule}_value: %json {json.dumps(value)}\n"


def _resolve(schema: object, definitions: object) -> object:
    for _ in range(_MAX_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not isinstance(definitions, Mapping):
            break
        schema = definitions.get(reference.removeprefix("#/$defs/"))
    return schema


def _list_choices(schema: object) -> list[str] | None:
    """The texts that a value may be, where only some are allowed and one of them is a text."""
    if not isinstance(schema, Mapping):
        return None
    values: Any = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or not any(isinstance(value, str) for value in values):
        return None
    return [value if isinstance(value, str) else json.dumps(value) for value in values]


def _list_value_types(values: Sequence[object]) -> frozenset[str]:
    return frozenset(_NAMES.get(type(value), "null") for value in values)


def _fits(kind: str, types: frozenset[str] | None) -> bool:
    return types is None or kind in types or (kind == "integer" and "number" in types)


def _parse(text: str) -> object:
    """The value of JSON text, or of one of Python's words; the text itself if it is neither."""
    bare = text.strip()
    if bare in _PYTHON:
        return _PYTHON[bare]
    try:
        value: object = json.loads(bare, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text
    return text if isinstance(value, float) and not math.isfinite(value) else value


def _refuse(name: str) -> object:
    raise ValueError(name)
