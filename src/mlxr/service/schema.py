"""Reads JSON schemas: resolves references, lists the properties, and rewrites a schema for the grammar library.

Knows JSON Schema, and nothing of grammars.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any, TypeGuard
from urllib.parse import unquote

from mlxr.core.frozen import frozen

Schema = dict[str, object]

JOINED = ("allOf", "anyOf", "oneOf")
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
# Keywords that make a reference beside them one part of several, not the whole schema.
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
    """A value is no valid schema; says why."""


def is_object(value: object) -> TypeGuard[Schema]:
    """Return True if a value of a JSON document is an object."""
    return isinstance(value, dict)


def read_list(key: str, value: object) -> list[object]:
    """Return the value of a keyword that must be an array; raises SchemaError if it is none."""
    if not isinstance(value, list):
        raise SchemaError(f"{key} must be an array, got {str(value)[:40]}")
    return value


def find_implied_type(schema: Schema) -> str | None:
    """Return the type that a schema implies by having keywords of that type alone; None if it implies none."""
    kinds = [kind for kind, keys in _IMPLIED_TYPES.items() if keys & schema.keys()]
    return kinds[0] if len(kinds) == 1 and not _RULES_OUT_TYPE & schema.keys() else None


class Document:
    """A schema document, in which its references are looked up."""

    def __init__(self, root: Schema) -> None:
        self._root = root

    def find(self, reference: object) -> Schema | bool | None:
        """Return the schema that a reference names; None if it names another document.

        Raises SchemaError if the reference is malformed or leads nowhere in this document.
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
        """Return the schema itself and those that hold together with it, by `allOf` and references."""
        seen = set() if seen is None else seen
        if id(schema) in seen:
            return []
        seen.add(id(schema))
        all_of = schema.get("allOf")
        others = list(all_of) if isinstance(all_of, list) else []
        others += [self.find(schema[key]) for key in REFERENCES if key in schema]
        return [schema, *(part for other in others if is_object(other) for part in self.list_parts(other, seen))]

    def list_names(self, schema: object, seen: set[int] | None = None) -> dict[str, None]:
        """Return all properties that a schema or its branches name, in the order of appearance."""
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
        """Return the schemas below a keyword that describe the same value."""
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
    """Yield the schemas anywhere in a document in which one of `keys` has the value `wanted`."""
    if is_object(value):
        if any(value.get(key) in (wanted, f"#{wanted}") for key in keys):
            yield value
        for part in value.values():
            yield from _search(part, keys, wanted)
    elif isinstance(value, list):
        for part in value:
            yield from _search(part, keys, wanted)


Check = Callable[[Schema], str]
"""Returns the reason why the library refuses a schema; empty if it takes it."""
HasMoreNames = Callable[[Collection[str], Collection[str]], bool]
"""Returns True if an object that has all properties of these names may have others, by these patterns of names."""

MAX_CHECKS = 500  # of parts of one schema; later parts are not checked by themselves

# fmt: off
_COPIED = frozenset((
    "type", "enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength",
    "maxLength", "minItems", "maxItems", "required", "minProperties", "maxProperties",
))
_NEVER_HELD = frozenset((
    "not", "contains", "minContains", "maxContains", "dependentRequired", "dependentSchemas", "dependencies",
))
# fmt: on


@frozen
class Enforceable:
    """A schema for the library, and the keywords of the original that it does not enforce, in order of appearance.

    `heaviest` is the least number of characters of the largest part, see `Sizes`.
    """

    schema: Schema
    relaxed: tuple[str, ...] = ()
    heaviest: int = 0


