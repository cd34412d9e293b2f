"""Calls as Phi-4-mini and Granite 3 write them: `<|tool_call|>[{"name": ..., "arguments": {...}}, ...]`.

Phi-4-mini closes the list with `<|/tool_call|>`; Nemotron Nano 2 has `<TOOLCALL>` and `</TOOLCALL>`. Source: the model
card of microsoft/Phi-4-mini-instruct and the chat templates of Granite 3 and Nemotron Nano 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mlxr.service.requests import Tool
from mlxr.service.tools.format import CallParser, ToolFormat, quote_lark, write_list_rules, write_marked_grammar
from mlxr.service.tools.mistral import MarkedParser

START, END = "<|tool_call|>", "<|/tool_call|>"
NEMOTRON_START, NEMOTRON_END = "<TOOLCALL>", "</TOOLCALL>"


class Phi4Format(ToolFormat):
    """See `ToolFormat`; calls are a list behind `start`, closed by `end` unless that is empty."""

    def __init__(self, start: str, end: str) -> None:
        self._start, self._end = start, end
        self.markers: Sequence[str] = (start, end) if end else (start,)

    def open_parser(self, tools: Sequence[Tool], *, is_enforced: bool) -> CallParser:
        """Return a parser of the calls behind the marker."""
        return MarkedParser(frozenset(tool.name for tool in tools), self._start, self._end, is_enforced=is_enforced)

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
        end = specials.get(self._end, quote_lark(self._end)) if self._end else ""
        rules = self.write_rules(tools, end, is_parallel=is_parallel)
        return write_marked_grammar(self._start, rules, must_call=must_call, specials=specials, answer=answer)

    def write_rules(self, tools: Sequence[Tool], end: str, *, is_parallel: bool) -> str:
        """The rule `calls` of a Lark grammar, which ends with `end`, and those below it."""
        return write_list_rules(tools, is_parallel=is_parallel, end=end)
