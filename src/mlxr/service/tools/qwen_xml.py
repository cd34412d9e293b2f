"""Calls as Qwen3-Coder, Qwen 3.5 and Nemotron 3 write them: `<function=NAME>`, and `<parameter=KEY>` for each argument.

Tags stand on lines of their own, between `<tool_call>` and `</tool_call>`; models forget the first of these. Source:
the chat templates of Qwen3-Coder, Qwen3.5-4B and NVIDIA-Nemotron-3-Nano-30B-A3B.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from mlxr.service.requests import Tool
from mlxr.service.tools.blocks import BlockParser, Call, Ending
from mlxr.service.tools.format import CallParser, ToolFormat, quote_lark, write_marked_grammar, write_rule
from mlxr.service.tools.values import list_properties, list_required, read_value, write_value_rule

START, END, FUNCTION = "<tool_call>", "</tool_call>", "<function="
_VALUE_END = "\n</parameter>\n"
_ENDING = Ending("</function>", "<parameter=", "</parameter>")
_BLOCK = re.compile(r"\s*(?:<function=)?([^>\n]+)>(.*)", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)(?:\n?</parameter>\s*|\n(?=<parameter=)|\Z)", re.DOTALL)


class QwenXmlFormat(ToolFormat):
    """See `ToolFormat`. A grammar holds what values are, but texts may be any text."""

    markers: Sequence[str] = (START, END)

    def open_parser(self, tools: Sequence[Tool], *, is_enforced: bool) -> CallParser:
        """Return a parser that gives calls when they are complete."""
        by_name = {tool.name: tool for tool in tools}
        heads = [f"{FUNCTION}{name}>" for name in by_name] if is_enforced else []
        return BlockParser((START, FUNCTION), _ENDING, lambda body: read_block(body, by_name), END, heads)

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
        start, end = (specials.get(marker, quote_lark(marker)) for marker in (START, END))
        more = f'("\\n" {start} call)*' if is_parallel else ""
        rules = f"calls: call {more}\n" + write_rule("call", [f"call_{index}" for index in range(len(tools))])
        rules += f"text[suffix={quote_lark(_VALUE_END)}]: /(?s:.*)/\n"
        for index, tool in enumerate(tools):
            rules += _write_call_rules(f"call_{index}", tool, end)
        return write_marked_grammar(START, rules, must_call=must_call, specials=specials, answer=answer)


def _write_call_rules(rule: str, tool: Tool, end: str) -> str:
    """The rule for calls of one tool, and those for its values."""
    required, parameters, values = list_required(tool), [], ""
    for index, (key, schema) in enumerate(list_properties(tool).items()):
        parameter = quote_lark(f"<parameter={key}>\n") + f" {rule}_{index}"
        parameters.append(parameter if key in required else f"({parameter})?")
        values += write_value_rule(f"{rule}_{index}", tool, schema, quote_lark(_VALUE_END))
    head = quote_lark(f"\n{FUNCTION}{tool.name}>\n")
    return f'{rule}: {" ".join([head, *parameters])} "</function>\\n" {end}\n{values}'


def read_block(text: str, tools: Mapping[str, Tool]) -> list[Call] | None:
    """The call in the text of one block, without its end; None if it is none of a known tool."""
    block = _BLOCK.fullmatch(text)
    tool = None if block is None else tools.get(block[1].strip())
    if block is None or tool is None:
        return None
    properties, arguments, place = list_properties(tool), dict[str, object](), 0
    body = block[2].strip()
    for end in (END, _ENDING.end):  # behind a value that was not ended
        body = body.removesuffix(end).rstrip()
    while place < len(body):
        parameter = _PARAMETER.match(body, place)
        if parameter is None:
            return None
        arguments[parameter[1]] = read_value(parameter[2], properties.get(parameter[1]))
        place = parameter.end()
    return [(tool.name, arguments)]