def make_enforceable(schema: object, check: Check, has_more_names: HasMoreNames, *, closes: bool = True) -> Enforceable:
    """Rewrite `schema`; `check` is asked about the parts that the library may refuse.

    Without `closes` objects take any further properties, as the standard says. Raises SchemaError if it is no schema,
    and RecursionError if it is nested too deeply.
    """
    if schema is True:
        return Enforceable({})
    if not is_object(schema):
        raise SchemaError(f"the schema must be an object, got {str(schema)[:40].lower()}")
    writer = _Writer(schema, check, has_more_names, closes=closes)
    body = writer.write_object(schema)
    if writer.definitions:
        body["$defs"] = writer.definitions
    if writer.has_choice and writer.refuses(body, "oneOf constraints"):
        writer.relaxed["oneOf"] = None
    return Enforceable(body, tuple(writer.relaxed))


class _Writer:
    """Rewrites one document. `definitions` are the rewritten schemas that its references name."""

    def __init__(self, root: Schema, check: Check, has_more_names: HasMoreNames, *, closes: bool) -> None:
        self._document, self._check, self._closes = Document(root), check, closes
        self._has_more_names = has_more_names
        self._names: dict[tuple[int, bool], str] = {}
        self._verdicts: dict[str, str] = {}
        self.definitions: Schema = {}
        self.relaxed: dict[str, None] = {}
        self.has_choice = False

    def write(self, schema: object, outer: frozenset[str] = frozenset(), *, is_part: bool = False) -> object:
        """Rewrite one schema; see `write_object`."""
        if isinstance(schema, bool):
            return schema
        if not is_object(schema):
            raise SchemaError(f"a schema must be an object or a boolean, got {str(schema)[:40]!r}")
        return self.write_object(schema, outer, is_part=is_part)

    def write_object(self, schema: Schema, outer: frozenset[str] = frozenset(), *, is_part: bool = False) -> Schema:
        """Rewrite a schema that is an object. One that `is_part` of others (`allOf`) is closed by them, not by itself.

        `outer` names properties that the schema around a choice (`anyOf`) allows in each of its branches.
        """
        schema = _unwrap(schema)
        out = {key: value for key, value in schema.items() if key in _COPIED}
        self._write_joined(schema, out, outer, is_part=is_part)
        self._write_text(schema, out)
        self._write_array(schema, out)
        self._write_members(schema, out)
        self._name_relaxed(schema)
        out = {key: out[key] for key in schema if key in out} | out  # properties are written in this order
        if is_part:
            return out
        implied = find_implied_type(schema)
        if implied is not None:
            out["type"] = implied
        parts = self._document.list_parts(schema)
        if self._closes and _must_close(schema, parts):
            self._close(out, [*self._document.list_names(schema), *sorted(outer)])
            if not any(part.keys() & {"type", "enum", "const", "anyOf", "oneOf"} for part in parts):
                out["type"] = "object"
        self._spend_patterns(out)
        self._bound_members(out)
        return out

    def refuses(self, schema: Schema, beginning: str = "") -> str:
        """Return the library's reason to refuse a schema, if it begins with `beginning`; "" for unsatisfiable ones."""
        key = repr(schema)
        if key not in self._verdicts:
            self._verdicts[key] = self._check(schema) if len(self._verdicts) < MAX_CHECKS else ""
        reason = self._verdicts[key]
        return reason if reason.startswith(beginning) and not reason.startswith("Unsatisfiable") else ""

    def _write_joined(self, schema: Schema, out: Schema, outer: frozenset[str], *, is_part: bool) -> None:
        """Rewrite references, `allOf` and choices."""
        for key in REFERENCES:
            if key in schema:
                out |= self._write_reference(schema[key], is_part=is_part or bool(schema.keys() & JOINERS))
        if "allOf" in schema:
            out["allOf"] = [self.write(part, is_part=True) for part in read_list("allOf", schema["allOf"])]
        for key in ("anyOf", "oneOf"):
            if key in schema:
                around = self._document.list_names({**schema, key: []})
                branches = read_list(key, schema[key])
                out[key] = [self.write(branch, outer | around.keys()) for branch in branches]
                self.has_choice = self.has_choice or key == "oneOf"

    def _write_reference(self, value: object, *, is_part: bool) -> Schema:
        """Return a reference to one of the definitions; empty if it names another document, which is not at hand."""
        target = self._document.find(value)
        if target is None:
            self.relaxed["$ref"] = None
            return {}
        if isinstance(target, bool):
            return {} if target else {"enum": []}
        key = (id(target), is_part)
        if key not in self._names:
            taken = set(self._names.values())
            stem = re.sub(r"[^A-Za-z0-9_.-]", "_", str(value).rpartition("/")[2]) or "root"
            number = 1
            while (name := stem if number == 1 else f"{stem}-{number}") in taken:
                number += 1
            self._names[key] = name
            self.definitions[name] = self.write(target, is_part=is_part)
        return {"$ref": f"#/$defs/{self._names[key]}"}

    def _write_text(self, schema: Schema, out: Schema) -> None:
        """Rewrite `pattern` and `format`, as far as the library knows them, also together with the lengths."""
        wanted: Schema = {key: schema[key] for key in ("format", "pattern") if key in schema}
        lengths: Schema = {key: schema[key] for key in ("minLength", "maxLength") if key in schema}
        for key, value in list(wanted.items()):
            reason = self.refuses({"type": "string", key: value}, "Unknown" if key == "format" else "")
            if reason and key == "pattern":
                _check_pattern(value, reason)
            if reason or self.refuses({"type": "string", **wanted, **lengths}, "Unable to determine"):
                self.relaxed[key] = None
                del wanted[key]
        out |= wanted

    def _write_array(self, schema: Schema, out: Schema) -> None:
        """Rewrite `items` and its kin; a list in `items`, as in older drafts, becomes `prefixItems`."""
        items, first = schema.get("items"), schema.get("prefixItems")
        if isinstance(items, list):
            items, first = schema.get("additionalItems"), items
        if items is None and not schema.keys() & {"$ref", *JOINED}:
            items = schema.get("unevaluatedItems")
        if first is not None:
            out["prefixItems"] = [self.write(part) for part in read_list("prefixItems", first)]
        if items is not None:
            out["items"] = self.write(items)

    def _write_members(self, schema: Schema, out: Schema) -> None:
        """Rewrite the rules for properties of an object."""
        for key in ("properties", "patternProperties"):
            members = schema.get(key, {})
            if not is_object(members):
                raise SchemaError(f"{key} must be an object, got {str(members)[:40]}")
            if key in schema:
                out[key] = {name: self.write(member) for name, member in members.items()}
        others = schema.get("additionalProperties")
        if others is None and not schema.keys() & {"$ref", *JOINED}:
            others = schema.get("unevaluatedProperties")
        if others is not None:
            out["additionalProperties"] = self.write(others)
        self._write_names(schema, out)
        self._drop_patterns(out)

    def _write_names(self, schema: Schema, out: Schema) -> None:
        """Rewrite `propertyNames` with a pattern or a list, for objects without other rules for names."""
        rule, others = schema.get("propertyNames", True), out.get("additionalProperties", True)
        if rule is True:
            return
        is_alone = not schema.keys() & {"$ref", *JOINERS}
        keys = set(rule) - {"type"} if is_object(rule) else set()
        if is_object(rule) and is_alone and keys == {"pattern"}:
            out |= {"patternProperties": {str(rule["pattern"]): others}, "additionalProperties": False}
        elif is_object(rule) and is_alone and keys == {"enum"}:
            names = [str(name) for name in read_list("enum", rule["enum"])]
            out |= {"properties": dict.fromkeys(names, others), "additionalProperties": False}
        else:
            self.relaxed["propertyNames"] = None

    def _drop_patterns(self, out: Schema) -> None:
        """Allow any name if the library cannot tell the patterns of names apart."""
        patterns = out.get("patternProperties")
        if not is_object(patterns):
            return
        if self.refuses({"type": "object", "patternProperties": dict.fromkeys(patterns, True)}):
            for pattern in patterns:
                if reason := self.refuses({"type": "string", "pattern": pattern}):
                    _check_pattern(pattern, reason)
            self.relaxed["patternProperties"] = None
            del out["patternProperties"]
            out["additionalProperties"] = next(iter(patterns.values())) if len(patterns) == 1 else True

    def _spend_patterns(self, out: Schema) -> None:
        """Write patterns that only named properties match as rules of these properties.

        Otherwise the library would allow a comma after the last property, and then nothing.
        """
        inner = [self._write_out(part) for part in read_list("allOf", out.get("allOf", [])) if is_object(part)]
        parts = [out, *inner]
        names = {name for part in parts for name in _read_members(part, "properties")}
        patterns = {key: rule for part in parts for key, rule in _read_members(part, "patternProperties").items()}
        is_closed = any(part.get("additionalProperties") is False for part in parts)
        allowed = [pattern for pattern, rule in patterns.items() if rule is not False]
        if not (patterns and names and is_closed) or self._has_more_names(sorted(names), allowed):
            return
        if inner:
            out["allOf"] = inner
        for part in parts:
            own, known = _read_members(part, "patternProperties"), _read_members(part, "properties")
            part.pop("patternProperties", None)
            for name in sorted(names):
                rules = [rule for pattern, rule in own.items() if re.search(pattern, name)]
                if rules:
                    known[name] = _join([known.get(name, True), *rules])
            if known:
                part["properties"] = known

    def _write_out(self, part: Schema) -> Schema:
        """Return a part of `allOf`; a definition with patterns of names replaces a reference to it."""
        target = self.definitions.get(str(part.get("$ref")).removeprefix("#/$defs/")) if len(part) == 1 else None
        return dict(target if is_object(target) and "patternProperties" in target else part)

    def _name_relaxed(self, schema: Schema) -> None:
        """Note the keywords that no grammar here can enforce."""
        is_joined = bool(schema.keys() & {"$ref", *JOINED})
        for key, value in schema.items():
            is_noted = (
                key in _NEVER_HELD
                or (key == "uniqueItems" and value is True)
                or (key == "if" and bool(schema.keys() & {"then", "else"}))
                or (key == "unevaluatedItems" and is_joined)
            )
            if is_noted:
                self.relaxed[key] = None

    def _close(self, out: Schema, names: list[str]) -> None:
        """Allow only the named properties, unless any names are allowed."""
        properties = out.get("properties", {})
        if is_object(properties) and "additionalProperties" not in out:
            out["properties"] = {**properties, **{name: True for name in names if name not in properties}}
            out["additionalProperties"] = False

    def _bound_members(self, out: Schema) -> None:
        """Drop `minProperties` and `maxProperties` if the library cannot count properties."""
        bounds: Schema = {key: out[key] for key in ("minProperties", "maxProperties") if key in out}
        if not bounds:
            return
        shape: Schema = {"type": "object", **{key: out[key] for key in ("required",) if key in out}}
        for key in ("properties", "patternProperties"):
            members = out.get(key)
            if is_object(members):
                shape[key] = dict.fromkeys(members, True)
        if out.get("additionalProperties") is False:
            shape["additionalProperties"] = False
        if self.refuses({**shape, **bounds}, "min/max"):
            self.relaxed |= dict.fromkeys(bounds)
            for key in bounds:
                del out[key]


