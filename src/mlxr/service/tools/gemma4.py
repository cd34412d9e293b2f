"""Calls as Gemma 4 writes them: `<|tool_call>call:NAME{key:value,...}<tool_call|>`.

Values are those of JSON, but that strings stand between two `<|"|>` and keys without quotes. Source: the chat template
of Gemma 4.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from mlxr.service.json_text import read_json
from mlxr.service.requests import Tool
from mlxr.service.tools.blocks import BlockParser, Call, TagFinder
from mlxr.service.tools.format import (
    CallParser,
    ToolFormat,
    quote_lark,
    write_marked_grammar,
    write_rule,
    write_text_without,
)
from mlxr.service.tools.values import Arguments

START, END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
MAX_DEPTH = 100
_HEAD = re.compile(r"\s*call:([^\s{]+)\s*(?=\{)")
_KEY = re.compile(r"\s*([^\s:,{}\[\]<]+)\s*:")
_PLAIN = re.compile(r"\s*(-?[0-9][0-9.eE+-]*|true|false|null|None)\s*")


class Gemma4Format(ToolFormat):
    """See `ToolFormat`. Of arguments a grammar enforces the names on top and what values look like, not their types."""

    markers: Sequence[str] = (START, END, QUOTE)

    def open_parser(self, tools: Sequence[Tool], *, is_enforced: bool) -> CallParser:
        """Return a parser of the calls between the markers, which are given out whole."""
        keys = {tool.name: list(Arguments(tool).properties) for tool in tools}
        heads = [f"call:{tool.name}" for tool in tools] if is_enforced else []
        return BlockParser(
            (START,), lambda _: TagFinder(END, QUOTE, QUOTE), lambda _, text: read_block(keys, text), heads=heads
        )

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
        start, end, quote = (specials.get(marker, quote_lark(marker)) for marker in self.markers)
        more = f"({start} call)*" if is_parallel else ""
        rules = f"calls: call {more}\n"
        rules += write_rule("call", [f"{quote_lark(f'call:{t.name}')} args_{i} {end}" for i, t in enumerate(tools)])
        for index, tool in enumerate(tools):
            keys = [quote_lark(key) for key in Arguments(tool).properties]
            pair = f"({' | '.join(keys)}) {quote_lark(':')} value" if keys else "pair"
            rules += f'args_{index}: "{{" ({pair} ("," {pair})*)? "}}"\n'
        is_token = QUOTE in specials  # else a string ends where the marker is spelt
        quoted = f"string: QUOTED? {quote}\nQUOTED: {write_text_without(QUOTE)}\n"
        string = quoted if is_token else f"string[suffix={quote}]: /(?s:.*)/\n"
        rules += string + (
            f'value: {quote} string | NUMBER | "true" | "false" | "null" | object | list\n'
            'object: "{" (pair ("," pair)*)? "}"\n'
            'list: "[" (value ("," value)*)? "]"\n'
            'pair: KEY ":" value\n'
            "KEY: /[^\\s:,{}\\[\\]<]+/\n"
            "NUMBER: /-?(0|[1-9][0-9]{0,99})(\\.[0-9]{1,99})?/\n"
        )
        return write_marked_grammar(START, rules, must_call=must_call, specials=specials, answer=answer)


def read_block(keys: Mapping[str, Sequence[str]], text: str) -> list[Call] | None:
    """The call in the text of one block; None if it is none of the tools, whose arguments `keys` names."""
    head = _HEAD.match(text)
    if head is None or head[1] not in keys:
        return None
    try:
        value, place = _read_many(text, head.end(), 0, sorted(keys[head[1]], key=len, reverse=True))
    except ValueError:
        return None
    return [(head[1], value)] if isinstance(value, dict) and not text[place:].strip() else None


def _read_value(text: str, place: int, depth: int) -> tuple[object, int]:
    """The value at `place` and where it ends; ValueError if there is none."""
    if depth > MAX_DEPTH:
        raise ValueError("too deep")
    if text.startswith(QUOTE, place):
        end = text.index(QUOTE, place + len(QUOTE))
        return text[place + len(QUOTE) : end], end + len(QUOTE)
    if text.startswith(("{", "["), place):
        return _read_many(text, place, depth)
    plain = _PLAIN.match(text, place)
    if plain is None:
        raise ValueError("no value")
    return read_json("null" if plain[1] == "None" else plain[1]), plain.end()


def _read_many(text: str, place: int, depth: int, known: Sequence[str] = ()) -> tuple[object, int]:
    """The object or list that begins at `place`; keys that are `known` may be spelt in any way."""
    is_object = text[place] == "{"
    close, pairs, items = "}" if is_object else "]", dict[str, object](), list[object]()
    place += 1
    while not text.startswith(close, place):
        if items or pairs:
            if not text.startswith(",", place):
                raise ValueError("no comma")
            place += 1
        key = ""
        if is_object and text.startswith(QUOTE, place):
            quoted, place = _read_value(text, place, depth)
            key = str(quoted)
            if not text.startswith(":", place):
                raise ValueError("no colon")
            place += 1
        elif is_object:
            key, place = _read_key(text, place, known)
        value, place = _read_value(text, place, depth + 1)
        if is_object:
            pairs[key] = value
        else:
            items.append(value)
    return (pairs if is_object else items), place + 1


def _read_key(text: str, place: int, known: Sequence[str]) -> tuple[str, int]:
    """The key at `place`, and where its value begins."""
    for key in known:
        if text.startswith(f"{key}:", place):
            return key, place + len(key) + 1
    name = _KEY.match(text, place)
    if name is None:
        raise ValueError("no key")
    return name[1], name.end()
