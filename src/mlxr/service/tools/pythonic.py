"""Calls as Python writes them, between two markers: `name(key="value", other=1)`.

Values are Python's or JSON's. Shared by OLMo 3, which writes a call on each line, and LFM 2, which writes a list.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import cast

from mlxr.service.messages import read_json, write_json
from mlxr.service.reasoning import hold_back
from mlxr.service.requests import Tool
from mlxr.service.tools.arguments import PYTHON_WORDS, Arguments
from mlxr.service.tools.blocks import BlockParser, Call
from mlxr.service.tools.format import Asked, CallParser, ToolFormat, quote_lark, write_marked_grammar, write_rule

_NAMES: Mapping[str, object] = {"true": True, "false": False, "null": None}  # unknown to Python
_CALL = re.compile(r"\s*([^\s(]+)\((.*)\)\s*", re.DOTALL)
_PAIR = re.compile(r"\s*([^\s=,()\"']+)\s*=\s*(.+)", re.DOTALL)
_QUOTED = re.compile(r"([\"'])(.*)\1", re.DOTALL)
_SIGNS = re.compile(r"\\.|[\"'\[\]{}()\n,]", re.DOTALL)


class PythonicFormat(ToolFormat):
    """Calls between `start` and `end`, in `brackets` with `separator` between them."""

    def __init__(self, start: str, end: str, brackets: str = "", separator: str = "\n") -> None:
        self.markers: Sequence[str] = (start, end)
        self._opens, self._closes = brackets[:1], brackets[1:]
        self._separator = separator

    def open_parser(self, tools: Sequence[Tool], *, is_enforced: bool) -> CallParser:
        """Return a parser that gives calls when they are complete."""
        start, end = self.markers
        by_name = {tool.name: tool for tool in tools}
        read = partial(read_calls, by_name, self._opens + self._closes, is_strict=is_enforced)
        heads = [f"{self._opens}{tool.name}(" for tool in tools] if is_enforced else []
        return BlockParser((start,), lambda _: _Finder(end, read), lambda _, text: read(text), heads=heads)

    def _write_grammar(self, asked: Asked) -> str | None:
        """Return a grammar of calls, and of text before them unless there must be a call."""
        start, end = self.markers
        more = f"({quote_lark(self._separator)} call)*" if asked.is_parallel else ""
        opens, closes = (quote_lark(sign) if sign else "" for sign in (self._opens, self._closes))
        rules = f"calls: {opens} call {more} {closes} {asked.specials.get(end, quote_lark(end))}\n"
        rules += write_rule("call", [f"call_{index}" for index in range(len(asked.tools))])
        rules += "".join(_write_call_rules(f"call_{index}", tool) for index, tool in enumerate(asked.tools))
        return write_marked_grammar(start, rules, asked)

    def write_calls(self, calls: Sequence[object]) -> str:
        """Write earlier calls, given as in messages, in the way of the model."""
        functions = (cast("Mapping[str, Mapping[str, object]]", call)["function"] for call in calls)
        written = [f"{function['name']}({_write_arguments(function['arguments'])})" for function in functions]
        start, end = self.markers
        return f"{start}{self._opens}{self._separator.join(written)}{self._closes}{end}"


class _Finder:
    """Finds the end of a block outside of quotes; see `EndFinder`.

    If quotes are nested, an end marker counts if `read` finds calls before it.
    """

    def __init__(self, end: str, read: Callable[[str], object]) -> None:
        self._end, self._read = end, read
        self._signs = re.compile(rf"\\.|[\"']|{re.escape(end)}", re.DOTALL)
        self._place, self._quote = 0, ""
        self.passed: tuple[int, int] | None = None

    def find(self, text: str) -> tuple[int, int] | None:
        """Return where the end marker begins and ends, if it is there."""
        for sign in self._signs.finditer(text, self._place):
            self._place = sign.end()
            if sign[0] == self._end:
                if not self._quote or self._read(text[: sign.start()]) is not None:
                    return sign.span()
                self.passed = self.passed or sign.span()
            elif sign[0] in "\"'":
                self._quote = sign[0] if not self._quote else "" if sign[0] == self._quote else self._quote
        rest = text[self._place :]
        self._place = len(text) - (hold_back(rest, self._end) or rest.endswith("\\"))
        return None


def _write_call_rules(rule: str, tool: Tool) -> str:
    """Return one rule for the calls of one tool: required arguments first, then optional ones in the schema's order."""
    schemas = Arguments(tool)
    required, properties = schemas.required, schemas.properties
    keys = [*required, *(key for key in properties if key not in required)]
    values = ""
    for index, key in enumerate(keys):
        words = '"True" | "False" | ' if schemas.list_types(key) == frozenset({"boolean"}) else ""
        values += f"{rule}_value_{index}: {words}{rule}_json_{index}\n"
        values += f"{rule}_json_{index}: {schemas.write_json(properties[key])}\n"
    arguments = [f"{quote_lark(f'{key}=')} {rule}_value_{index}" for index, key in enumerate(keys)]
    if required:
        body = ' ", " '.join(arguments[: len(required)]) + _write_rest(arguments[len(required) :])
    else:
        begins = [f"{argument}{_write_rest(arguments[index + 1 :])}" for index, argument in enumerate(arguments)]
        body = f"({' | '.join(begins)})?" if begins else ""
    return f'{rule}: {quote_lark(tool.name + "(")} {body} ")"\n{values}'


def _write_rest(arguments: Sequence[str]) -> str:
    """Return the part of a rule for arguments that may follow others."""
    return "".join(f' (", " {argument})?' for argument in arguments)


def _write_arguments(arguments: object) -> str:
    pairs = cast("Mapping[str, object]", arguments).items()
    return ", ".join(f"{key}={_write_value(value)}" for key, value in pairs)


