"""JSON schemas of growing difficulty, the same ones every time: what number `index` asks for depends on it alone.

Sizes are bounded, so that an answer of some hundred tokens can satisfy each of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
WORDS = ["alpha", "beta", "gamma", "delta", "name", "size", "count", "kind", "path", "owner", "state", "level"]
PATTERNS = (
    "^[a-z]{2,8}$",
    "^[A-Z]{3}-[0-9]{2,4}$",
    "^(red|green|blue)$",
    "^v[0-9]+\\.[0-9]$",
    "^[^ ]{1,6}$",
    "^\\d{3}$",
)
FORMATS = ("date", "time", "date-time", "email", "ipv4", "ipv6", "uuid", "hostname", "uri", "duration")


def make_schema(index: int) -> Schema:
    """Schema number `index`, from 0; its depth and width grow with it."""
    draw = random.Random(index)
    level = index // 40  # 0 to 4 for 200 schemas
    if level == 0:
        return _make_leaf(draw, index)
    return draw.choice(_CONTAINERS[: 2 + 2 * level])(draw, level)


def _make_leaf(draw: random.Random, index: int | None = None) -> Schema:
    makers = _LEAVES
    return makers[draw.randrange(len(makers)) if index is None else index % len(makers)](draw)


def _make_part(draw: random.Random, level: int) -> Schema:
    """Make a schema for the inside of a container: mostly leaves, sometimes a smaller container."""
    if level > 1 and draw.random() < 0.4:
        return draw.choice(_CONTAINERS[:4])(draw, level - 2)
    return _make_leaf(draw)


def _string(draw: random.Random) -> Schema:
    low = draw.randrange(4)
    return {"type": "string", "minLength": low, "maxLength": low + draw.randrange(1, 16)}


def _integer(draw: random.Random) -> Schema:
    low = draw.randrange(-500, 500)
    return {"type": "integer", "minimum": low, "maximum": low + draw.choice([0, 1, 9, 77, 12345])}


def _open_integer(draw: random.Random) -> Schema:
    return {"type": "integer", "exclusiveMinimum": draw.randrange(-9, 9), "exclusiveMaximum": draw.randrange(11, 999)}


def _number(draw: random.Random) -> Schema:
    low = round(draw.uniform(-50, 50), 2)
    return {"type": "number", "minimum": low, "maximum": low + round(draw.uniform(0.5, 90), 1)}


def _multiple(draw: random.Random) -> Schema:
    return {"type": "integer", "multipleOf": draw.choice([2, 5, 7, 10]), "minimum": 0, "maximum": 2000}


def _enum(draw: random.Random) -> Schema:
    values = [*WORDS, 1, 2.5, None, True, 'a "quoted" word', "naïve ☃", [1, 2]]
    return {"enum": draw.sample(values, draw.randrange(1, 6))}


def _const(draw: random.Random) -> Schema:
    return {"const": draw.choice(["fixed", 42, -1.5, None, False, {"nested": ["yes", 1]}, "line\nbreak \\ tab\t"])}


def _flag(draw: random.Random) -> Schema:
    kind = draw.choice(["boolean", "null", ["boolean", "null"], ["boolean", "integer"]])
    return {"type": kind, "minimum": 0, "maximum": 99}


def _pattern(draw: random.Random) -> Schema:
    return {"type": "string", "pattern": draw.choice(PATTERNS)}


def _format(draw: random.Random) -> Schema:
    return {"type": "string", "format": draw.choice(FORMATS)}


def _all_of(draw: random.Random) -> Schema:
    low = draw.randrange(5)
    if draw.random() < 0.5:
        return {"allOf": [{"type": "string", "minLength": low}, {"maxLength": low + 4}]}
    return {"allOf": [{"type": "integer", "minimum": low}, {"maximum": low + 40}], "multipleOf": 3}


def _object(draw: random.Random, level: int) -> Schema:
    names = draw.sample(WORDS, draw.randrange(1, 3 + level))
    required = [name for name in names if draw.random() < 0.7]
    properties = {name: _make_part(draw, level) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _array(draw: random.Random, level: int) -> Schema:
    low = draw.randrange(3)
    return {"type": "array", "items": _make_part(draw, level), "minItems": low, "maxItems": low + draw.randrange(1, 3)}


def _tuple(draw: random.Random, level: int) -> Schema:
    parts = [_make_part(draw, level) for _ in range(draw.randrange(1, 4))]
    return {"type": "array", "prefixItems": parts, "minItems": len(parts), "items": False}


def _any_of(draw: random.Random, level: int) -> Schema:
    return {"anyOf": [_make_part(draw, level) for _ in range(draw.randrange(2, 4))]}


def _map(draw: random.Random, _: int) -> Schema:
    name = draw.choice(WORDS)
    return {
        "type": "object",
        "properties": {name: _make_leaf(draw)},
        "required": [name],
        "patternProperties": {"^x_[a-c]{1,2}$": {"type": "integer", "minimum": 0, "maximum": 9}},
        "additionalProperties": False,
    }


def _referring(draw: random.Random, level: int) -> Schema:
    parts = {"$defs": {"part": _make_part(draw, level), "kind": _enum(draw)}}
    names = draw.sample(WORDS, 3)
    targets = ["#/$defs/part", "#/$defs/kind", "#/$defs/part"]
    properties = {name: {"$ref": target} for name, target in zip(names, targets, strict=True)}
    return parts | {"type": "object", "properties": properties, "required": names[:2], "additionalProperties": False}


def _tree(draw: random.Random, _: int) -> Schema:
    """Recursive, and bounded only by the few children that a node may have."""
    node = {
        "type": "object",
        "properties": {
            "value": _make_leaf(draw),
            "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1},
        },
        "required": ["value"],
        "additionalProperties": False,
    }
    return {"$defs": {"node": node}, "$ref": "#/$defs/node"}


def _tagged(draw: random.Random, level: int) -> Schema:
    """One of several records, told apart by a constant."""
    records = []
    for kind in draw.sample(WORDS, 3):
        properties = {"type": {"const": kind}, "value": _make_part(draw, level)}
        records.append(
            {"type": "object", "properties": properties, "required": ["type"], "additionalProperties": False}
        )
    return {"oneOf": records}


_LEAVES: tuple[Callable[[random.Random], Schema], ...] = (
    _string,
    _integer,
    _open_integer,
    _number,
    _multiple,
    _enum,
    _const,
    _flag,
    _pattern,
    _format,
    _all_of,
)
_CONTAINERS: tuple[Callable[[random.Random, int], Schema], ...] = (
    _object,
    _array,
    _tuple,
    _any_of,
    _map,
    _referring,
    _object,
    _tagged,
    _tree,
    _object,
)
