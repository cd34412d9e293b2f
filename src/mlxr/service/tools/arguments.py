"""Reads one JSON object that calls a tool out of a growing text, and the values of arguments that are not JSON.

If a grammar keeps the object well-formed, its arguments are given out as they come. Otherwise nothing is given out
until the object is complete and known to be a call, as it could not be taken back.

In some formats arguments have no types. The schema of a tool then says whether a value is plain text or JSON; parser
and grammar use the same functions, so both agree. Python's words for true, false and null are understood, as chat
templates write these.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import cast

from mlxr.service.messages import JsonMender, mend_json, read_json, write_json
from mlxr.service.reasoning import hold_back
from mlxr.service.requests import Tool
from mlxr.service.schema import JOINED, REFERENCES, Document, Schema, SchemaError, find_implied_type, is_object
from mlxr.service.tools.format import JSON_STYLE, CallPiece, quote_lark

_INSIDE = re.compile(r'["\\]')
_HEAD = re.compile(
    r'\s*\{\s*(?:"tool_call_id"\s*:\s*"[^"]*"\s*,\s*)?"(?:tool_)?name"\s*:\s*"([^"]*)"\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


class JsonEnd:
    """Finds the end of a JSON object or list in a growing text: by its brackets, or before one of `stops`."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops, self._longest = stops, max(map(len, stops), default=0)
        self._outside = re.compile("|".join([r'["{}\[\]]', *map(re.escape, stops)]))
        self._place = self._depth = 0
        self._is_in_string = self.is_stopped = False

    def find(self, text: str) -> int | None:
        """Return the position of the value's end, None if it goes on; `text` continues that of the last call."""
        while True:
            sign = (_INSIDE if self._is_in_string else self._outside).search(text, self._place)
            if sign is None:
                rest = text[max(self._place, len(text) - self._longest) :]
                held = max((hold_back(rest, stop) for stop in self._stops), default=0)
                self._place = len(text) - (0 if self._is_in_string else held)
                return None
            if sign[0] == "\\":
                if sign.end() == len(text):
                    self._place = sign.start()
                    return None
                self._place = sign.end() + 1
                continue
            if sign[0] in self._stops:
                self.is_stopped, self._place = True, sign.start()
                return self._place
            self._place = sign.end()
            if sign[0] == '"':
                self._is_in_string = not self._is_in_string
            else:
                self._depth += 1 if sign[0] in "{[" else -1
                if self._depth <= 0:
                    return self._place

    @property
    def certain(self) -> int:
        """The number of characters that certainly belong to the value."""
        return self._place

    def may_begin(self, text: str) -> bool:
        """Return True if an unfinished text may become an object, or one of the stops that stand for none."""
        bare = text.lstrip()
        return bare[:1] in ("", "{") or any(stop.startswith(bare) for stop in self._stops)

    @property
    def misses_bracket(self) -> bool:
        """True if only the last bracket is missing."""
        return self._depth == 1 and not self._is_in_string


