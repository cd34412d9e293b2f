"""The functions of Go templates as Jinja expressions.

Each takes the arguments as (expression, kind) and gives one such pair; a ValueError says why it cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mlxr.templates.go_fields import KINDS

Typed = tuple[str, str]
_COMPARISONS = {"ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


def write_json(expression: str) -> str:
    """JSON as Go writes it: without spaces, and with what HTML gives a meaning spelt out."""
    escaped = "".join(f"|replace('{char}', '\\\\u{ord(char):04x}')" for char in "&<>")
    return f"({expression}|tojson(separators=(',', ':')){escaped})"


def call(name: str, arguments: Sequence[Typed]) -> Typed:
    """Return what the function `name` gives; raises ValueError for an unknown one, or for wrong arguments."""
    if name in _COMPARISONS:
        left, right = _take(arguments, 2)
        return f"({left[0]} {_COMPARISONS[name]} {right[0]})", "bool"
    function = _FUNCTIONS.get(name)
    if function is None:
        raise ValueError(f"the function {name[:40]} is not supported")
    return function(arguments)


def _take(arguments: Sequence[Typed], count: int) -> Sequence[Typed]:
    if len(arguments) != count:
        raise ValueError(f"a function takes {count} arguments and gets {len(arguments)}")
    return arguments


def _choose(word: str) -> Callable[[Sequence[Typed]], Typed]:
    def join(arguments: Sequence[Typed]) -> Typed:
        if not arguments:
            raise ValueError(f"{word} takes at least one argument")
        kinds = {kind for _, kind in arguments}
        return f"({f' {word} '.join(text for text, _ in arguments)})", kinds.pop() if len(kinds) == 1 else "value"

    return join


def _equal(arguments: Sequence[Typed]) -> Typed:
    """The first is one of the others."""
    if len(arguments) < 2:
        raise ValueError("eq takes at least two arguments")
    first, *others = arguments
    return f"({' or '.join(f'{first[0]} == {other}' for other, _ in others)})", "bool"


def _negate(arguments: Sequence[Typed]) -> Typed:
    ((text, _),) = _take(arguments, 1)
    return f"(not {text})", "bool"


def _count(arguments: Sequence[Typed]) -> Typed:
    ((text, kind),) = _take(arguments, 1)
    if kind == "text":
        raise ValueError("len of a text counts bytes, which a chat template cannot")
    return f"(({text} or [])|length)", "number"


def _slice(arguments: Sequence[Typed]) -> Typed:
    (text, kind), *bounds = arguments or [("", "")]
    if not 0 < len(bounds) <= 2 or not KINDS[kind].item or KINDS[kind].is_map:
        raise ValueError("slice takes a list and one or two positions")
    return f"({text})[{bounds[0][0]}:{bounds[1][0] if len(bounds) == 2 else ''}]", kind


def _index(arguments: Sequence[Typed]) -> Typed:
    (text, kind), (key, _) = _take(arguments, 2)
    if not KINDS[kind].item:
        raise ValueError("index takes a list or a map, and a position or a key")
    return f"({text})[{key}]", KINDS[kind].item


def _json(arguments: Sequence[Typed]) -> Typed:
    ((text, _),) = _take(arguments, 1)
    return write_json(text), "text"


def _date(arguments: Sequence[Typed]) -> Typed:
    _take(arguments, 0)
    return "strftime_now('%Y-%m-%d')", "text"


_FUNCTIONS: Mapping[str, Callable[[Sequence[Typed]], Typed]] = {
    "and": _choose("and"),
    "or": _choose("or"),
    "not": _negate,
    "eq": _equal,
    "len": _count,
    "slice": _slice,
    "index": _index,
    "json": _json,
    "currentDate": _date,
}