def _must_close(schema: Schema, parts: list[Schema]) -> bool:
    """Return True if an object or its parts name properties, and none of them says whether others are allowed."""
    if len(parts) > 1 and not schema.keys() & JOINERS:
        return False  # a reference alone; the schema that it names is closed
    is_named = any(part.keys() & {"properties", "patternProperties"} for part in parts)
    return is_named and not any(
        "additionalProperties" in part or part.get("unevaluatedProperties", False) is not False for part in parts
    )


def _read_members(part: Schema, word: str) -> Schema:
    members = part.get(word)
    return dict(members) if is_object(members) else {}


def _join(rules: list[object]) -> object:
    """Return one schema for a value that must fit all of these rules."""
    held = [rule for place, rule in enumerate(rules) if rule is not True and rule not in rules[:place]]
    if False in rules:
        return False
    return {"allOf": held} if len(held) > 1 else held[0] if held else True


def _unwrap(schema: Schema) -> Schema:
    """Return the single part of `allOf` or `anyOf` if the schema has no other rules, else the schema."""
    for key in JOINED:
        parts = schema.get(key)
        if isinstance(parts, list) and len(parts) == 1 and is_object(parts[0]):
            others = {name: value for name, value in schema.items() if name != key}
            if not others.keys() & (_COPIED | JOINERS | {"additionalProperties", *REFERENCES}):
                return _unwrap(others | parts[0])
    return schema


