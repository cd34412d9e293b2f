"""Calls as OLMo 3 writes them: `<function_calls>name(key="value", other=1)</function_calls>`, one call on a line.

Values are JSON, and at times what Python writes instead. Source: the chat template of allenai/Olmo-3-7B-Instruct.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import cast

from mlxr.service.reasoning import hold_back
from mlxr.service.requests import Tool
from mlxr.service.tools.format import (
    JSON_STYLE,
    CallParser,
    CallPiece,
    ToolFormat,
    quote_lark,
    write_marked_grammar,
    write_rule,
)

START, END = "<function_calls>", "</function_calls>"
_NAMES: Mapping[str, object] = {"true": True, "false": False, "null": None}  # that Python has not
_CALL = re.compile(r"\s*([^\s(]+)\((.*)\)\s*")
_KEY = re.compile(r"\s*(?:,\s*)?([^\s=,()\"]+)\s*=\s*")
_JSON = json.JSONDecoder()


class Olmo3Format(ToolFormat):
    """Tool calls as OLMo 3 writes them: as calls in Python, between two tags."""

    markers: Sequence[str] = (START, END)

    def open_parser(self, tools: Sequence[Tool], *, is_enforced: bool) -> CallParser:
        """Return a parser that gives calls when they are complete."""
        del is_enforced
        return Olmo3Parser(frozenset(tool.name for tool in tools))

    def write_grammar(
        self,
        tools: Sequence[Tool],
        *,
        must_call: bool,
        is_parallel: bool,
        specials: Mapping[str, str],
        answer: str | None = None,
    ) -> str | None:
        """Calls, and text before them unless there must be a call."""
        more = '("\\n" call)*' if is_parallel else ""
        rules = f"calls: call {more} {specials.get(END, quote_lark(END))}\n"
        rules += write_rule("call", [f"call_{index}" for index in range(len(tools))])
        rules += "".join(_write_call_rules(f"call_{index}", tool) for index, tool in enumerate(tools))
        return write_marked_grammar(START, rules, must_call=must_call, specials=specials, answer=answer)


def _write_call_rules(rule: str, tool: Tool) -> str:
    """One rule for the calls of one tool: first what it requires, then, in the schema's order, what it does not."""
    properties = cast("Mapping[str, Mapping[str, object]]", tool.parameters.get("properties", {}))
    required = [key for key in cast("Sequence[str]", tool.parameters.get("required", ())) if key in properties]
    keys = required + [key for key in properties if key not in required]
    definitions = {"$defs": tool.parameters.get("$defs", {}), "x-guidance": JSON_STYLE}
    values = "".join(
        f"{rule}_value_{index}: %json {json.dumps({**properties[key], **definitions})}\n"
        for index, key in enumerate(keys)
    )
    arguments = [f"{quote_lark(f'{key}=')} {rule}_value_{index}" for index, key in enumerate(keys)]
    if required:
        body = ' ", " '.join(arguments[: len(required)]) + _write_rest(arguments[len(required) :])
    else:
        begins = [f"{argument}{_write_rest(arguments[index + 1 :])}" for index, argument in enumerate(arguments)]
        body = f"({' | '.join(begins)})?" if begins else ""
    return f'{rule}: {quote_lark(tool.name + "(")} {body} ")"\n{values}'


def _write_rest(arguments: Sequence[str]) -> str:
    """Arguments that may follow others."""
    return "".join(f' (", " {argument})?' for argument in arguments)


class Olmo3Parser(CallParser):
    """Text, and lines of calls between the markers."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__()
        self._names = names
        self._lead = ""  # the marker and the space before it, should what follows be text

    def _advance(self) -> bool:
        if self._lead:
            body, end, after = self._text.partition(END)
            if end:
                self._text = after
                self._read(body, end)
            return bool(end)
        before, marker, after = self._text.partition(START)
        keep = "" if marker else before[len(before) - hold_back(before, START) :]
        sure = before[: len(before) - len(keep)].rstrip()
        self._give(sure)
        self._lead, self._text = (before[len(sure) :] + marker, after) if marker else ("", before[len(sure) :])
        return bool(marker)

    def _read(self, body: str, end: str) -> None:
        """Give the calls, or all of it as text where there is something else among them."""
        calls = _parse_calls(body, self._names)
        if calls is None:
            self._give(self._lead + body + end)
        for name, arguments in calls or ():
            if not self.is_over:
                self._found.append(CallPiece(self.calls, arguments, name))
                self.calls += 1
        self._lead = ""

    def _end(self) -> None:
        if self._lead:
            self._read(self._text, "")
        elif not self.calls or self._text.strip():
            self._give(self._text)


def _parse_calls(text: str, names: frozenset[str]) -> list[tuple[str, str]] | None:
    """Names and arguments (JSON text) of the calls, None where there is none or something else beside them."""
    try:
        return [_read_call(line, names) for line in text.strip().split("\n")]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _read_call(line: str, names: frozenset[str]) -> tuple[str, str]:
    """One call; ValueError or SyntaxError where it is none of a known tool."""
    call = _CALL.fullmatch(line)
    if call is None or call[1] not in names:
        raise ValueError
    try:
        arguments = _read_arguments(call[2])
    except ValueError:  # not JSON
        arguments = _read_python(call[2])
    return call[1], json.dumps(arguments, ensure_ascii=False, allow_nan=False)


def _read_arguments(text: str) -> dict[str, object]:
    """Arguments with JSON values, whose names need not be Python's."""
    at, found = 0, {}
    while text[at:].strip():
        key = _KEY.match(text, at)
        if key is None:
            raise ValueError
        found[key[1]], at = _JSON.raw_decode(text, key.end())
    return found


def _read_python(text: str) -> dict[str, object]:
    """Arguments as Python writes them, with strings in other quotes and True, False and None."""
    call = ast.parse(f"f({text})", mode="eval").body
    if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
        raise ValueError
    return {str(keyword.arg): _read_value(keyword.value) for keyword in call.keywords}


def _read_value(node: ast.expr) -> object:
    """A JSON value, or one of Python's that JSON can say."""
    match node:
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.List(elts=items):
            return [_read_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_read_key(key): _read_value(value) for key, value in zip(keys, values, strict=True)}
    value = ast.literal_eval(node)
    if value is not None and not isinstance(value, bool | int | float | str):
        raise ValueError
    return value


def _read_key(node: ast.expr | None) -> str:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        raise ValueError
    return node.value
