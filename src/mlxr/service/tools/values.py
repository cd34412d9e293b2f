"""Arguments whose values are written without saying what they are: text as it is, anything else as JSON.

The schema of a tool says which of the two a value is, for the parser and for the grammar by the same functions, so that
both agree. Python's words for true, false and null are understood, as chat templates write these.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from mlxr.service.json_text import mend_json, read_json
from mlxr.service.requests import Tool
from mlxr.service.schema_document import (
    JOINED,
    REFERENCES,
    Document,
    Schema,
    SchemaError,
    find_implied_type,
    is_object,
)
from mlxr.service.tools.format import JSON_STYLE, quote_lark

PYTHON_WORDS: Mapping[str, object] = {"True": True, "False": False, "None": None}
_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_UNIONS = ("anyOf", "oneOf")
# Keywords beside a choice or a reference that say nothing of the value.
_ANNOTATIONS = frozenset(("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"))
Types = frozenset[str]
"""JSON's names of types; "number" never without "integer"."""


class Arguments:
    """The arguments of one tool: `properties` are their schemas in order, `required` those that must be there.

    What the schema says by way of references and `allOf` counts as its own; what one branch of a choice says may be
    left out.
    """

    def __init__(self, tool: Tool) -> None:
        root: Schema = dict(tool.parameters)
        self._document, self._definitions = Document(root), root.get("$defs", {})
        self.properties = dict[str, object]()
        required = set[object]()
        for part in self._list_parts(root):
            self._add(part.get("properties"))
            names = part.get("required")
            required.update(
                name for name in (names if isinstance(names, list | tuple) else ()) if isinstance(name, str)
            )
        for branch in self._list_branches(root):
            for part in self._list_parts(branch):
                self._add(part.get("properties"))
        self.required = [key for key in self.properties if key in required]

    def read_value(self, key: str, text: str) -> object:
        """The value of an argument that `text` stands for; see `read_value`."""
        return read_value(text, self.properties.get(key), self._document)

    def list_types(self, key: str) -> Types | None:
        """The types that an argument may have, None if the schema does not say."""
        return list_types(self.properties.get(key), self._document)

    def write_value_rule(self, rule: str, key: str, end: str) -> str:
        """The rule called `rule` of a Lark grammar: one value and then `end`, a part of a rule. It needs the rule
        `text`, which is any text with `end` behind it.
        """
        choices, schemas = dict[str, None](), list[object]()
        for branch in _list_union(self.properties[key], self._document):
            values, types = _list_choices(branch, self._document), list_types(branch, self._document)
            if values is not None:
                choices |= {value if isinstance(value, str) else json.dumps(value): None for value in values}
            elif types is None or "string" in types:
                return f"{rule}: text\n"
            else:
                schemas.append(branch)
        names = [f"{rule}_value_{index}" for index in range(len(schemas))]
        bodies = (f"{name}: {self.write_json(schema)}\n" for name, schema in zip(names, schemas, strict=True))
        return f"{rule}: ({' | '.join([*map(quote_lark, choices), *names])}) {end}\n{''.join(bodies)}"

    def write_json(self, schema: object) -> str:
        """The part of a Lark rule that is JSON of one argument's schema."""
        whole: Schema = {**(schema if is_object(schema) else {}), "x-guidance": JSON_STYLE}
        text = json.dumps(whole)
        return f"%json {json.dumps({**whole, '$defs': self._definitions}) if '$ref' in text else text}"

    def _add(self, properties: object) -> None:
        for key, schema in properties.items() if isinstance(properties, Mapping) else ():
            if schema is not False:
                known = self.properties.get(key, schema)
                self.properties[key] = schema if known == schema else {"allOf": [known, schema]}

    def _list_parts(self, schema: Schema) -> list[Schema]:
        try:
            return self._document.list_parts(schema)
        except SchemaError:
            return [schema]

    def _list_branches(self, root: Schema) -> Iterator[Schema]:
        for part in self._list_parts(root):
            for key in _UNIONS:
                branches = part.get(key)
                yield from filter(is_object, branches if isinstance(branches, list) else ())


def read_value(text: str, schema: object, document: Document | None = None) -> object:
    """The value that `text` stands for, in the light of its schema; the text itself where it can be no other.

    References are looked up in `document`.
    """
    types = list_types(schema, document or _make_document(schema))
    if types == frozenset({"string"}):
        return text
    may_be_text = types is None or "string" in types
    value = _parse(text, is_sure=not may_be_text)
    kind = _NAMES.get(type(value), "null")
    return text if may_be_text and (kind == "string" or not (types is None or kind in types)) else value