def _check_pattern(pattern: object, reason: str) -> None:
    """Raise SchemaError if a pattern is broken, not if it is only beyond the library, as look-around is."""
    try:
        re.compile(str(pattern))
    except (re.error, OverflowError, RecursionError):
        raise SchemaError(f"pattern {str(pattern)[:80]!r} is no regular expression: {reason}") from None


_PLAIN = {"object": 2, "array": 2, "string": 2, "number": 1, "integer": 1, "boolean": 4, "null": 4}
_FORMED_CHARACTERS = 10
_MOST_ROUNDS = 50


@frozen
class Sizes:
    """The characters of a schema's shortest value (infinite if there is none), and of the longest part of it."""

    whole: float
    heaviest: int


def measure(schema: Schema) -> Sizes:
    """Measure a schema and all of its parts."""
    scale = _Scale(schema.get("$defs"))
    whole = scale.weigh(schema)
    return Sizes(whole, max([0, *(int(size) for size in scale.parts.values() if size < math.inf)]))


class _Scale:
    """Measures schemas. `parts` are the sizes of all objects and arrays, by their identity."""

    def __init__(self, definitions: object) -> None:
        self._definitions: Schema = definitions if is_object(definitions) else {}
        self._known = dict.fromkeys(self._definitions, math.inf)
        self.parts: dict[int, float] = {}
        for _ in range(_MOST_ROUNDS):
            before = dict(self._known)
            for name, part in reversed(self._definitions.items()):  # the inner ones come last
                self._known[name] = self.weigh(part)
            if before == self._known:
                break

    def weigh(self, schema: object) -> float:
        """Return the characters of the shortest value, by what is known of the definitions so far."""
        if not is_object(schema):
            return 1 if schema is True else math.inf
        sizes = [1.0]
        for key, value in schema.items():
            if key == "$ref":
                sizes.append(self._known.get(str(value).rpartition("/")[2], 1.0))
            elif key == "allOf" and isinstance(value, list):
                sizes += map(self.weigh, value)
            elif key in ("anyOf", "oneOf") and isinstance(value, list):
                sizes.append(min(map(self.weigh, value), default=math.inf))
            elif key == "const":
                sizes.append(len(json.dumps(value)))
            elif key == "enum" and isinstance(value, list):
                sizes.append(min((len(json.dumps(option)) for option in value), default=math.inf))
        sizes.append(self._weigh_types(schema))
        return max(sizes)

    def _weigh_types(self, schema: Schema) -> float:
        wanted = schema.get("type")
        types = [wanted] if isinstance(wanted, str) else wanted if isinstance(wanted, list) else []
        sizes: dict[str, float] = {**_PLAIN, "string": _weigh_string(schema)}
        for kind, weigh in (("object", self._weigh_object), ("array", self._weigh_array)):
            if kind in types or not types:  # without a type they count as parts too
                sizes[kind] = self.parts[id(schema)] = weigh(schema)
        return min((sizes.get(kind, 1.0) for kind in types), default=1.0)

    def _weigh_object(self, schema: Schema) -> float:
        properties, required = schema.get("properties"), schema.get("required")
        members = properties if is_object(properties) else {}
        sizes = {name: self.weigh(member) for name, member in members.items()}
        names = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
        others = self.weigh(schema.get("additionalProperties", True))
        return 2 + sum(len(name) + 4 + sizes.get(name, others) for name in names)

    def _weigh_array(self, schema: Schema) -> float:
        first, count = schema.get("prefixItems"), schema.get("minItems", 0)
        parts = [self.weigh(part) for part in first] if isinstance(first, list) else []
        item = self.weigh(schema.get("items", True))
        wanted = count if isinstance(count, int) else 0
        more = max(0, wanted - len(parts))
        return 2 + sum(parts[:wanted]) + (more * (item + 1) if more else 0)


