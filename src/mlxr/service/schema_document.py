"""A JSON schema as a document: what its references stand for, and which properties a schema and its parts name.

Knows JSON Schema, and nothing of grammars.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeGuard
from urllib.parse import unquote

Schema = dict[str, object]

JOINED = ("allOf", "anyOf", "oneOf")
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
# Keywords beside which a reference is one part of several, and not the whole schema.
JOINERS = frozenset(("properties", "patternProperties", "required", *JOINED))
_CONDITIONS = ("if", "then", "else")
_DEPENDENT = ("dependentSchemas", "dependentRequired", "dependencies")
_IMPLIED_TYPES = {
    "object": {"properties", "patternProperties", "required", "additionalProperties", "propertyNames"},
    "array": {"items", "prefixItems", "minItems", "maxItems", "uniqueItems"},
    "string": {"pattern", "minLength", "maxLength", "format"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
}
_RULES_OUT_TYPE = frozenset(("type", "enum", "const", "not", "if", *REFERENCES, *JOINED))


class SchemaError(ValueError):
    """Says what is wrong with a schema that is none."""


def is_object(value: object) -> TypeGuard[Schema]:
    """Whether a value of a JSON document is an object."""
    return isinstance(value, dict)


def read_list(key: str, value: object) -> list[object]:
    """The value of a keyword that must be an array; raises SchemaError."""
    if not isinstance(value, list):
        raise SchemaError(f"{key} must be an array, got {str(value)[:40]}")
    return value


def find_implied_type(schema: Schema) -> str | None:
    """The type that a schema means without saying so, as it has the keywords of that one alone."""
    kinds = [kind for kind, keys in _IMPLIED_TYPES.items() if keys & schema.keys()]
    return kinds[0] if len(kinds) == 1 and not _RULES_OUT_TYPE & schema.keys() else None


class Document:
    """One document; all of its references are looked up in it."""

    def __init__(self, root: Schema) -> None:
        self._root = root

    def find(self, reference: object) -> Schema | bool | None:
        """Return what a reference stands for; None where it names another document.

        Raises SchemaError for a reference that is none, or that leads nowhere in this document.
        """
        if not isinstance(reference, str):
            raise SchemaError(f"$ref must be a string, got {str(reference)[:40]}")
        base, _, fragment = reference.partition("#")
        own = str(self._root.get("$id", self._root.get("id", ""))).partition("#")[0]
        if base and base != own:
            return next(_search(self._root, ("$id", "id"), base), None)
        target: object = self._root
        if fragment and not fragment.startswith("/"):
            target = next(_search(self._root, ("$anchor", "$dynamicAnchor", "$id", "id"), fragment), None)
        for part in unquote(fragment).split("/")[1:]:
            target = _step(target, part.replace("~1", "/").replace("~0", "~"))
        if not isinstance(target, bool) and not is_object(target):
            raise SchemaError(f"$ref {reference[:80]!r} leads nowhere")
        return target

    def list_parts(self, schema: Schema, seen: set[int] | None = None) -> list[Schema]:
        """The schema itself and all that hold together with it: `allOf`, and references."""
        seen = set() if seen is None else seen
        if id(schema) in seen:
            return []
        seen.add(id(schema))
        all_of = schema.get("allOf")
        others = list(all_of) if isinstance(all_of, list) else []
        others += [self.find(schema[key]) for key in REFERENCES if key in schema]
        return [schema, *(part for other in others if is_object(other) for part in self.list_parts(other, seen))]

    def list_names(self, schema: object, seen: set[int] | None = None) -> dict[str, None]:
        """All properties that a schema names, also those of its branches, in the order of appearance."""
        seen = set() if seen is None else seen
        if not is_object(schema) or id(schema) in seen:
            return {}
        seen.add(id(schema))
        names: dict[str, None] = {}
        for key, value in schema.items():
            if key == "properties" and is_object(value):
                names |= dict.fromkeys(value)
            elif key == "required" and isinstance(value, list):
                names |= {name: None for name in value if isinstance(name, str)}
            for part in self._list_branches(key, value):
                names |= self.list_names(part, seen)
        return names

    def _list_branches(self, key: str, value: object) -> list[object]:
        """The schemas below a keyword that speak of the same value."""
        if key in JOINED and isinstance(value, list):
            return value
        if key in REFERENCES:
            return [self.find(value)]
        if key in _DEPENDENT and is_object(value):
            return [{"required": part} if isinstance(part, list) else part for part in value.values()]
        return [value] if key in _CONDITIONS else []


def _step(target: object, name: str) -> object:
    if is_object(target):
        return target.get(name)
    is_index = isinstance(target, list) and name.isascii() and name.isdigit() and int(name) < len(target)
    return target[int(name)] if isinstance(target, list) and is_index else None


def _search(value: object, keys: tuple[str, ...], wanted: str) -> Iterator[Schema]:
    """Schemas anywhere in a document that one of `keys` names so."""
    if is_object(value):
        if any(value.get(key) in (wanted, f"#{wanted}") for key in keys):
            yield value
        for part in value.values():
            yield from _search(part, keys, wanted)
    elif isinstance(value, list):
        for part in value:
            yield from _search(part, keys, wanted)