class ArgumentsReader:
    """The arguments, a JSON object, of call number `number`, whose name is known already.

    `raw` is all text of it so far; if it `is_broken`, it is no such object. It ends before one of `stops` at the
    latest; an empty text before one means no arguments.
    """

    def __init__(self, number: int, name: str | None, *, is_enforced: bool, stops: Sequence[str] = ()) -> None:
        self._number, self._name = number, name
        self._mender = JsonMender() if is_enforced else None
        self._end = JsonEnd(stops)
        self._scanned = 0
        self.raw = ""
        self.is_complete = self.is_broken = False

    def push(self, text: str) -> tuple[list[CallPiece], str]:
        """Return pieces of the call, and the text after it (only when it is complete or broken)."""
        self.raw += text
        end, rest = self._end.find(self.raw), ""
        if end is not None:
            self.raw, rest = self.raw[:end], self.raw[end:]
        is_empty = self._end.is_stopped and not self.raw.strip()
        if self._mender is not None and not is_empty:
            return self._stream(self._mender, is_whole=end is not None and not self._end.is_stopped), rest
        if end is None:
            self.is_broken = not self._end.may_begin(self.raw)
            if self.is_broken:
                self.raw, rest = self.raw[: self._end.certain], self.raw[self._end.certain :]
            return [], rest
        arguments = {} if is_empty else parse(self.raw)
        self.is_complete = isinstance(arguments, dict)
        self.is_broken = not self.is_complete
        return [CallPiece(self._number, write_json(arguments), self._name)] if self.is_complete else [], rest

    def finish(self) -> list[CallPiece]:
        """Return nothing: arguments that are incomplete when the answer ends make no call."""
        return []

    def _stream(self, mender: JsonMender, *, is_whole: bool) -> list[CallPiece]:
        """Return the new text of the arguments."""
        self.is_complete = is_whole
        if not self.raw.strip():
            return []
        certain = min(self._end.certain, len(self.raw))
        fresh, self._scanned = mender.push(self.raw[self._scanned : certain]), certain
        name, self._name = self._name, None if fresh else self._name
        return [CallPiece(self._number, fresh, name)] if fresh else []


class CallReader:
    """Call number `number`, an object with name and arguments, whose text begins with `{`; see `ArgumentsReader`.

    Before one of `stops`, or at the end of the answer, its last bracket may be missing.
    """

    def __init__(
        self,
        number: int,
        names: Collection[str],
        keys: Sequence[str],
        *,
        is_enforced: bool,
        needs_arguments: bool = False,
        stops: Sequence[str] = (),
    ) -> None:
        self._number, self._names, self._keys = number, names, keys
        self._needs_arguments = needs_arguments
        self._streams = is_enforced
        self._arguments: ArgumentsReader | None = None
        self._closing = ""  # the text behind the arguments; only space so far
        self._end = JsonEnd(stops)
        self.raw = ""
        self.is_complete = self.is_broken = False

    def push(self, text: str) -> tuple[list[CallPiece], str]:
        """Return pieces of the call, and the text after it (only when it is complete or broken)."""
        self.raw += text
        if self._arguments is None and self._streams:
            head = _HEAD.match(self.raw)
            if head is not None and head[1] in self._names:
                self._arguments = ArgumentsReader(self._number, head[1], is_enforced=True)
                text = self.raw[head.end() :]
        return self._gather() if self._arguments is None else self._stream(self._arguments, text)

    def finish(self) -> list[CallPiece]:
        """Return the call, if only its last bracket is missing when the answer ends."""
        return [] if self._arguments is not None else self._decide()

    def _gather(self) -> tuple[list[CallPiece], str]:
        """Wait for the whole object."""
        end = self._end.find(self.raw)
        if end is None:
            return [], ""
        self.raw, rest = self.raw[:end], self.raw[end:]
        return self._decide(), rest

    def _decide(self) -> list[CallPiece]:
        """Return the call, or nothing if the object is none."""
        is_short = self._end.misses_bracket and self.raw.rstrip().endswith("}")
        text = self.raw + "}" * is_short
        call = read_call(text, self._names, self._keys, needs_arguments=self._needs_arguments)
        self.is_complete, self.is_broken = call is not None, call is None
        return [] if call is None else [CallPiece(self._number, call[1], call[0])]

    def _stream(self, arguments: ArgumentsReader, text: str) -> tuple[list[CallPiece], str]:
        """Give out the arguments as they come, and read the closing bracket."""
        pieces: list[CallPiece] = []
        if not arguments.is_complete:
            pieces, text = arguments.push(text)
        if not arguments.is_complete:
            return pieces, ""
        self._closing += text
        bare = self._closing.lstrip()
        self.is_complete = bool(bare)
        return pieces, bare.removeprefix("}")


