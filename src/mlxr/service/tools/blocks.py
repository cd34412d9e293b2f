"""Reads calls that come in blocks, each between a marker at its beginning and one at its end: those of Gemma 4, Kimi K2
and DeepSeek.

Shared by the formats whose calls are not JSON: a block is given out when it is complete. The format reads its contents
and finds its end, as values may spell the marker.

Gemma 4 writes calls as `<|tool_call>call:NAME{key:value,...}<tool_call|>`. Values are JSON, except that strings stand
between two `<|"|>` and keys have no quotes. Source: the chat template of Gemma 4.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, cast

from mlxr.core.frozen import frozen
from mlxr.service.messages import read_json, write_json
from mlxr.service.reasoning import hold_back
from mlxr.service.requests import Tool
from mlxr.service.tools.arguments import Arguments, JsonEnd, parse
from mlxr.service.tools.format import (
    Asked,
    CallParser,
    CallPiece,
    ToolFormat,
    quote_lark,
    write_argument_rules,
    write_marked_grammar,
    write_rule,
    write_text_without,
)

Call = tuple[str, Mapping[str, object]]  # name and arguments


class EndFinder(Protocol):
    """Looks for the end of one block in a growing text."""

    @property
    def passed(self) -> tuple[int, int] | None:
        """The place of an end marker that was taken for part of a value; it counts if the block never ends."""

    def find(self, text: str) -> tuple[int, int] | None:
        """Return where the end marker begins and ends, None if the block goes on; `text` continues that of the last
        call.
        """


class TagFinder:
    """Finds `end`, unless it stands inside of a value, between `opens` and `closes`."""

    passed = None

    def __init__(self, end: str, opens: str, closes: str) -> None:
        self._end, self._opens, self._closes = end, opens, closes
        tags = (end, opens, closes)
        self._tags, self._longest = re.compile("|".join(map(re.escape, tags))), max(map(len, tags))
        self._place, self._is_inside = 0, False

    def find(self, text: str) -> tuple[int, int] | None:
        """Return where the end marker begins and ends, if it is there."""
        for tag in self._tags.finditer(text, self._place):
            self._place = tag.end()
            if self._is_inside:
                self._is_inside = tag[0] != self._closes
            elif tag[0] == self._end:
                return tag.span()
            else:
                self._is_inside = tag[0] == self._opens
        self._place = max(self._place, len(text) - self._longest + 1)
        return None


class BlockParser(CallParser):
    """Text, and blocks that begin with one of `starts`.

    `open_finder` gets the start of a block and returns a finder of its end. `read` gets the start and the text behind
    it, and returns the calls, None if it is something else. `closing` may come behind the end of a block and is no
    text. `heads` are the beginnings of blocks if a grammar is enforced.
    """

    def __init__(
        self,
        starts: Sequence[str],
        open_finder: Callable[[str], EndFinder],
        read: Callable[[str, str], Iterable[Call] | None],
        closing: str = "",
        heads: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self._heads = heads
        self._starts, self._open_finder, self._read, self._closing = starts, open_finder, read, closing
        self._start = re.compile("|".join(map(re.escape, starts)))
        self._lead = ""  # the marker and the space before it, in case the block turns out to be text
        self._finder: EndFinder | None = None
        self._wants_closing = False

    def _advance(self) -> bool:
        if self._wants_closing:
            return self._read_closing()
        return self._read_text() if self._finder is None else self._read_block(self._finder)

    def _read_text(self) -> bool:
        marker = self._start.search(self._text)
        if marker is not None:
            before = self._text[: marker.start()]
            self._give(before.rstrip())
            self._lead, self._text = before[len(before.rstrip()) :] + marker[0], self._text[marker.end() :]
            self._finder = self._open_finder(marker[0])
            return True
        keep = max(hold_back(self._text, start) for start in self._starts)
        sure = self._text[: len(self._text) - keep].rstrip()
        self._give(sure)
        self._text = self._text[len(sure) :]
        return False

    def _read_block(self, finder: EndFinder) -> bool:
        end = finder.find(self._text)
        if end is None:
            return False
        self._end_block(*end)
        return bool(self._text)

    def _end_block(self, begin: int, end: int) -> None:
        """End the block at `begin`; its end marker goes to `end`."""
        body, marker, self._text = self._text[:begin], self._text[begin:end], self._text[end:]
        self._decide(body, marker)

    def _decide(self, body: str, end: str, *, is_cut: bool = False) -> None:
        """Give out calls of known tools, or text."""
        calls = self._read(self._lead.strip(), body)
        if calls is None and is_cut:
            self._give_begun(self._lead, body, self._heads, is_enforced=bool(self._heads))
        elif calls is None:
            self._give(self._lead + body + end)
        for name, arguments in calls or ():
            if not self.is_over:
                self._found.append(CallPiece(self.calls, write_json(arguments), name))
                self.calls += 1
        self._wants_closing = bool(self._closing) and calls is not None
        self._lead, self._finder = "", None

    def _read_closing(self) -> bool:
        bare = self._text.lstrip()
        if self._closing.startswith(bare) and bare != self._closing:
            return False
        if bare.startswith(self._closing):
            self._text = bare.removeprefix(self._closing)
        self._wants_closing = False  # it may be missing
        return bool(self._text)

    def _end(self) -> None:
        while self._finder is not None and not self.is_over:
            passed = self._finder.passed
            if passed is None or self._read(self._lead.strip(), self._text) is not None:
                self._decide(self._text, "", is_cut=True)
                return
            self._end_block(*passed)
            while not self.is_over and self._advance():
                pass
        if self.is_over:
            return
        if not self._wants_closing:
            self._give_rest(self._text, self._starts)


START, END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
MAX_DEPTH = 100
_HEAD = re.compile(r"\s*call:([^\s{]+)\s*(?=\{)")
_KEY = re.compile(r"\s*([^\s:,{}\[\]<]+)\s*:")
_PLAIN = re.compile(r"\s*(-?[0-9][0-9.eE+-]*|true|false|null|None)\s*")


class Gemma4Format(ToolFormat):
    """See `ToolFormat`. A grammar enforces the names of arguments and the syntax of values, not their types."""

    markers: Sequence[str] = (START, END, QUOTE)

    def open_parser(self, tools: Sequence[Tool], *, is_enforced: bool) -> CallParser:
        """Return a parser of the calls between the markers, which are given out whole."""
        keys = {tool.name: list(Arguments(tool).properties) for tool in tools}
        heads = [f"call:{tool.name}" for tool in tools] if is_enforced else []
        return BlockParser(
            (START,), lambda _: TagFinder(END, QUOTE, QUOTE), lambda _, text: read_block(keys, text), heads=heads
        )

    def _write_grammar(self, asked: Asked) -> str | None:
        """Return a grammar of calls, and of text before them unless there must be a call."""
        start, end, quote = (asked.specials.get(marker, quote_lark(marker)) for marker in self.markers)
        more = f"({start} call)*" if asked.is_parallel else ""
        rules = f"calls: call {more}\n"
        rules += write_rule(
            "call", [f"{quote_lark(f'call:{t.name}')} args_{i} {end}" for i, t in enumerate(asked.tools)]
        )
        for index, tool in enumerate(asked.tools):
            keys = [quote_lark(key) for key in Arguments(tool).properties]
            pair = f"({' | '.join(keys)}) {quote_lark(':')} value" if keys else "pair"
            rules += f'args_{index}: "{{" ({pair} ("," {pair})*)? "}}"\n'
        is_token = QUOTE in asked.specials  # else the marker's spelling ends a string
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
        return write_marked_grammar(START, rules, asked)


def read_block(keys: Mapping[str, Sequence[str]], text: str) -> list[Call] | None:
    """Return the call in the text of one block; None if it calls no tool in `keys`, which has the arguments' names."""
    head = _HEAD.match(text)
    if head is None or head[1] not in keys:
        return None
    try:
        value, place = _read_many(text, head.end(), 0, sorted(keys[head[1]], key=len, reverse=True))
    except ValueError:
        return None
    return [(head[1], value)] if isinstance(value, dict) and not text[place:].strip() else None