def _weigh_string(schema: Schema) -> float:
    shortest = schema.get("minLength", 0)
    formed = _FORMED_CHARACTERS if schema.keys() & {"pattern", "format"} else 0
    return 2 + max(formed, shortest if isinstance(shortest, int) else 0)


MAX_KEPT = 64
MAX_REASON_CHARACTERS = 300


@functools.lru_cache(MAX_KEPT)
def enforce(text: str) -> Enforceable:
    """Return the enforceable form of a requested schema, given as JSON text.

    Raises SchemaError if the text is no schema, or if no value fits the schema or it is too large.
    """
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SchemaError(f"the schema is not JSON: {error}") from None
    try:
        closed = make_enforceable(schema, find_fault, has_more_names)
        reason = find_fault(closed.schema, coerces=True)
        sizes = measure(closed.schema)
        if not reason and math.isinf(sizes.whole):
            raise SchemaError("no value fits the schema, as it asks for itself without end")
        if not reason:
            return replace(closed, heaviest=sizes.heaviest)
        # Objects that are joined by circular references cannot be closed.
        open_one = make_enforceable(schema, find_fault, has_more_names, closes=False)
        if find_fault(open_one.schema, coerces=True):
            raise SchemaError(reason)
        return Enforceable(open_one.schema, (*open_one.relaxed, "additionalProperties"), sizes.heaviest)
    except RecursionError:
        raise SchemaError("the schema is nested too deeply") from None


