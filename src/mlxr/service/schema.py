"""JSON schemas as users write them, rewritten so that the grammar library can hold them while tokens are drawn.

An object that names its properties takes no others unless it says so (`additionalProperties`): a model that may invent
keys does. Keywords that no grammar can hold are left out and named, so that the client can be told. References become
names below `$defs`. Knows JSON Schema (drafts 4 to 2020-12) and what the library cannot do, but no request.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from mlxr.service.schema_document import (
    JOINED,
    JOINERS,
    REFERENCES,
    Document,
    Schema,
    SchemaError,
    find_implied_type,
    is_object,
    read_list,
)

Check = Callable[[Schema], str]
"""Says why the library refuses a schema; empty if it does not."""
HasMoreNames = Callable[[Collection[str], Collection[str]], bool]
"""Says whether an object that has all properties of these names may have others, by these patterns of names."""

MAX_CHECKS = 500  # of parts of one schema; what comes later is left for the library to judge as a whole

# fmt: off
_COPIED = frozenset((
    "type", "enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength",
    "maxLength", "minItems", "maxItems", "required", "minProperties", "maxProperties",
))
_NEVER_HELD = frozenset((
    "not", "contains", "minContains", "maxContains", "dependentRequired", "dependentSchemas", "dependencies",
))
# fmt: on


@dataclass(frozen=True, slots=True)
class Enforceable:
    """A schema for the library, and the keywords of the original that it does not hold, in the order of appearance.

    `heaviest` is how many characters the largest part takes at least, see `schema_size.Sizes`.
    """

    schema: Schema
    relaxed: tuple[str, ...] = ()
    heaviest: int = 0


def make_enforceable(schema: object, check: Check, has_more_names: HasMoreNames, *, closes: bool = True) -> Enforceable:
    """Rewrite `schema`; `check` is asked about the parts that the library may refuse.

    With `closes` off objects take any further properties, as the standard has it. Raises SchemaError for what is no
    schema, and RecursionError for one that is nested too deeply.
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
    """Rewrites one document. `definitions` are what its references became."""

    def __init__(self, root: Schema, check: Check, has_more_names: HasMoreNames, *, closes: bool) -> None:
        self._document, self._check, self._closes = Document(root), check, closes
        self._has_more_names = has_more_names
        self._names: dict[tuple[int, bool], str] = {}
        self._verdicts: dict[str, str] = {}
        self.definitions: Schema = {}
        self.relaxed: dict[str, None] = {}
        self.has_choice = False

    def write(self, schema: object, outer: frozenset[str] = frozenset(), *, is_part: bool = False) -> object:
        """One schema; see `write_object`."""
        if isinstance(schema, bool):
            return schema
        if not is_object(schema):
            raise SchemaError(f"a schema must be an object or a boolean, got {str(schema)[:40]!r}")
        return self.write_object(schema, outer, is_part=is_part)

    def write_object(self, schema: Schema, outer: frozenset[str] = frozenset(), *, is_part: bool = False) -> Schema:
        """A schema that is an object. One that `is_part` of others (`allOf`) is closed by them, not by itself.

        `outer` names properties that the schema around a choice (`anyOf`) allows in each of its branches.
        """
        schema = _unwrap(schema)
        out = {key: value for key, value in schema.items() if key in _COPIED}
        self._write_joined(schema, out, outer, is_part=is_part)
        self._write_text(schema, out)
        self._write_array(schema, out)
        self._write_members(schema, out)
        self._name_relaxed(schema)
        out = {key: out[key] for key in schema if key in out} | out  # properties are asked for in this order
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
        """Why the library refuses a schema, if its words begin so. What nothing can satisfy is not meant here."""
        key = repr(schema)
        if key not in self._verdicts:
            self._verdicts[key] = self._check(schema) if len(self._verdicts) < MAX_CHECKS else ""
        reason = self._verdicts[key]
        return reason if reason.startswith(beginning) and not reason.startswith("Unsatisfiable") else ""

    def _write_joined(self, schema: Schema, out: Schema, outer: frozenset[str], *, is_part: bool) -> None:
        """References, `allOf` and choices."""
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
        """A reference to one of the definitions; nothing for one to another document, which is not at hand."""
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
        """`pattern` and `format`, as far as the library knows them, also together with the lengths."""
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
        """`items` and its kin; a list of items, as in older drafts, is what `prefixItems` is now."""
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
        """Return what the properties of an object may be."""
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
        """`propertyNames` by a pattern or a list, for objects without other rules for names."""
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
        """Let any name pass where the library cannot tell the patterns of names apart."""
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
        """Write patterns that only named properties match as rules of these.

        The library would allow a comma after the last of them, and then nothing.
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
        """A part of `allOf`; one that names a definition with patterns of names is written as that."""
        target = self.definitions.get(str(part.get("$ref")).removeprefix("#/$defs/")) if len(part) == 1 else None
        return dict(target if is_object(target) and "patternProperties" in target else part)

    def _name_relaxed(self, schema: Schema) -> None:
        """Note the keywords that no grammar here can hold."""
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
        """Allow the named properties alone, unless their names were found to be anything."""
        properties = out.get("properties", {})
        if is_object(properties) and "additionalProperties" not in out:
            out["properties"] = {**properties, **{name: True for name in names if name not in properties}}
            out["additionalProperties"] = False

    def _bound_members(self, out: Schema) -> None:
        """Drop `minProperties` and `maxProperties` where the library cannot count."""
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
    """Whether an object names its properties, itself or by the parts of it, and says nothing of others."""
    if len(parts) > 1 and not schema.keys() & JOINERS:
        return False  # a reference alone, which is closed where it leads
    is_named = any(part.keys() & {"properties", "patternProperties"} for part in parts)
    return is_named and not any(
        "additionalProperties" in part or part.get("unevaluatedProperties", False) is not False for part in parts
    )


def _read_members(part: Schema, word: str) -> Schema:
    members = part.get(word)
    return dict(members) if is_object(members) else {}


def _join(rules: list[object]) -> object:
    """One schema for a value that all of them must fit."""
    held = [rule for place, rule in enumerate(rules) if rule is not True and rule not in rules[:place]]
    if False in rules:
        return False
    return {"allOf": held} if len(held) > 1 else held[0] if held else True


def _unwrap(schema: Schema) -> Schema:
    """A schema whose only rules are those of a single part of `allOf` or `anyOf`, written as that part."""
    for key in JOINED:
        parts = schema.get(key)
        if isinstance(parts, list) and len(parts) == 1 and is_object(parts[0]):
            others = {name: value for name, value in schema.items() if name != key}
            if not others.keys() & (_COPIED | JOINERS | {"additionalProperties", *REFERENCES}):
                return _unwrap(others | parts[0])
    return schema


def _check_pattern(pattern: object, reason: str) -> None:
    """Raise SchemaError for a pattern that is broken, and not only beyond the library, as look-around is."""
    try:
        re.compile(str(pattern))
    except (re.error, OverflowError, RecursionError):
        raise SchemaError(f"pattern {str(pattern)[:80]!r} is no regular expression: {reason}") from None