def _read_value(text: str, place: int, depth: int) -> tuple[object, int]:
    """Return the value at `place` and its end; raises ValueError if there is none."""
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
    """Return the object or list that begins at `place`, and its end; `known` keys may have any characters."""
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
    """Return the key at `place`, and where its value begins."""
    for key in known:
        if text.startswith(f"{key}:", place):
            return key, place + len(key) + 1
    name = _KEY.match(text, place)
    if name is None:
        raise ValueError("no key")
    return name[1], name.end()


@frozen
class Section:
    """The marks of calls in a section of the answer; a call is a name and a JSON object."""

    start: str
    call: str
    argument: str  # between name and arguments
    call_end: str
    end: str
    prefix: str = ""  # of names, which then have a number
    kind: str = ""  # a word that older models write before the name, with a code fence around the arguments


KIMI = Section(
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
    prefix="functions.",
)
DEEPSEEK = Section(
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
)
FENCE = "\n```json\n"
OLD_DEEPSEEK = replace(DEEPSEEK, kind="function")


class SectionFormat(ToolFormat):
    """The format of Kimi K2 and DeepSeek V3, R1 and V3.1; see `Section`.

    Sources: the chat templates of Kimi-K2-Instruct, DeepSeek-V3, DeepSeek-R1 and DeepSeek-V3.1.
    """

    def __init__(self, marks: Section) -> None:
        self._marks = marks
        self.markers: Sequence[str] = (marks.start, marks.call, marks.argument, marks.call_end, marks.end)

    def prepare_messages(self, messages: list[dict[str, object]], tools: Sequence[Tool]) -> list[dict[str, object]]:
        """Return messages with Kimi's ids of calls: the name and a number, counted through the conversation."""
        del tools
        if not self._marks.prefix:
            return messages
        ids, prepared = dict[object, str](), []
        for message in messages:
            if "tool_calls" in message:
                calls = []
                for call in cast("list[dict[str, Any]]", message["tool_calls"]):
                    own = f"{self._marks.prefix}{call['function']['name']}:{len(ids)}"
                    ids[call.get("id") or own] = own
                    calls.append({**call, "id": own})
                message = {**message, "tool_calls": calls}
            if "tool_call_id" in message:
                message = {**message, "tool_call_id": ids.get(message["tool_call_id"], message["tool_call_id"])}
            prepared.append(message)
        return prepared

    def open_parser(self, tools: Sequence[Tool], *, is_enforced: bool) -> CallParser:
        """Return a parser of the calls of a section, which are given out when the section is complete."""
        marks, names = self._marks, frozenset(tool.name for tool in tools)
        heads = [marks.call] if is_enforced else []
        return BlockParser(
            (marks.start,),
            lambda _: _SectionFinder(marks),
            lambda _, text: read_section(marks, text, names),
            heads=heads,
        )

    def _write_grammar(self, asked: Asked) -> str | None:
        """Return a grammar of calls, and of text before them unless there must be a call."""
        marks = self._marks
        _, call, argument, call_end, end = (asked.specials.get(mark, quote_lark(mark)) for mark in self.markers)
        more, rules = "call*" if asked.is_parallel else "", []
        for index, tool in enumerate(asked.tools):
            name, fence = quote_lark(marks.prefix + tool.name), ("", "")
            if marks.kind:
                name, fence = (
                    f"{quote_lark(marks.kind)} {argument} {quote_lark(tool.name)}",
                    (quote_lark(FENCE), '"\\n```"'),
                )
            elif marks.prefix:
                name += ' ":" NUMBER'
            rules.append(f"{name} {'' if marks.kind else argument} {fence[0]} args_{index} {fence[1]}")
        bodies = write_rule("body", rules) + write_argument_rules(asked.tools)
        number = "NUMBER: /[0-9]{1,4}/\n" if marks.prefix else ""
        first = f"calls: call {more} {end}\ncall: {call} body {call_end}\n"
        return write_marked_grammar(marks.start, first + bodies + number, asked)


