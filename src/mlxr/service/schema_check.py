"""Which schema the grammar library takes for the one that a client sent. Imports the library, which takes a while."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Collection
from dataclasses import dataclass, replace

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from mlxr.service.schema import Enforceable, make_enforceable
from mlxr.service.schema_document import Schema, SchemaError, is_object

_PLAIN = {"object": 2, "array": 2, "string": 2, "number": 1, "integer": 1, "boolean": 4, "null": 4}
_FORMED_CHARACTERS = 10
_MOST_ROUNDS = 50


@dataclass(frozen=True, slots=True)
class Sizes:
    """Characters of the shortest value as a whole (infinite where there is none), and of the longest such part."""

    whole: float
    heaviest: int


def measure(schema: Schema) -> Sizes:
    """Measure a schema and all of its parts."""
    scale = _Scale(schema.get("$defs"))
    whole = scale.weigh(schema)
    return Sizes(whole, max([0, *(int(size) for size in scale.parts.values() if size < math.inf)]))


class _Scale:
    """`parts` are the sizes of all objects and arrays, by their identity."""

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
        """Characters of the shortest value, as far as the definitions are settled."""
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
            if kind in types or not types:  # those of an unnamed type are parts too
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
_LIMITS = LLParserLimits(verbose_errors=False)


@functools.lru_cache(MAX_KEPT)
def enforce(text: str) -> Enforceable:
    """The schema to hold an answer to, for the JSON text of the one that was asked for.

    Raises SchemaError for text that is no schema, and for a schema that no value fits or that is too large.
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
        # Where objects are joined by going round in circles, they cannot be closed.
        open_one = make_enforceable(schema, find_fault, has_more_names, closes=False)
        if find_fault(open_one.schema, coerces=True):
            raise SchemaError(reason)
        return Enforceable(open_one.schema, (*open_one.relaxed, "additionalProperties"), sizes.heaviest)
    except RecursionError:
        raise SchemaError("the schema is nested too deeply") from None


def find_fault(schema: Schema, *, coerces: bool = False) -> str:
    """Why the library refuses a schema, in one line; empty if it takes it. With `coerces` oneOf counts as anyOf."""
    options = {"x-guidance": {"coerce_one_of": True}} if coerces else {}
    grammar = json.dumps({"grammars": [{"json_schema": {**schema, **options}}]})
    return summarize(LLMatcher.validate_grammar(grammar, None, limits=_LIMITS))


def has_more_names(names: Collection[str], patterns: Collection[str]) -> bool:
    """Whether an object that has all properties of these names may have others, by these patterns of names."""
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
    matcher = LLMatcher(tokenizer, json.dumps({"grammars": [{"json_schema": schema}]}), limits=_LIMITS, log_level=0)
    text = "{" + "".join(json.dumps(name, ensure_ascii=False) + ":null," for name in names) + '"'
    token_ids = tokenizer.tokenize_bytes(text.encode())
    return matcher.try_consume_tokens(token_ids) != len(token_ids) - 1


@functools.cache
def _open_bytes() -> LLTokenizer:
    """A vocabulary of single bytes."""
    return LLTokenizer("byte")


def summarize(text: str) -> str:
    """Return what the library says, without the lines that show the grammar."""
    lines = text.splitlines() or [""]
    reasons = [line for line in lines[1:] if line.startswith("error: ")]
    return " ".join([lines[0], *reasons])[:MAX_REASON_CHARACTERS]
