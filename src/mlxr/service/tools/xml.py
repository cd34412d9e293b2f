"""Calls as XML-like tags: GLM 4.5 to 4.7, and Qwen3-Coder, Qwen 3.5, Nemotron 3 and Seed-OSS.

GLM writes `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`; up to GLM 4.6 every part
stands on a line of its own. Qwen writes `<function=NAME>`, and `<parameter=KEY>` for each argument, on lines of their
own between `<tool_call>` and `</tool_call>`; models forget the first of these. Seed-OSS writes the same between
`<seed:tool_call>` and `</seed:tool_call>`, with values on the lines of their tags. MiniMax M2 writes `<invoke
name="NAME">` and `<parameter name="KEY">`, and has all calls between `<minimax:tool_call>` and `</minimax:tool_call>`.
Sources: the chat templates of GLM-4.5, GLM-4.6, GLM-4.7-Flash, Qwen3-Coder, Qwen3.5-4B,
NVIDIA-Nemotron-3-Nano-30B-A3B, Seed-OSS-36B-Instruct and MiniMax-M2.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from mlxr.service.reasoning import hold_back
from mlxr.service.requests import Tool
from mlxr.service.tools.arguments import Arguments
from mlxr.service.tools.blocks import BlockParser, Call, TagFinder
from mlxr.service.tools.format import (
    Asked,
    CallParser,
    ToolFormat,
    quote_lark,
    write_marked_grammar,
    write_rule,
    write_text_without,
)

GLM_START, GLM_END = "<tool_call>", "</tool_call>"
ARG_KEY, ARG_KEY_END, ARG_VALUE, ARG_VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_PAIR = re.compile(rf"\s*{ARG_KEY}(.*?){ARG_KEY_END}\s*{ARG_VALUE}(.*?)(?:{ARG_VALUE_END}\s*|\Z)", re.DOTALL)


class GlmFormat(ToolFormat):
    """See `ToolFormat`; `breaks_lines` is the older form. A grammar enforces only the ends of texts."""

    markers: Sequence[str] = (GLM_START, GLM_END, ARG_KEY, ARG_KEY_END, ARG_VALUE, ARG_VALUE_END)

    def __init__(self, *, breaks_lines: bool) -> None:
        self._break = "\n" if breaks_lines else ""

    def open_parser(self, tools: Sequence[Tool], *, is_enforced: bool) -> CallParser:
        """Return a parser that gives calls when they are complete."""
        by_name = {tool.name: tool for tool in tools}
        heads = list(by_name) if is_enforced else []
        return BlockParser(
            (GLM_START,),
            lambda _: TagFinder(GLM_END, ARG_VALUE, ARG_VALUE_END),
            lambda _, body: read_glm_block(body, by_name),
            heads=heads,
        )

    def _write_grammar(self, asked: Asked) -> str | None:
        """Return a grammar of calls, their arguments in the schema's order, and of text before them unless there must
        be a call.
        """
        start, end, *marks, value_end = (asked.specials.get(marker, quote_lark(marker)) for marker in self.markers)
        key, key_end, value = marks
        new_line = quote_lark(self._break) if self._break else ""
        more = f"({new_line} {start} call)*" if asked.is_parallel else ""
        rules = f"calls: call {more}\n" + write_rule("call", [f"call_{index}" for index in range(len(asked.tools))])
        is_token = ARG_VALUE_END in asked.specials  # else the marker's spelling ends a text
        words = f"text: WORDS? {value_end}\nWORDS: {write_text_without(ARG_VALUE_END)}\n"
        rules += words if is_token else f"text[suffix={value_end}]: /(?s:.*)/\n"
        for index, tool in enumerate(asked.tools):
            arguments, parts, values = Arguments(tool), [quote_lark(tool.name), new_line], ""
            for number, name in enumerate(arguments.properties):
                rule = f"call_{index}_{number}"
                pair = f"{key} {quote_lark(name)} {key_end} {new_line} {value} {rule} {new_line}"
                parts.append(pair if name in arguments.required else f"({pair})?")
                values += arguments.write_value_rule(rule, name, value_end)
            rules += f"call_{index}: {' '.join(parts)} {end}\n{values}"
        return write_marked_grammar(GLM_START, rules, asked)


def read_glm_block(text: str, tools: Mapping[str, Tool]) -> list[Call] | None:
    """Return the call in the text of one block, without its end; None if it calls no known tool."""
    name, key, rest = text.partition(ARG_KEY)
    tool = tools.get(name.strip())
    if tool is None:
        return None
    schemas, arguments, place = Arguments(tool), dict[str, object](), 0
    rest = (key + rest).strip()
    while place < len(rest):
        pair = _PAIR.match(rest, place)
        if pair is None:
            return None
        key = pair[1].strip()
        arguments[key] = schemas.read_value(key, pair[2])
        place = pair.end()
    return [(tool.name, arguments)]


FUNCTION, SEED_START, MINIMAX_START = "<function=", "<seed:tool_call>", "<minimax:tool_call>"
_PARAMETER_END = "</parameter>"
_MAX_TAG_CHARACTERS = 300


class Spelling:
    """A family's spelling of such calls: the marks around one, and whether values have lines of their own.

    With `names` tags say `name="..."`, and all calls stand between one pair of marks.
    """

    def __init__(self, start: str = "<tool_call>", *, breaks_lines: bool = True, names: bool = False) -> None:
        self.start, self.end, self.is_shared = start, f"</{start[1:]}", names
        self.line, line = "\n" if breaks_lines else "", r"\n?" if breaks_lines else ""
        self.function, self.parameter, self.tag_end = FUNCTION, "<parameter=", ">"
        self.function_end = "</function>"
        if names:
            self.function, self.parameter, self.tag_end = '<invoke name="', '<parameter name="', '">'
            self.function_end = "</invoke>"
        self.value_end = f"{self.line}{_PARAMETER_END}\n"
        self.follows = (self.parameter, self.function_end, self.end)
        parameter, tag_end, key = self.parameter, self.tag_end, '[^>"\n]+' if names else "[^>\n]+"
        self.key = key
        self.tags = re.compile(f"{self.function_end}|{self.end}|{parameter}{key}{tag_end}{line}")
        self.loose_ends = re.compile(rf"{line}</parameter>|\n(?={parameter}({key}){tag_end})")
        self.block = re.compile(rf"\s*(?:{self.function})?({key}){tag_end}(.*)", re.DOTALL)


class QwenXmlFormat(ToolFormat):
    """See `ToolFormat`. A grammar enforces the types of values, but texts may be any text."""

    def __init__(self, spelling: Spelling | None = None) -> None:
        self._spelling = spelling or Spelling()
        self.markers = (self._spelling.start, self._spelling.end)

    def open_parser(self, tools: Sequence[Tool], *, is_enforced: bool) -> CallParser:
        """Return a parser that gives calls when they are complete."""
        by_name = {tool.name: tool for tool in tools}
        own = self._spelling
        heads = [f"{own.function}{name}{own.tag_end}" for name in by_name] if is_enforced else []
        return BlockParser(
            (own.start, own.function),
            lambda start: _Finder(own, by_name, is_strict=is_enforced and (own.is_shared or start == own.start)),
            lambda start, body: read_block(
                own, body, by_name, is_strict=is_enforced and (own.is_shared or start == own.start)
            ),
            own.end,
            heads,
        )

    def _write_grammar(self, asked: Asked) -> str | None:
        """Return a grammar of calls, their arguments in the schema's order, and of text before them unless there must
        be a call.
        """
        start, end = (asked.specials.get(marker, quote_lark(marker)) for marker in self.markers)
        before, between, behind = ('"\\n"', "", end) if self._spelling.is_shared else ("", f'"\\n" {start}', "")
        more = f"({between} call)*" if asked.is_parallel else ""
        rules = f"calls: {before} call {more} {behind}\n"
        rules += write_rule("call", [f"call_{index}" for index in range(len(asked.tools))])
        rules += f"text[suffix={quote_lark(self._spelling.value_end)}]: /(?s:.*)/\n"
        for index, tool in enumerate(asked.tools):
            rules += _write_call_rules(self._spelling, f"call_{index}", tool, end)
        return write_marked_grammar(self._spelling.start, rules, asked)


def _write_call_rules(own: Spelling, rule: str, tool: Tool, end: str) -> str:
    """Return the rule for calls of one tool, and those for its values."""
    arguments, parameters, values = Arguments(tool), [], ""
    for index, key in enumerate(arguments.properties):
        parameter = quote_lark(f"{own.parameter}{key}{own.tag_end}{own.line}") + f" {rule}_{index}"
        parameters.append(parameter if key in arguments.required else f"({parameter})?")
        values += arguments.write_value_rule(f"{rule}_{index}", key, quote_lark(own.value_end))
    head = quote_lark(f"{'' if own.is_shared else chr(10)}{own.function}{tool.name}{own.tag_end}\n")
    close = f'"{own.function_end}\\n" {"" if own.is_shared else end}'
    return f"{rule}: {head} {' '.join(parameters)} {close}\n{values}"


class _Finder:
    """Finds the end of a block behind its last value; see `EndFinder` and `find_value_end`."""

    passed = None

    def __init__(self, own: Spelling, tools: Mapping[str, Tool], *, is_strict: bool) -> None:
        self._own = own
        self._tools, self._is_strict = tools, is_strict
        self._keys: Collection[str] = ()
        self._place, self._is_inside = 0, False

    def find(self, text: str) -> tuple[int, int] | None:
        """Return where the end marker begins and ends, if it is there."""
        while True:
            if self._is_inside:
                end, self._place = find_value_end(self._own, text, self._place, self._keys, is_strict=self._is_strict)
                if end is None:
                    return None
                self._is_inside = False
            tag = self._own.tags.search(text, self._place)
            if tag is None:
                begun = text.rfind("<", self._place)
                self._place = begun if begun >= max(0, len(text) - _MAX_TAG_CHARACTERS) else len(text)
                return None
            if not tag[0].startswith(self._own.parameter):
                return tag.span()
            if tag.end() == len(text) and self._own.line and not tag[0].endswith("\n"):  # the line may still end
                return None
            self._place, self._is_inside = tag.end(), True
            if not self._is_strict:
                self._keys = self._keys or _list_keys(self._own, text, self._tools)


def find_value_end(
    own: Spelling, text: str, place: int, keys: Collection[str], *, is_strict: bool, is_whole: bool = False
) -> tuple[int | None, int]:
    """Return the end of a value that does not end before `place`, and where the text after its end tag begins.

    If no end is certain yet and more text may come (unless it `is_whole`), returns None and the place to look from next
    time. If a grammar was enforced (`is_strict`), only the exact end tag ends a value. Otherwise models leave out line
    breaks and end tags, and write end tags into values: there an end tag counts if a tag follows, and the beginning of
    another argument of `keys` also ends the value.
    """
    if is_strict:
        end, next_place = text.find(own.value_end, place), len(text) - hold_back(text[place:], own.value_end)
        return (end, end + len(own.value_end)) if end >= 0 else (next_place if is_whole else None, next_place)
    for tag in own.loose_ends.finditer(text, place):
        if not tag[0].endswith(_PARAMETER_END):
            if not keys or tag[1] in keys:
                return tag.span()
            continue
        rest = text[tag.end() :].lstrip()
        if not is_whole and (not rest or any(follow.startswith(rest) for follow in own.follows)):
            return None, tag.start()
        if not rest or rest.startswith(own.follows):
            return tag.start(), len(text) - len(rest)
    if is_whole:
        return len(text), len(text)
    begun = max(text.rfind("\n", place), text.rfind("<", place))
    begun -= text.startswith("\n", begun - 1) and begun > place
    return None, begun if begun >= max(0, len(text) - _MAX_TAG_CHARACTERS) else len(text)


def read_block(own: Spelling, text: str, tools: Mapping[str, Tool], *, is_strict: bool) -> list[Call] | None:
    """Return the call in the text of one block, without its end; None if it calls no known tool."""
    block = own.block.fullmatch(text)
    tool = None if block is None else tools.get(block[1].strip())
    if block is None or tool is None:
        return None
    schemas, arguments, place = Arguments(tool), dict[str, object](), 0
    body, keys = _drop_ends(own, block[2]), schemas.properties
    names = [*map(re.escape, sorted(keys, key=len, reverse=True)), own.key]
    parameter = re.compile(rf"\s*{own.parameter}({'|'.join(names)}){own.tag_end}(?:{own.line})?")
    while body[place:].strip():
        begin = parameter.match(body, place)
        if begin is None:
            return None
        end, place = find_value_end(own, body, begin.end(), keys, is_strict=is_strict, is_whole=True)
        arguments[begin[1]] = schemas.read_value(begin[1], body[begin.end() : end])
    return [(tool.name, arguments)]


def _list_keys(own: Spelling, text: str, tools: Mapping[str, Tool]) -> Collection[str]:
    """Return the arguments of the tool that the text of a block calls."""
    block = own.block.match(text)
    tool = None if block is None else tools.get(block[1].strip())
    return () if tool is None else Arguments(tool).properties


def _drop_ends(own: Spelling, body: str) -> str:
    """Return the body without end markers of a block behind a value that has no end tag."""
    bare = body.rstrip()
    for end in (own.end, own.function_end):
        bare = bare.removesuffix(end).rstrip()
    return bare if len(bare) < len(body.rstrip()) else body