class _SectionFinder:
    """Finds the end of a section, outside of a call's arguments; see `EndFinder`."""

    passed = None

    def __init__(self, marks: Section) -> None:
        self._marks, self._place = marks, 0
        self._tags = re.compile(f"{re.escape(marks.argument)}|{re.escape(marks.end)}")
        self._begin: int | None = None
        self._json = JsonEnd()

    def find(self, text: str) -> tuple[int, int] | None:
        """Return where the end marker begins and ends, if it is there."""
        while True:
            if self._begin is not None:
                end = self._json.find(text[self._begin :])
                if end is None:
                    return None
                self._place, self._begin = self._begin + end, None
            tag = self._tags.search(text, self._place)
            if tag is None:
                longest = max(len(self._marks.argument), len(self._marks.end))
                self._place = max(self._place, len(text) - longest + 1)
                return None
            if tag[0] == self._marks.end:
                return tag.span()
            brace, stop = text.find("{", tag.end()), self._tags.search(text, tag.end())
            if stop is not None and not tag.end() <= brace < stop.start():
                self._place = stop.start()
            elif brace < 0:
                self._place = tag.start()
                return None
            else:
                self._begin, self._json = brace, JsonEnd()


def read_section(marks: Section, text: str, names: Collection[str]) -> list[Call] | None:
    """Return the calls in the text of a section without its end; None if one of them calls no known tool."""
    argument = re.escape(marks.argument)
    head = re.compile(
        rf"\s*{re.escape(marks.call)}\s*(?:function\s*{argument})?\s*(?:functions\.)?([^\s<{{]+?)(?::[0-9]+)?\s*"
        rf"(?:{argument})?\s*(?:```json\s*)?(?=\{{)"
    )
    tail, calls, place = re.compile(rf"\s*(?:```)?\s*(?:{re.escape(marks.call_end)})?\s*"), list[Call](), 0
    while place < len(text) or not calls:
        begin = head.match(text, place)
        end = None if begin is None or begin[1] not in names else JsonEnd().find(text[begin.end() :])
        if begin is None or end is None:
            return None
        arguments = parse(text[begin.end() : begin.end() + end], bounds_numbers=True)
        if not isinstance(arguments, dict):
            return None
        calls.append((begin[1], arguments))
        behind = tail.match(text, begin.end() + end)
        place = begin.end() + end if behind is None else behind.end()
    return calls
