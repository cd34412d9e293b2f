"""Calls as GLM 4.5 to 4.7 write them: `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`.

Up to GLM 4.6 every part stands on a line of its own. Source: the chat templates of GLM-4.5, GLM-4.6 and GLM-4.7-Flash.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

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

START, END = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_PAIR = re.compile(rf"\s*{KEY}(.*?){KEY_END}\s*{VALUE}(.*?)(?:{VALUE_END}\s*|\Z)", re.DOTALL)


class GlmFormat(ToolFormat):
    """See `ToolFormat`; `breaks_lines` is the older form. Of texts a grammar holds nothing but where they end."""

    markers: Sequence[str] = (START, END, KEY, KEY_END, VALUE, VALUE_END)

    def __init__(self, *, breaks_lines: bool) -> None:
        self._break = "\n" if breaks_lines else ""

    def open_parser(self, tools: Sequence[Tool], *, is_enforced: bool) -> CallParser:
        """Return a parser that gives calls when they are complete."""
        by_name = {tool.name: tool for tool in tools}
        heads = list(by_name) if is_enforced else []
        return BlockParser(
            (START,),
            lambda _: TagFinder(END, VALUE, VALUE_END),
            lambda _, body: read_block(body, by_name),
            heads=heads,
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
        """Calls, and text before them unless there must be a call. Arguments come in the order of the schema."""
        start, end, *marks, value_end = (specials.get(marker, quote_lark(marker)) for marker in self.markers)
        key, key_end, value = marks
        new_line = quote_lark(self._break) if self._break else ""
        more = f"({new_line} {start} call)*" if is_parallel else ""
        rules = f"calls: call {more}\n" + write_rule("call", [f"call_{index}" for index in range(len(tools))])
        is_token = VALUE_END in specials  # else a text ends where the marker is spelt
        words = f"text: WORDS? {value_end}\nWORDS: {write_text_without(VALUE_END)}\n"
        rules += words if is_token else f"text[suffix={value_end}]: /(?s:.*)/\n"
        for index, tool in enumerate(tools):
            arguments, parts, values = Arguments(tool), [quote_lark(tool.name), new_line], ""
            for number, name in enumerate(arguments.properties):
                rule = f"call_{index}_{number}"
                pair = f"{key} {quote_lark(name)} {key_end} {new_line} {value} {rule} {new_line}"
                parts.append(pair if name in arguments.required else f"({pair})?")
                values += arguments.write_value_rule(rule, name, value_end)
            rules += f"call_{index}: {' '.join(parts)} {end}\n{values}"
        return write_marked_grammar(START, rules, must_call=must_call, specials=specials, answer=answer)


def read_block(text: str, tools: Mapping[str, Tool]) -> list[Call] | None:
    """The call in the text of one block, without its end; None if it is none of a known tool."""
    name, key, rest = text.partition(KEY)
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