def list_types(schema: object, document: Document, seen: frozenset[int] = frozenset()) -> Types | None:
    """The types that a schema allows, None if it does not say. Those `seen` are being looked at already."""
    if schema is False:
        return frozenset()
    if not is_object(schema) or id(schema) in seen:
        return None
    seen |= {id(schema)}
    found = [_list_own_types(schema)]
    found += [list_types(part, document, seen) for part in _list_joined(schema, document)]
    for key in _UNIONS:
        branches = schema.get(key)
        if isinstance(branches, list):
            kinds = [list_types(branch, document, seen) for branch in branches]
            found.append(None if None in kinds else frozenset().union(*(types for types in kinds if types)))
    said = [types for types in found if types is not None]
    if said:
        return frozenset.intersection(*said)
    implied = find_implied_type(schema)
    return None if implied is None else _widen([implied])


def _list_own_types(schema: Schema) -> Types | None:
    """The types that the schema's own keywords allow."""
    found = []
    for values in ([schema["const"]] if "const" in schema else None, schema.get("enum")):
        if isinstance(values, list):
            found.append(_widen([_NAMES.get(type(value), "null") for value in values]))
    kind = schema.get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    if kinds and all(isinstance(name, str) for name in kinds):
        found.append(_widen(cast("list[str]", kinds)))
    return frozenset.intersection(*found) if found else None


def _widen(kinds: Sequence[str]) -> Types:
    return frozenset(kinds) | (frozenset({"integer"}) if "number" in kinds else frozenset())


def _list_joined(schema: Schema, document: Document) -> Iterator[object]:
    """The schemas that hold together with this one."""
    parts = schema.get("allOf")
    yield from parts if isinstance(parts, list) else ()
    for key in REFERENCES:
        if key in schema:
            try:
                yield document.find(schema[key])
            except SchemaError:
                continue


def _list_union(schema: object, document: Document, seen: frozenset[int] = frozenset()) -> Iterator[object]:
    """The schemas of which a value has to fit one: the branches of choices that nothing else stands beside."""
    keys = schema.keys() - _ANNOTATIONS if is_object(schema) else set()
    if not is_object(schema) or len(keys) != 1 or id(schema) in seen:
        yield schema
        return
    (key,), seen = keys, seen | {id(schema)}
    parts = schema[key] if key in JOINED else list(_list_joined(schema, document)) if key in REFERENCES else None
    if not isinstance(parts, list) or not parts or (key == "allOf" and len(parts) > 1):
        yield schema
        return
    for part in parts:
        yield from _list_union(part, document, seen)


def _list_choices(schema: object, document: Document) -> list[object] | None:
    """The values of a schema that allows only some and of these a text; None for any other, which JSON can say."""
    values, types = _list_values(schema, document, frozenset()), list_types(schema, document)
    fitting = [value for value in values or () if types is None or _NAMES.get(type(value), "null") in types]
    return fitting if any(isinstance(value, str) for value in fitting) else None


def _list_values(schema: object, document: Document, seen: frozenset[int]) -> list[object] | None:
    """The values of a schema that allows only some, as far as its lists of them say; None for any other."""
    if not is_object(schema) or id(schema) in seen:
        return None
    seen |= {id(schema)}
    for values in ([schema["const"]] if "const" in schema else None, schema.get("enum")):
        if isinstance(values, list):
            return values
    for key in _UNIONS:
        branches = schema.get(key)
        lists = [_list_values(branch, document, seen) for branch in (branches if isinstance(branches, list) else ())]
        if lists and None not in lists:
            return [value for values in lists for value in values or ()]
    parts = (_list_values(part, document, seen) for part in _list_joined(schema, document))
    found = next((part for part in parts if part is not None), None)
    return [None] if found is None and schema.get("type") == "null" else found


def _make_document(schema: object) -> Document:
    return Document(schema if is_object(schema) else {})


def _parse(text: str, *, is_sure: bool) -> object:
    """The value of JSON text, or of one of Python's words; the text itself if it is neither.

    Where it `is_sure` to be no text, small mistakes are mended, and a number is bounded by those of float64.
    """
    bare = text.strip()
    if bare in PYTHON_WORDS:
        return PYTHON_WORDS[bare]
    for candidate in (bare, mend_json(bare)) if is_sure else (bare,):
        try:
            return read_json(candidate, bounds_numbers=is_sure)
        except ValueError:
            continue
    return text