def _write_value(value: object) -> str:
    """Write a value as Python does, its texts as JSON does."""
    if isinstance(value, str):
        return write_json(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{write_json(str(key))}: {_write_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_write_value, value)) + "]"
    return repr(value)


def read_calls(tools: Mapping[str, Tool], brackets: str, text: str, *, is_strict: bool) -> list[Call] | None:
    """Return the calls in a text, perhaps a list in `brackets`; None if there is none, or other text beside them.

    If a grammar was enforced (`is_strict`), quotes are in order, and numbers are bounded by those of float64.
    """
    text = text.strip()
    if brackets and text.startswith(brackets[0]) and text.endswith(brackets[1]):
        text = text[1:-1]
    try:
        return [_read_call(part, tools, is_strict=is_strict) for part in _split(text, ",\n")] or None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        call = None if is_strict else _read_loosely(text, tools)
        return None if call is None else [call]


def _read_call(text: str, tools: Mapping[str, Tool], *, is_strict: bool) -> Call:
    """Return one call; raises ValueError or SyntaxError if it calls no known tool."""
    call = _CALL.fullmatch(text)
    if call is None or call[1] not in tools:
        raise ValueError
    keys = sorted(Arguments(tools[call[1]]).properties, key=len, reverse=True)
    arguments = {}
    for part in _split(call[2], ","):
        key = next((key for key in keys if part.lstrip().startswith(f"{key}=")), None)
        pair = _PAIR.fullmatch(part)
        if key is not None:
            arguments[key] = _read_value(part.lstrip()[len(key) + 1 :], is_strict=is_strict)
        elif pair is not None:
            arguments[pair[1]] = _read_value(pair[2], is_strict=is_strict)
        else:
            raise ValueError
    return call[1], arguments


def _read_loosely(text: str, tools: Mapping[str, Tool]) -> Call | None:
    """Read a call with quotes inside of a quoted text, as LFM 2.5's template writes: names separate the arguments."""
    call = _CALL.fullmatch(text)
    keys = Arguments(tools[call[1]]).properties if call is not None and call[1] in tools else {}
    if call is None or not keys:
        return None
    begin = rf"(?:^|,)\s*({'|'.join(map(re.escape, keys))})\s*=\s*"
    rest, *parts = re.split(begin, call[2].strip())
    arguments = {}
    for key, value in zip(parts[::2], parts[1::2], strict=True):
        quoted = _QUOTED.fullmatch(value.strip())
        try:
            arguments[key] = _read_value(value, is_strict=False) if quoted is None else quoted[2]
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None
    return (call[1], arguments) if parts and not rest.strip() else None


def _split(text: str, separators: str) -> Iterator[str]:
    """Yield the parts of a text between separators outside of quotes and brackets, without empty ones."""
    begin, depth, quote = 0, 0, ""
    for sign in _SIGNS.finditer(text):
        if sign[0][0] == "\\":
            continue
        if quote or sign[0] in "\"'":
            quote = sign[0] if not quote else "" if sign[0] == quote else quote
        elif sign[0] in "([{":
            depth += 1
        elif sign[0] in ")]}":
            depth -= 1
        elif depth == 0 and sign[0] in separators:
            if text[begin : sign.start()].strip():
                yield text[begin : sign.start()]
            begin = sign.end()
    if text[begin:].strip():
        yield text[begin:]


def _read_value(text: str, *, is_strict: bool) -> object:
    """Return a value that JSON or Python wrote; raises ValueError or SyntaxError for anything else."""
    bare = text.strip()
    if bare in PYTHON_WORDS:
        return PYTHON_WORDS[bare]
    try:
        return read_json(bare, bounds_numbers=is_strict)
    except ValueError:
        return _read_node(ast.parse(bare, mode="eval").body)


def _read_node(node: ast.expr) -> object:
    """Return a JSON value, or one of Python's that JSON can express."""
    match node:
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.List(elts=items):
            return [_read_node(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_read_key(key): _read_node(value) for key, value in zip(keys, values, strict=True)}
    value = ast.literal_eval(node)
    if value is not None and not isinstance(value, bool | int | float | str):
        raise ValueError
    json.dumps(value, allow_nan=False)  # raises ValueError for numbers that JSON cannot express
    return value


def _read_key(node: ast.expr | None) -> str:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        raise ValueError
    return node.value


LFM2_START, LFM2_END = "<|tool_call_start|>", "<|tool_call_end|>"
LFM2_MARKS = (LFM2_START, "<|tool_list_start|>", "List of tools: [")


class Lfm2Format(PythonicFormat):
    """The format of LFM 2: a list of calls in Python; with `shows_calls` the template shows earlier calls itself."""

    def __init__(self, *, shows_calls: bool) -> None:
        super().__init__(LFM2_START, LFM2_END, "[]", ", ")
        self._shows_calls = shows_calls

    def prepare_messages(self, messages: list[dict[str, object]], tools: Sequence[Tool]) -> list[dict[str, object]]:
        """Return messages with earlier calls as the text that the model wrote, if the template leaves them out."""
        del tools
        return messages if self._shows_calls else [self._write_message(message) for message in messages]

    def _write_message(self, message: dict[str, object]) -> dict[str, object]:
        if "tool_calls" not in message:
            return message
        calls = self.write_calls(cast("Sequence[object]", message["tool_calls"]))
        return {**message, "content": f"{message['content']}{calls}"}


OLMO_START, OLMO_END = "<function_calls>", "</function_calls>"


class Olmo3Format(PythonicFormat):
    """The format of OLMo 3: calls in Python, between two tags."""

    def __init__(self) -> None:
        super().__init__(OLMO_START, OLMO_END)