def read_call(
    text: str, names: Collection[str], keys: Sequence[str], *, needs_arguments: bool
) -> tuple[str, str] | None:
    """Read name and arguments (JSON text) of a call written as one JSON object; None if it calls no known tool.

    Arguments may be left out, null or an empty text, unless it `needs_arguments`.
    """
    value = parse(text)
    name = value.get("name", value.get("tool_name")) if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(name, str) or name not in names:
        return None
    arguments: object = next((value[key] for key in keys if key in value), None)
    if arguments in (None, "") and not needs_arguments:
        arguments = {}
    if isinstance(arguments, str):  # some models write the object as a string
        arguments = parse(arguments)
    return (name, write_json(arguments)) if isinstance(arguments, dict) else None


def parse(text: str, *, bounds_numbers: bool = False) -> object:
    """Return the value of JSON text, small mistakes mended; None if it is no JSON. See `read_json` for numbers."""
    try:
        return read_json(text, bounds_numbers=bounds_numbers)
    except ValueError:
        pass
    try:
        return read_json(mend_json(text), bounds_numbers=bounds_numbers)
    except ValueError:
        return None


PYTHON_WORDS: Mapping[str, object] = {"True": True, "False": False, "None": None}
_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_UNIONS = ("anyOf", "oneOf")
# Keywords beside a choice or a reference that do not limit the value.
_ANNOTATIONS = frozenset(("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"))
Types = frozenset[str]
"""JSON's names of types; "number" always comes with "integer"."""


class Arguments:
    """The arguments of one tool: `properties` are their schemas in order, `required` those that must be there.

    Rules by references and `allOf` count as the schema's own; arguments of only one branch of a choice are optional.
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
        """Return the value of an argument from its `text`; see `read_value`."""
        return read_value(text, self.properties.get(key), self._document)

    def list_types(self, key: str) -> Types | None:
        """Return the types that an argument may have, None if the schema does not say."""
        return list_types(self.properties.get(key), self._document)

    def write_value_rule(self, rule: str, key: str, end: str) -> str:
        """Return the Lark rule named `rule`: one value and then `end`, a part of a rule. It needs the rule `text`: any
        text with `end` behind it.
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
        """Return the part of a Lark rule for JSON of one argument's schema."""
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
    """Return the value that `text` stands for by its schema; the text itself if it can be nothing else.

    References are looked up in `document`.
    """
    types = list_types(schema, document or _make_document(schema))
    if types == frozenset({"string"}):
        return text
    may_be_text = types is None or "string" in types
    value = _read_value(text, is_sure=not may_be_text)
    kind = _NAMES.get(type(value), "null")
    return text if may_be_text and (kind == "string" or not (types is None or kind in types)) else value


def list_types(schema: object, document: Document, seen: frozenset[int] = frozenset()) -> Types | None:
    """Return the types that a schema allows, None if it does not say. Schemas in `seen` are already being looked at."""
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
    """Return the types that the schema's own keywords allow."""
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
    """Yield the schemas that hold together with this one."""
    parts = schema.get("allOf")
    yield from parts if isinstance(parts, list) else ()
    for key in REFERENCES:
        if key in schema:
            try:
                yield document.find(schema[key])
            except SchemaError:
                continue


def _list_union(schema: object, document: Document, seen: frozenset[int] = frozenset()) -> Iterator[object]:
    """Yield the schemas of which a value must fit one: the branches of choices that stand alone."""
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
    """Return the values of a schema that allows only some values, among them a text; None for any other schema."""
    values, types = _list_values(schema, document, frozenset()), list_types(schema, document)
    fitting = [value for value in values or () if types is None or _NAMES.get(type(value), "null") in types]
    return fitting if any(isinstance(value, str) for value in fitting) else None


def _list_values(schema: object, document: Document, seen: frozenset[int]) -> list[object] | None:
    """Return the values of a schema that allows only some, by its lists of values; None for any other."""
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


def _read_value(text: str, *, is_sure: bool) -> object:
    """Return the value of JSON text, or of one of Python's words; the text itself if it is neither.

    If it `is_sure` to be no text, small mistakes are mended, and numbers are bounded by those of float64.
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