def find_fault(schema: Schema, *, coerces: bool = False) -> str:
    """Return the library's reason to refuse a schema, in one line; empty if it takes it. With `coerces`, oneOf counts
    as anyOf.
    """
    from llguidance import LLMatcher, LLParserLimits  # the library takes a while to import

    options = {"x-guidance": {"coerce_one_of": True}} if coerces else {}
    grammar = json.dumps({"grammars": [{"json_schema": {**schema, **options}}]})
    return summarize(LLMatcher.validate_grammar(grammar, None, limits=LLParserLimits(verbose_errors=False)))


def has_more_names(names: Collection[str], patterns: Collection[str]) -> bool:
    """Return True if an object that has all properties of these names may have others, by these patterns of names."""
    from llguidance import LLMatcher, LLParserLimits

    null = {"type": "null"}
    schema = {
        "type": "object",
        "properties": dict.fromkeys(names, null),
        "patternProperties": dict.fromkeys(patterns, null),
        "required": list(names),
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
    tokenizer = _open_bytes()
    limits = LLParserLimits(verbose_errors=False)
    matcher = LLMatcher(tokenizer, json.dumps({"grammars": [{"json_schema": schema}]}), limits=limits, log_level=0)
    text = "{" + "".join(json.dumps(name, ensure_ascii=False) + ":null," for name in names) + '"'
    token_ids = tokenizer.tokenize_bytes(text.encode())
    return matcher.try_consume_tokens(token_ids) != len(token_ids) - 1


@functools.cache
def _open_bytes() -> Any:
    """Return a tokenizer whose tokens are single bytes."""
    from llguidance import LLTokenizer

    return LLTokenizer("byte")


def summarize(text: str) -> str:
    """Return the library's error message without the lines that show the grammar."""
    lines = text.splitlines() or [""]
    reasons = [line for line in lines[1:] if line.startswith("error: ")]
    return " ".join([lines[0], *reasons])[:MAX_REASON_CHARACTERS]
